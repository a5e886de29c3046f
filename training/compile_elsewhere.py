"""The step of a run compiled for devices that this machine does not have; a process of its own, for `training.plan`.

It reads what to compile as JSON from standard input, and writes what came of it as JSON to standard output. Its
environment must say JAX_PLATFORMS=cpu: nothing is computed, and no accelerator that may be there is touched.
"""

import json
import math
import os
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from dflash_jax import parameters, reading, sharding
from dflash_jax.block_attention import KEYS
from dflash_jax.config import TargetConfig
from training import machines, optimizer, products
from training.config import RunConfig
from training.initial import draft_config
from training.step import SCORED, Batch, Task, TrainState, train_step

STEPS = 1000  # of the schedule, which no program depends on
# As a driver would describe one; jax compiles for what is described.
H100 = """gpu_device_info { cuda_compute_capability { major: 9 } threads_per_block_limit: 1024 threads_per_warp: 32
 shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: %d
 shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
 platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H100" """
EXCHANGES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all"
WIDTHS = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1, "s64": 8, "f64": 8}


def main() -> None:
    """Compile one step, and say what it takes."""
    asked = json.load(sys.stdin)
    config, target = RunConfig.from_dict(asked["config"]), TargetConfig.from_hf(asked["target"])
    machine = machines.find(asked["machine"])
    mesh = sharding.make_mesh(**asked["mesh"], devices=devices_of(machine))
    results = os.fdopen(os.dup(1), "w")  # the compilers write to standard output as they please
    os.dup2(2, 1)
    json.dump(compile_step(config, target, mesh, machine.chip.platform), results)
    results.close()


def devices_of(machine: machines.Machine) -> list[Any]:
    """Return descriptions of a machine's devices."""
    if machine.chip.platform == machines.TPU:
        name, sides = f"{machine.kind}:{machine.topology}", [int(side) for side in machine.topology.split("x")]
        # A host has four chips or eight, unless there are fewer in all.
        few = {"chips_per_host_bounds": (*sides, 1)} if machine.chips < 4 else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **few).devices
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=machine.kind,
        topology=f"1x1x{machine.chips}",
        target_config=H100 % machine.chip.memory_bytes,
    )
    return described.devices


def compile_step(config: RunConfig, target: TargetConfig, mesh: Mesh, platform: str) -> dict[str, Any]:
    """Compile the very step that training runs, from shapes alone.

    Returns:
        `bytes_per_chip` by kind, `needed_bytes` in all, `flops_per_chip` of its products, `exchanges` by kind (how
        many, and bytes that a chip gets), `compile_seconds`, `compiler_seconds` and `compiler_flops` where the compiler
        tells them; or `refused`, what the compiler says where it finds no room.
    """
    task, arguments = describe(config, target, mesh)
    kinds = {
        "target": held(arguments[0]),
        "draft": held(arguments[1].params),
        "moments": held(arguments[1].moments),
        "rows": held(arguments[2]),
    }
    traced = train_step.trace(task, *arguments)
    # A query sees half of its row's pieces in the mean.
    turns = math.ceil(config.train.length / KEYS) / 2
    done = products.flops(traced.jaxpr.jaxpr, turns) / mesh.size
    found: dict[str, Any] = {"bytes_per_chip": kinds, "flops_per_chip": done}
    started = time.perf_counter()
    options = {"xla_gpu_autotune_level": 0} if platform == machines.GPU else None
    try:
        compiled = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used ([\d.]+)([MGT]) of", str(error))
        needed = float(used[1]) * 2 ** {"M": 20, "G": 30, "T": 40}[used[2]] if used else None
        return found | {"refused": str(error).splitlines()[0], "needed_bytes": needed}
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis() or {}
    kinds["temporaries"] = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    kinds["program"] = memory.generated_code_size_in_bytes
    return found | {
        "needed_bytes": sum(kinds.values()),
        "compile_seconds": time.perf_counter() - started,
        "exchanges": exchanges(compiled.as_text() or ""),
        "compiler_seconds": cost.get("optimal_seconds"),
        "compiler_flops": cost.get("flops"),
    }


def describe(config: RunConfig, target: TargetConfig, mesh: Mesh) -> tuple[Task, tuple[Any, ...]]:
    """Return the step's task and its arguments, shapes in place of arrays."""
    draft = draft_config(config, target)
    task = Task.of(config, target, draft, mesh, config.train.steps or STEPS)
    taps = draft.target_layer_ids

    def stacked(params: Any) -> Any:
        return reading.stack(mesh, target, taps, params, task.needs_teacher)

    weights = placed(mesh, jax.eval_shape(stacked, parameters.shapes(target)), jnp.dtype(task.dtype))
    if config.features.cache:
        weights = {name: weights[name] for name in ("embedding", "head") if name in weights}
    if size := config.loss.vocabulary:
        part = {
            "head": _shape((target.hidden_size, size), jnp.dtype(task.dtype)),
            "rows": _shape((target.vocab_size,), jnp.int32),
        }
        weights[SCORED] = placed(mesh, {SCORED: part})[SCORED]
    params = parameters.shapes(draft)
    moments = jax.eval_shape(optimizer.build(task.optimizer, task.steps).init, params)
    state = TrainState(_shape((), jnp.int32, mesh), placed(mesh, params), placed(mesh, moments))
    return task, (weights, state, _rows(config, task), _shape((), jnp.uint32, mesh), _signals(mesh))


def _rows(config: RunConfig, task: Task) -> Batch:
    """Return the shapes of a batch, with features where a cache has them."""
    where = NamedSharding(task.mesh, sharding.TRAINED_ROWS)
    shape = config.train.batch_size, config.train.length

    def rows(*width: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((*shape, *width), dtype, sharding=where)

    batch = Batch(rows(dtype=jnp.int32), rows(dtype=jnp.bool), rows(dtype=jnp.int32))
    if not config.features.cache:
        return batch
    d, taps, dtype = task.target.hidden_size, len(task.draft.target_layer_ids), jnp.dtype(task.dtype)
    hidden = rows(d, dtype=dtype) if task.needs_teacher else None
    return batch._replace(features=rows(taps * d, dtype=dtype), hidden=hidden)


def _signals(mesh: Mesh) -> Any:
    return jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=NamedSharding(mesh, sharding.EVERY_DEVICE))


def _shape(shape: tuple[int, ...], dtype: Any, mesh: Mesh | None = None) -> Any:
    where = NamedSharding(mesh, sharding.WHOLE) if mesh else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def placed(mesh: Mesh, tree: Any, dtype: Any = None) -> Any:
    """Give the shapes of parameters, or of moments, the places that the rules give them."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=where),
        tree,
        sharding.shardings(mesh, tree),
    )


def held(tree: Any) -> int:
    """Return the bytes that one chip holds of a tree."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def exchanges(text: str) -> dict[str, dict[str, int]]:
    """Count a program's exchanges between chips, each where it stands in the text, and the bytes that a chip gets."""
    found: dict[str, dict[str, int]] = {}
    plain = re.sub(r"/\*.*?\*/", "", text)  # as /*index=5*/ in long tuples
    for shapes, kind, start in re.findall(rf"= (\S+(?: [^=]*?)?) ({EXCHANGES})(-start)?\(", plain):
        sizes = [
            WIDTHS.get(width, 4) * math.prod(int(size) for size in shape.split(",") if size)
            for width, shape in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shapes)
        ]
        entry = found.setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        # Several that go together are a tuple; one that is only started is a tuple of what goes out and what comes in.
        entry["bytes"] += max(sizes, default=0) if start else sum(sizes)
    return found


if __name__ == "__main__":
    main()
