"""What a process of a mesh test does: decode on two rows of four devices, and print what came out as JSON."""

import dataclasses
import json
import re
import sys
from typing import Any

import jax
import numpy as np

from convert import processes
from dflash_jax import sharding
from inference import decode
from inference.engine import Engine, SamplingConfig
from tests import tiny

SIZES: dict[str, Any] = {"vocab_size": 12, "num_heads": 8, "num_kv_heads": 4}
TARGET = dataclasses.replace(tiny.TARGET, **SIZES, layers=tiny.TARGET.layers[:3])
DRAFT = dataclasses.replace(tiny.DRAFT, **SIZES, mask_token_id=11, target_layer_ids=(0, 1))
GREEDY, SAMPLED = SamplingConfig(12), SamplingConfig(12, temperature=1.0, top_k=6, top_p=0.9, seed=2)


def answers(engine: Engine) -> list[list[int]]:
    """Tokens and blocks, greedy and sampled, with and without the draft, through a batch that others wait for."""
    prompts = tiny.prompts(7, seed=6, longest=90)
    return [
        ids
        for sampling in (GREEDY, SAMPLED)
        for speculate in (True, False)
        for answer in engine.generate(prompts, sampling, speculate)
        for ids in (answer.token_ids, answer.emitted_per_block)
    ]


def largest_exchanges(engine: Any) -> dict[str, int]:
    """The most elements that one device gets from others at once, in each program."""
    models, weights, state = engine._speculative, engine._weights, engine._empty_state()
    one, chunk = engine._device(1, np.int32), engine._device(np.zeros((1, 64)), np.int32)
    hidden = engine._device(np.zeros((1, 1, 16)), np.float32)
    programs = {
        "prefill": decode.prefill.lower(models, weights, state, one, chunk, one, one),
        "admit": decode.admit.lower(models, weights, state, one, hidden, engine._asked(3, 0, GREEDY)),
        "decode": decode.decode.lower(models, weights, state, one),
    }
    found = {}
    for name, program in programs.items():
        text: Any = program.compile().as_text()
        shapes = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-|reduce-scatter|collective-)[\w-]+\(", text)
        found[name] = max(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes)
    return found


def main() -> None:
    """Decode, and decode again to count compilations."""
    processes.join()
    engine: Any = tiny.engine(TARGET, DRAFT, batch_size=4, mesh=sharding.make_mesh(data=2, tensor=4))
    found = answers(engine)
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    again = answers(engine)
    result = {
        "answers": found,
        "again": again == found,
        "compiled": list(compiled),
        "exchanges": largest_exchanges(engine) if jax.process_count() == 1 else {},
        "cache": list(engine._state.target[0].keys.addressable_shards[0].data.shape),
        "processes": jax.process_count(),
    }
    if processes.first():
        json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
