"""Ours, transformers and the published reference, in turns on the same weights and prompts.

    python -m benchmarks.against_reference --prompts gsm8k_test.jsonl --num-prompts 30

One row, greedy, float32, the demo pair; times leave the prefill out. It needs torch and PyPI's `dflash`, as tests do.
"""

import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert import cli, load_tokenizer, progress
from convert.demo_target import find_demo_target
from inference import prompts
from inference.demo import DEMO_DRAFT, QUESTIONS, Pace, compare
from inference.engine import Engine, SamplingConfig
from inference.flags import whole

BLOCK_SIZE = 8


class Reference:
    """The published torch implementation, and transformers' own loop, on the demo pair."""

    def __init__(self) -> None:
        import dflash.model
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._dflash = torch, dflash.model
        self._dflash._cuda_time = time.perf_counter  # its clock asks for CUDA
        path = find_demo_target()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._target: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            ).eval()
            self._draft = self._dflash.DFlashDraftModel.from_pretrained(DEMO_DRAFT, dtype=torch.float32).eval()

    def decode(self, prompt: list[int], new_tokens: int, stops: list[int], block_size: int) -> tuple[list[int], Pace]:
        """Answer as the reference does; a block of 1 is its plain decoding."""
        ids = self._torch.tensor([prompt])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self._dflash.dflash_generate(
                self._draft, self._target, ids, new_tokens, stops, block_size=block_size, return_stats=True
            )
        tokens = out.output_ids[0, len(prompt) :].tolist()
        seconds = out.time_per_output_token * out.num_output_tokens
        return tokens, Pace(len(tokens) - 1, len(out.acceptance_lengths), seconds)

    def generate(self, prompt: list[int], new_tokens: int, stops: list[int]) -> tuple[list[int], Pace]:
        """Answer with `generate` and its cache; what the first token takes is taken off."""
        began = time.perf_counter()
        self._generate(prompt, 1, stops)
        first = time.perf_counter()
        tokens = self._generate(prompt, new_tokens, stops)
        seconds = (time.perf_counter() - first) - (first - began)
        return tokens, Pace(len(tokens) - 1, len(tokens) - 1, seconds)

    def _generate(self, prompt: list[int], new_tokens: int, stops: list[int]) -> list[int]:
        ids = self._torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": stops, "pad_token_id": stops[0]}
        with self._torch.inference_mode():
            out = self._target.generate(ids, attention_mask=self._torch.ones_like(ids), **settings)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def main(argv: Sequence[str]) -> None:
    """Answer every prompt five ways, and compare."""
    parser = cli.Parser(prog="python -m benchmarks.against_reference", description=__doc__)
    parser.add_argument("--prompts", metavar="FILE.jsonl", help='rows of {"question": …} (default: the demo\'s)')
    parser.add_argument("--num-prompts", type=whole(1), default=30)
    parser.add_argument("--max-new-tokens", type=whole(2), default=128)
    args = parser.parse_args(argv)
    questions = _questions(args.prompts)[: args.num_prompts]
    tokenizer = load_tokenizer(str(find_demo_target()))
    encoded = [prompts.encode(prompts.from_text(question, "question"), tokenizer) for question in questions]
    engine = Engine.load(str(find_demo_target()), str(DEMO_DRAFT), block_size=BLOCK_SIZE)
    reference, stops = Reference(), list(engine.stop_token_ids)
    paces: dict[str, list[Pace]] = {}
    same = 0
    asked = [encoded[0], *encoded]  # the first once more, to warm up
    for i, prompt in enumerate(progress.show(asked, len(asked), "answering five ways")):
        found: dict[str, tuple[list[int], Pace]] = {}
        for name, speculate in (("ours, blocks", True), ("ours, plain", False)):
            [answer] = engine.generate([prompt], SamplingConfig(args.max_new_tokens), speculate)
            found[name] = (answer.token_ids, Pace.of([answer]))
        found["reference, blocks"] = reference.decode(prompt, args.max_new_tokens, stops, BLOCK_SIZE)
        found["reference, plain"] = reference.decode(prompt, args.max_new_tokens, stops, 1)
        found["transformers"] = reference.generate(prompt, args.max_new_tokens, stops)
        if i == 0:
            continue
        same += all(tokens == found["ours, plain"][0] for tokens, _ in found.values())
        for name, (_, pace) in found.items():
            paces.setdefault(name, []).append(pace)
    total = {name: sum(some[1:], start=some[0]) for name, some in paces.items()}
    print(f"{len(encoded)} prompts, {total['ours, plain'].tokens} tokens; the same five times in {same}")
    for name, pace in total.items():
        print(f"{name:18} {1e3 * pace.block_seconds:6.1f} ms a pass, {pace.tokens_per_second:5.1f} tokens/s")
    print(f"ours:      {compare(total['ours, blocks'], total['ours, plain'])}")
    print(f"reference: {compare(total['reference, blocks'], total['reference, plain'])}")
    for what, one, other in (
        ("our block over the reference's", "ours, blocks", "reference, blocks"),
        ("our token over the reference's", "ours, plain", "reference, plain"),
        ("our token over transformers'", "ours, plain", "transformers"),
    ):
        print(f"{what}: {total[one].block_seconds / total[other].block_seconds:.2f}")


def _questions(path: str | None) -> list[str]:
    if path is None:
        return list(QUESTIONS)
    return [json.loads(line)["question"] for line in Path(path).read_text().splitlines()]


if __name__ == "__main__":
    cli.run(main)
