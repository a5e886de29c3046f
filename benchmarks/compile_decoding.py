"""The programs of decoding compiled for a machine that is not here; a process of its own, for `benchmarks.compiled`.

`python -m benchmarks.compile_decoding TARGET MACHINE PROGRAM:LAYERS …` prints a line of JSON for each program as it is
compiled. Its environment must say JAX_PLATFORMS=cpu: nothing is computed.
"""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from dflash_jax import parameters, sharding
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.presets import TARGETS
from inference import decode
from training import machines
from training.compile_elsewhere import devices_of, exchanges, held, placed
from training.initial import draft_config
from training.presets import PRESETS

# Of a text of 2,048 tokens: what the engine makes room for, and fills.
CONTEXT, CHUNK = 2048, 256
DTYPE = jnp.dtype(jnp.bfloat16)


def main() -> None:
    """Compile what is named, and say what the compiler says of it."""
    name, where, *asked = sys.argv[1:]
    machine = machines.find(where)
    mesh = sharding.make_mesh(tensor=machine.chips, devices=devices_of(machine))
    results = os.fdopen(os.dup(1), "w")  # the compilers write to standard output as they please
    os.dup2(2, 1)
    for program, layers in (one.split(":") for one in asked):
        found = compile_program(program, *models_of(name, int(layers)), mesh, _options(program, machine))
        print(json.dumps({"program": program, "layers": int(layers)} | found), file=results, flush=True)
    results.close()


def models_of(name: str, layers: int) -> tuple[TargetConfig, DraftConfig]:
    """Return a published target cut to its first layers, and the whole target's draft, with taps that are there."""
    whole = TARGETS[name]
    draft = draft_config(PRESETS[name], whole)
    taps = tuple(min(tap, layers - 1) for tap in draft.target_layer_ids)
    target = dataclasses.replace(whole, layers=whole.layers[:layers])
    return target, dataclasses.replace(draft, target_layer_ids=taps)


def compile_program(
    program: str, target: TargetConfig, draft: DraftConfig, mesh: Mesh, options: dict[str, Any]
) -> dict[str, Any]:
    """Compile one of `PROGRAMS` for one row, with options of the compiler.

    Returns:
        Of one chip: `bytes` read and written, `flops` and `seconds` by the compiler's cost, which loops and GPUs have
        not; bytes of `temporaries`, `caches` and what is `aliased`; and the number of `exchanges`.
    """
    run, block_size, drafted = PROGRAMS[program]
    models = decode.Models(target, draft if drafted else None, block_size, mesh)
    weights = decode.Weights(_weights(mesh, target), _weights(mesh, draft) if drafted else {})
    state = _state(models)
    kept = () if run is _propose else ("state",)
    traced = jax.jit(functools.partial(run, models), donate_argnames=kept).trace(weights=weights, state=state)
    compiled = traced.lower().compile(compiler_options=options)
    memory: Any = compiled.memory_analysis()
    cost: Any = (compiled.cost_analysis() or {}) if program != "loop" else {}
    return {
        "bytes": cost.get("bytes accessed"),
        "flops": cost.get("flops"),
        "seconds": cost.get("optimal_seconds"),
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "caches": held((state.target, state.draft)),
        "exchanges": sum(one["count"] for one in exchanges(compiled.as_text() or "").values()),
    }


def _options(program: str, machine: machines.Machine) -> dict[str, Any]:
    if machine.chip.platform == machines.GPU:
        return {"xla_gpu_autotune_level": 0}
    # The cost counts twice what is fetched ahead of its use.
    return {} if program == "loop" else {"xla_msa_enable": False}


def _propose(models: decode.Models, weights: decode.Weights, state: decode.DecodeState) -> Int[Array, "b t-1"]:
    return decode.propose(models, weights, decode.anchor_tokens(state), state.draft, state.lengths)


def _verify(models: decode.Models, weights: decode.Weights, state: decode.DecodeState) -> decode.DecodeState:
    drafts = jnp.zeros((1, models.block_size - 1), jnp.int32)
    return decode.verify(models, weights, _greedy(state), decode.anchor_tokens(state), drafts)


def _block(models: decode.Models, weights: decode.Weights, state: decode.DecodeState) -> decode.DecodeState:
    return decode.decode_block(models, weights, _greedy(state))


def _prefill(models: decode.Models, weights: decode.Weights, state: decode.DecodeState) -> decode.DecodeState:
    row, start, end = jnp.zeros((), jnp.int32), state.lengths[0], state.last[0]
    return decode.prefill(models, weights, state, row, state.tokens[:, :CHUNK], start, end)[0]


def _loop(models: decode.Models, weights: decode.Weights, state: decode.DecodeState) -> decode.DecodeState:
    return decode.decode(models, weights, state, state.last[0])


def _greedy(state: decode.DecodeState) -> decode.DecodeState:
    """Make it known that nothing is sampled: the compiler then leaves out what sampling would do."""
    return state._replace(policy=state.policy._replace(temperature=jnp.zeros_like(state.policy.temperature)))


# What each runs, the slots of its block, and whether there is a draft. A draft of one token has two slots, the anchor's
# and the one that it fills. A block drafts, verifies, and extends the draft's context.
PROGRAMS: dict[str, tuple[Callable[..., Any], int, bool]] = {
    "token": (_verify, 1, False),
    "verify": (_verify, 16, False),
    "draft": (_propose, 16, True),
    "draft of one": (_propose, 2, True),
    "block": (_block, 16, True),
    "prefill": (_prefill, 16, True),
    "loop": (_loop, 16, True),
}


def _weights(mesh: Mesh, config: TargetConfig | DraftConfig) -> Any:
    return placed(mesh, parameters.shapes(config), DTYPE)


def _state(models: decode.Models) -> decode.DecodeState:
    state = jax.eval_shape(lambda: decode.empty_state(models, 1, CONTEXT + CHUNK, DTYPE))

    def lying(spec: Any, tree: Any) -> Any:
        where = NamedSharding(models.mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree)

    caches = lying(sharding.CACHE, (state.target, state.draft))
    return lying(sharding.ROWS, state._replace(target=(), draft=()))._replace(target=caches[0], draft=caches[1])


if __name__ == "__main__":
    main()
