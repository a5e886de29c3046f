"""Memory of a training step by length and anchors: `python -m benchmarks.training_memory`.

A small pair, so that what grows is what attention and logits need, not weights. Beside what the compiler reserves
stands what the process came to hold at most, over what it held before the step, which Linux tells; each in a process
of its own.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.training import plain_task
from dflash_jax import parameters
from dflash_jax.config import DraftConfig, LayerConfig, TargetConfig
from dflash_jax.reading import stack
from dflash_jax.rope import Rotary
from training.initial import first_state
from training.step import Batch, Task, compile_step

LENGTHS, ANCHORS = (1024, 2048, 4096, 8192), (64, 128, 256, 512)
MIB = 2**20


def main() -> None:
    """Measure every pair of length and anchors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, type=int, metavar=("LENGTH", "ANCHORS"), help="measure one, and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    print("MiB that the compiler reserves for temporaries / that the process grew by, of one step\n")
    print("| length | " + " | ".join(f"{anchors} anchors" for anchors in ANCHORS) + " |")
    print("|---" * (len(ANCHORS) + 1) + "|")
    for length in LENGTHS:
        cells = []
        for anchors in ANCHORS:
            command = [sys.executable, "-m", "benchmarks.training_memory", "--one", str(length), str(anchors)]
            found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            cells.append(f"{found['compiled']:.0f} / {found['measured']:.0f}")
        print(f"| {length:,} | " + " | ".join(cells) + " |", flush=True)


def measure(length: int, anchors: int) -> dict[str, float]:
    """Compile a step and take it."""
    task = _task(anchors)
    layers, params = (parameters.init(config, jax.random.key(0)) for config in (task.target, task.draft))
    target = stack(task.mesh, task.target, task.draft.target_layer_ids, layers, through=False)
    state = first_state(task, params)
    tokens = np.random.default_rng(0).integers(0, task.target.vocab_size, (1, length))
    batch = Batch(jnp.asarray(tokens, jnp.int32), jnp.ones((1, length), bool), jnp.zeros((1, length), jnp.int32))
    seed, signals = jnp.uint32(0), jnp.zeros(1, jnp.int32)
    compiled = compile_step(task, target, state, batch, seed, signals)
    reserved: Any = compiled.memory_analysis()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: compiling took more
    before = _peak()
    jax.block_until_ready(compiled(target, state, batch, seed, signals))
    return {"compiled": reserved.temp_size_in_bytes / MIB, "measured": _peak() - before}


def _task(anchors: int) -> Task:
    rotary = Rotary(theta=1e4)
    target = TargetConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_positions=8192,
        layers=(LayerConfig(rotary),) * 4,
    )
    shared = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
    names = {field.name for field in dataclasses.fields(DraftConfig)}
    own = {
        "layers": (LayerConfig(rotary, causal=False),) * 2,
        "block_size": 16,
        "mask_token_id": 0,
        "target_layer_ids": (0, 2),
    }
    draft = DraftConfig(**{name: value for name, value in shared.items() if name in names} | own)
    return plain_task(target, draft, anchors)


def _peak() -> float:
    [kib] = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) / 1024


if __name__ == "__main__":
    main()
