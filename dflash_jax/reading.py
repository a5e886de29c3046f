"""The target over whole rows, for training: frozen, without a cache, its layers in loops.

Layers between two taps are alike, so their weights are stacked and one loop runs them. A program is then as large as
its taps are many, however deep the target is, and compiles in a fraction of the time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from dflash_jax import masks, sharding
from dflash_jax.config import TargetConfig
from dflash_jax.layers import RMSNorm
from dflash_jax.rope import angles
from dflash_jax.target import Target, TargetLayer


def stacks(config: TargetConfig, taps: tuple[int, ...], through: bool) -> list[range]:
    """Return the layers that are run, cut after each tap and wherever a layer is of another kind than the one before.

    All of them if `through`; otherwise the last tap is the last one.
    """
    count = config.num_layers if through else max(taps) + 1
    kinds = config.layers
    cuts = [i for i in range(1, count) if i - 1 in taps or kinds[i] != kinds[i - 1]]
    return [range(*edges) for edges in zip([0, *cuts], [*cuts, count], strict=True)]


def stack(
    mesh: Mesh | AbstractMesh, config: TargetConfig, taps: tuple[int, ...], params: dict[str, Any], through: bool
) -> dict[str, Any]:
    """Return a target's parameters as `read` takes them: `stack_0`, …, each leaf with a first axis of layers.

    The layers are taken out of `params` one kind of weight at a time, so that memory never holds all of them twice.
    Layers that are not run are left out, and so is the final norm where nothing comes after it.
    """
    used = ("embedding", "head", *(("final_norm",) if through else ()))
    stacked = {name: params[name] for name in used if name in params}
    for number, part in enumerate(stacks(config, taps, through)):
        layers = [params.pop(f"layers_{i}") for i in part]
        stacked[f"stack_{number}"] = _stack_trees(mesh, layers, f"stack_{number}")
    return stacked


def read(
    config: TargetConfig,
    taps: tuple[int, ...],
    params: dict[str, Any],
    tokens: Int[Array, "b s"],
    starts: Int[Array, "b s"],
    through: bool,
) -> tuple[Float[Array, "b s pd"], Float[Array, "b s d"] | None]:
    """Run whole rows of documents; `starts` says where each position's document starts.

    Args:
        config: the target's.
        taps: layers whose outputs are joined, in that order (law 1).
        params: as `stack` returns them.
        tokens: of the rows.
        starts: of the documents.
        through: whether to run all layers.

    Returns:
        Features, and hidden states after the final norm if `through`.
    """
    x: Any = Target(config).apply({"params": params}, tokens, method="embed")
    spots = masks.positions(jnp.zeros(tokens.shape[0], starts.dtype), tokens.shape[1]) - starts
    turns = {layer.rotary: angles(layer.rotary, config.head_dim, spots) for layer in config.layers}
    outputs = {}
    for number, part in enumerate(stacks(config, taps, through)):
        kind = config.layers[part.start]
        layer = TargetLayer(config, kind)

        def run(x: Any, weights: dict[str, Any], layer: TargetLayer = layer) -> tuple[Any, None]:
            return layer.apply({"params": weights}, x, turns[layer.layer.rotary], starts, method="over_row"), None

        x, _ = jax.lax.scan(run, x, params[f"stack_{number}"])
        outputs[part.stop - 1] = x
    features = jnp.concatenate([outputs[i] for i in taps], axis=-1)
    if not through:
        return features, None
    normed: Any = RMSNorm(config.rms_norm_eps).apply({"params": params["final_norm"]}, x)
    return features, normed


def _stack_trees(mesh: Mesh | AbstractMesh, trees: list[dict[str, Any]], path: str) -> dict[str, Any]:
    stacked: dict[str, Any] = {}
    for name in list(trees[0]):
        parts: list[Any] = [tree.pop(name) for tree in trees]
        here = f"{path}/{name}"
        if isinstance(parts[0], dict):
            stacked[name] = _stack_trees(mesh, parts, here)
        else:
            lies = NamedSharding(mesh, sharding.parameter_spec(here))
            stacked[name] = jax.jit(lambda *parts: jnp.stack(parts), out_shardings=lies)(*parts)
    return stacked
