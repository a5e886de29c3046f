"""What a run begins with: a draft's config for its target, its first parameters, and the first state."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from convert import LoadedTarget, load_draft
from convert.trees import flatten, nest
from dflash_jax import parameters, sharding
from dflash_jax.config import DraftConfig, LayerConfig, TargetConfig, TransformerConfig, check_pair, default_taps
from dflash_jax.errors import UserError, check
from dflash_jax.parameters import Params
from training import optimizer, together
from training.config import RunConfig
from training.step import Task, TrainState

FROM_TARGET = "target"


def draft_config(config: RunConfig, target: TargetConfig) -> DraftConfig:
    """Return the config of a new draft: the target's sizes, and the run's own.

    Raises:
        UserError: taps or a mask token that the target does not have.
    """
    shape = config.draft
    most = max(target.num_layers - 2, 0)
    ids = default_taps(target.num_layers, shape.taps) if 0 < shape.taps <= most else ()
    check(
        len(set(ids)) == shape.taps and all(0 <= i <= most for i in ids),
        f"--draft.taps: {shape.taps} do not fit a target of {target.num_layers} layers; fewer is right",
    )
    mask = shape.mask_token_id
    if mask is None:
        raise UserError("--draft.mask-token-id: not set; a token that no text has is right, neither padding nor a stop")
    check(
        mask < target.vocab_size and mask not in target.stop_token_ids,
        f"--draft.mask-token-id: {mask}; a row of the target's embedding (0 to {target.vocab_size - 1}) that is no "
        "stop token is right",
    )
    sizes = {field.name: getattr(target, field.name) for field in dataclasses.fields(TransformerConfig)}
    # Layers that slide may turn by other angles than those that see all, as the draft's do.
    rotary = next((layer.rotary for layer in target.layers if layer.window is None), target.layers[0].rotary)
    own = {
        "layers": (LayerConfig(rotary, causal=False),) * shape.layers,
        "qk_norm": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    return DraftConfig(
        **sizes | own,
        block_size=shape.block_size,
        mask_token_id=mask,
        target_layer_ids=ids,
        num_target_layers=target.num_layers,
    )


def initial_draft(config: RunConfig, target: LoadedTarget, mesh: Mesh) -> tuple[DraftConfig, Params]:
    """Return the draft that a run begins with, its parameters in float32, spread over a mesh.

    Random, from the target's own layers, or from another draft, whose config is then the run's.

    Raises:
        UserError: a draft to begin with that is not of this target, or not of the shape that the run asks for.
    """
    # The generation config may name stops that the config does not.
    made = draft_config(config, dataclasses.replace(target.config, stop_token_ids=target.stop_token_ids))
    if config.init_from is None or config.init_from == FROM_TARGET:
        params = _random(made, mesh, config.seed)
        return made, params if config.init_from is None else with_layers_of(target, made, params)
    with together.read_alike(functools.partial(sharding.place, mesh)) as place:
        loaded = load_draft(config.init_from, "float32", place=place)
    check(
        loaded.config.is_bare,
        f"--init-from {config.init_from}: it has a head of its own, and cannot be trained here; a draft that scores "
        "with the target's is right",
    )
    try:
        check_pair(target.config, loaded.config)
    except UserError as error:
        raise UserError(f"--init-from {config.init_from}: not a draft for this target: {error}") from error
    for flag, found, asked in (
        ("--draft.block-size", loaded.config.block_size, made.block_size),
        ("--draft.mask-token-id", loaded.config.mask_token_id, made.mask_token_id),
        ("--draft.layers", loaded.config.num_layers, made.num_layers),
        ("--draft.taps", len(loaded.config.target_layer_ids), len(made.target_layer_ids)),
    ):
        check(found == asked, f"{flag}: {asked}, and {config.init_from} has {found}; {flag} {found} is right")
    return loaded.config, loaded.params


def with_layers_of(target: LoadedTarget, draft: DraftConfig, params: Params) -> Params:
    """Put layers of the target, evenly spread, in place of the draft's, and let it begin with the mean of its taps.

    What the target's layers lack (norms of queries and keys, in a Llama) stays as it is.
    """
    theirs, ours = flatten(target.params), flatten(params)
    spread = np.linspace(0, target.config.num_layers - 1, draft.num_layers).round().astype(int).tolist()
    for path in ours:
        head, _, rest = path.partition("/")
        source = f"layers_{spread[int(head.removeprefix('layers_'))]}/{rest}" if head.startswith("layers_") else path
        if source in theirs:
            moved = jax.device_put(theirs[source], ours[path].sharding)
            ours[path] = jnp.array(moved, jnp.float32, copy=True)  # a step gives its parameters away
    taps = len(draft.target_layer_ids)
    mean = np.tile(np.eye(draft.hidden_size, dtype=np.float32) / taps, (taps, 1))
    ours["fc/kernel"] = sharding.place(ours["fc/kernel"].sharding.mesh, ("fc", "kernel"), mean)
    return nest(ours.items())


def first_state(task: Task, params: Params) -> TrainState:
    """Return the state that a run begins with, each moment beside its parameter."""
    init = optimizer.build(task.optimizer, task.steps).init
    where = sharding.shardings(task.mesh, jax.eval_shape(init, params))
    step = sharding.put(task.mesh, sharding.WHOLE, np.zeros((), np.int32))
    return TrainState(step, params, jax.jit(init, out_shardings=where)(params))


def fingerprint(params: Params) -> str:
    """Return a digest of a model's weights as they lie in memory, computed where they lie."""
    sums = _sums(params)
    content = [(path, leaf.shape, leaf.dtype.name) for path, leaf in flatten(params).items()]
    return hashlib.blake2b(repr((content, [int(total) for total in sums])).encode(), digest_size=16).hexdigest()


def _random(config: DraftConfig, mesh: Mesh, seed: int) -> Params:
    where = sharding.shardings(mesh, parameters.shapes(config))
    return jax.jit(parameters.init, static_argnums=0, out_shardings=where)(config, jax.random.key(seed))


@jax.jit
def _sums(params: Params) -> list[jax.Array]:
    def total(leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]).astype(
            jnp.uint32
        )
        place: Any = jnp.zeros((), jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        # Murmur's finish: a plain product with the place does not see rows of round numbers exchanged. Sums wrap.
        mixed = bits ^ (place * jnp.uint32(2654435761))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
        return mixed.sum(dtype=jnp.uint32)

    return [total(leaf) for leaf in flatten(params).values()]
