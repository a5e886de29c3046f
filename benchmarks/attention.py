"""Training's attention compiled for TPUs that are not here: `python -m benchmarks.attention`.

One draft layer's, forward and backward, in the sizes of Qwen3-8B: by the kernels, and in plain tiles, which other
shapes and other machines get. Nothing is run. The compiler takes the kernels' cost from what they say of themselves,
for queries that see half of the context, and counts the body of a loop once; so seconds are told of the kernels only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from convert import cli
from dflash_jax import attention_kernel
from dflash_jax.block_attention import Own, Spans, attend_spans
from training import machines
from training.compile_elsewhere import devices_of
from training.plan import check_packages

HEADS, KEY_HEADS, SIZE = 32, 8, 128
LENGTH, ANCHORS, BLOCK = 3072, 512, 16


def main(argv: Sequence[str]) -> None:
    """Compile for every machine, each in a process of its own, and print a row for each way."""
    parser = cli.Parser(prog="python -m benchmarks.attention", description=__doc__)
    known = ("v5e-4", "v5p-8", "v6e-8")
    parser.add_argument("--machines", nargs="+", choices=known, default=list(known))
    parser.add_argument("--one", choices=known, help="compile for one, here, and print JSON")
    args = parser.parse_args(argv)
    if args.one:
        _print_one(machines.find(args.one))
        return
    for name in args.machines:
        check_packages(machines.find(name), "--machines")
    print("| machine | by | temporaries, MB | results, MB | GFLOP | µs |\n|---|---|---|---|---|---|", flush=True)
    quiet = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for name in args.machines:
        command = [sys.executable, "-m", "benchmarks.attention", "--one", name]
        done = subprocess.run(command, env=os.environ | quiet, stdout=subprocess.PIPE, check=True)
        for way, found in json.loads(done.stdout).items():
            print(row(name, way, found), flush=True)


def row(name: str, way: str, found: dict[str, Any]) -> str:
    """Return a row of the table; a cost below nothing is one that the compiler does not tell."""
    costs = ["", ""]
    if found["kernels"]:
        seconds = f"{found['seconds'] * 1e6:,.0f}" if found["seconds"] > 0 else ""
        costs = [f"{found['flops'] / 1e9:,.1f}", seconds]
    sizes = [f"{found[kind] / 1e6:,.1f}" for kind in ("temporaries", "results")]
    return f"| {' | '.join([name, way, *sizes, *costs])} |"


def _print_one(machine: machines.Machine) -> None:
    results = os.fdopen(os.dup(1), "w")  # the compilers write to standard output as they please
    os.dup2(2, 1)
    found = {"kernels": compile_layer(machine)}
    attention_kernel.suits = lambda *_: False
    jax.clear_caches()
    json.dump(found | {"tiles": compile_layer(machine)}, results)
    results.close()


def compile_layer(machine: machines.Machine) -> dict[str, Any]:
    """Compile a row's attention and its gradients for one chip.

    Returns:
        `kernels`, how many there are; `temporaries` and `results` in bytes; `flops` and `seconds` as the compiler says.
    """
    where = SingleDeviceSharding(devices_of(machine)[0])

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    slots = ANCHORS * BLOCK
    queries, keys, own = (
        shape(1, heads, rows, SIZE) for heads, rows in ((HEADS, slots), (KEY_HEADS, LENGTH), (KEY_HEADS, slots))
    )
    edge = shape(1, slots, dtype=jnp.int32)
    blocks = Own(own, own, shape(BLOCK, BLOCK, dtype=jnp.bool))
    compiled = jax.jit(_gradients).lower(queries, keys, keys, Spans(edge, edge), blocks, queries).compile()
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis()
    return {
        "kernels": (compiled.as_text() or "").count('custom_call_target="tpu_custom_call"'),
        "temporaries": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "flops": cost["flops"],
        "seconds": cost["optimal_seconds"],
    }


def _gradients(queries: Array, keys: Array, values: Array, spans: Spans, own: Own, cotangent: Array) -> Any:
    def attend(queries: Array, keys: Array, values: Array, own_keys: Array, own_values: Array) -> Array:
        return attend_spans(queries, keys, values, spans, Own(own_keys, own_values, own.within))

    mixed, back = jax.vjp(attend, queries, keys, values, own.keys, own.values)
    return mixed, back(cotangent)


if __name__ == "__main__":
    cli.run(main)
