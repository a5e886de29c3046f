"""A training step of ours and one of SpecForge's, in turns: `python -m benchmarks.training`.

The same draft (the demo's sizes: hidden size 576, 5 layers, 5 taps, blocks of 16), one row of 1,024 tokens, 128
anchors, float32, AdamW, features given and random. Each has a process of its own, which takes a step whenever it is
told to. A step's slots are its anchors times the block size. It needs torch, and PyPI's `specforge` without what that
depends on.
"""

import dataclasses
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert import cli
from dflash_jax import parameters, sharding
from dflash_jax.config import DraftConfig, LayerConfig, TargetConfig
from dflash_jax.errors import UserError, check
from dflash_jax.rope import Rotary
from training.config import OptimizerConfig
from training.initial import first_state
from training.step import Batch, Task, compile_step

LENGTH, ANCHORS, BLOCK_SIZE, LAYERS, MASK = 1024, 128, 16, 5, 16
VOCABULARY, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_SIZE, TARGET_LAYERS = 49152, 576, 1536, 9, 3, 64, 30
TAPS = (1, 8, 14, 20, 27)
ROUNDS = 5
SIDES = ("ours", "specforge")
GIB = 2**30


def main(argv: Sequence[str]) -> None:
    """Take steps in turns, and compare."""
    parser = cli.Parser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--one", choices=SIDES, help="take a step of one for each line of standard input")
    args = parser.parse_args(argv)
    if args.one:
        _serve({"ours": our_step, "specforge": specforge_step}[args.one]())
        return
    for package, wheels in (("torch", "torch"), ("specforge", "--no-deps specforge accelerate")):
        check(
            importlib.util.find_spec(package) is not None, f"{package}: not installed; `pip install {wheels}` is right"
        )
    processes = {side: _start(side) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks: dict[str, int] = {}
    for turn in range(ROUNDS + 1):
        for side, process in processes.items():
            found = _take_step(side, process)
            peaks[side] = found["peak"]
            if turn:  # the first one compiles
                seconds[side].append(found["seconds"])
    for process in processes.values():
        process.communicate()
    for side in SIDES:
        print(line(side, statistics.median(seconds[side]), peaks[side]))
    faster = statistics.median(theirs / ours for ours, theirs in zip(*seconds.values(), strict=True))
    print(f"ours over specforge: slots a second {faster:.2f}, peak memory {peaks['ours'] / peaks['specforge']:.2f}")


def line(side: str, seconds: float, peak: int) -> str:
    """Say what a step takes."""
    slots = ANCHORS * BLOCK_SIZE / seconds
    return f"{side:<10} {seconds:6.2f} s a step, {slots:6.0f} draft slots/s, {peak / GIB:.2f} GiB at the peak"


def our_step() -> Callable[[], None]:
    """Return what takes one of our steps."""
    task = _task()
    state = [first_state(task, jax.jit(parameters.init, static_argnums=0)(task.draft, jax.random.key(0)))]
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32))

    target = {"embedding": normal(VOCABULARY, HIDDEN), "head": normal(HIDDEN, VOCABULARY) * HIDDEN**-0.5}
    tokens = jnp.asarray(random.integers(0, VOCABULARY, (1, LENGTH)), jnp.int32)
    documents = jnp.ones((1, LENGTH), bool), jnp.zeros((1, LENGTH), jnp.int32)
    batch = Batch(tokens, *documents, normal(1, LENGTH, len(TAPS) * HIDDEN))
    seed, signals = jnp.uint32(0), jnp.zeros(1, jnp.int32)
    take = compile_step(task, target, state[0], batch, seed, signals)

    def step() -> None:
        state[0], report = take(target, state[0], batch, seed, signals)
        jax.block_until_ready((state[0], report))

    return step


def specforge_step() -> Callable[[], None]:
    """Return what takes one of SpecForge's steps."""
    import torch
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    config: Any = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 1e5, "rope_type": "default"},
        layer_types=["full_attention"] * LAYERS,
    )
    config.block_size, config.num_target_layers = BLOCK_SIZE, TARGET_LAYERS
    config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    config._attn_implementation = "sdpa"
    draft = DFlashDraftModel(config)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(False)
    settings = {"block_size": BLOCK_SIZE, "attention_backend": "sdpa", "num_anchors": ANCHORS, "loss_decay_gamma": 7.0}
    model = OnlineDFlashModel(draft, head, embedding, MASK, **settings)
    optimizer = torch.optim.AdamW([one for one in draft.parameters() if one.requires_grad], lr=6e-4)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH))
    features, supervised = torch.randn(1, LENGTH, len(TAPS) * HIDDEN), torch.ones(1, LENGTH)

    def step() -> None:
        loss, *_ = model(tokens, features, supervised)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_task(target: TargetConfig, draft: DraftConfig, anchors: int) -> Task:
    """Return what the step of a small pair is compiled for, on the devices that there are."""
    return Task(
        target=target,
        draft=draft,
        anchors=anchors,
        loss="decay",
        gamma=7.0,
        dtype="float32",
        remat=False,
        optimizer=OptimizerConfig(),
        steps=1000,
        mesh=sharding.make_mesh(),
    )


def _task() -> Task:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "rms_norm_eps": 1e-6,
        "max_positions": 8192,
    }
    layer = LayerConfig(Rotary(theta=1e5))
    target = TargetConfig(layers=(layer,) * TARGET_LAYERS, **sizes)
    draft = DraftConfig(
        layers=(dataclasses.replace(layer, causal=False),) * LAYERS,
        block_size=BLOCK_SIZE,
        mask_token_id=MASK,
        target_layer_ids=TAPS,
        **sizes,
    )
    return plain_task(target, draft, ANCHORS)


def _serve(step: Callable[[], None]) -> None:
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)


def _start(side: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.training", "--one", side]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, **pipes)


def _take_step(side: str, process: Any) -> dict[str, Any]:
    process.stdin.write("\n")
    process.stdin.flush()
    told = process.stdout.readline()
    if not told:
        raise UserError(f"{side}: its process ended; `python -m benchmarks.training --one {side}` says why")
    return json.loads(told)


if __name__ == "__main__":
    cli.run(main)
