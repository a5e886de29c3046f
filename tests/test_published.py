"""The demo pair on GSM8K, against transformers and against the published reference: minutes to an hour."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from convert import load_draft, load_target, load_tokenizer
from convert.demo_target import find_demo_target
from inference.demo import DEMO_DRAFT, first_difference
from inference.engine import Engine, Generation, SamplingConfig
from training import prepared
from training.evaluate import evaluate

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k_test.jsonl"
NEW_TOKENS = 128
TIE = 1e-4  # float32 rounds one-row and B-row products differently (law 7)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GSM8K.exists(), reason=f"needs the prompts of {GSM8K.name}, which lie beside the project"),
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(str(find_demo_target()))
    questions = [json.loads(line)["question"] for line in GSM8K.read_text().splitlines()[:200]]
    chats: list[list[dict[str, str]]] = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(str(find_demo_target()), str(DEMO_DRAFT))


@pytest.fixture(scope="module")
def torch_target() -> Any:
    """The same file read by transformers' own reader."""
    path = find_demo_target()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def test_two_hundred_answers_are_the_targets_own(engine, torch_target, prompts):
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS)
    drafted = [g.token_ids for g in engine.generate(prompts, sampling)]
    plain = [g.token_ids for g in engine.generate(prompts, sampling, speculate=False)]
    theirs = transformers_greedy(torch_target, prompts, engine.stop_token_ids)
    ties = [
        (i, name, at, margin(torch_target, prompts[i] + drafted[i][:at]))
        for name, answers in (("plain decoding", plain), ("transformers", theirs))
        for i in range(len(prompts))
        if (at := first_difference(drafted[i], answers[i])) is not None
    ]
    print(f"{sum(map(len, drafted))} tokens of {len(prompts)} answers; ties (prompt, against, token, margin): {ties}")
    assert all(gap < TIE for *_, gap in ties)
    assert len(ties) <= 2 * len(prompts) * NEW_TOKENS / 1000


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the reference calls what transformers has renamed
def test_blocks_are_the_published_references(engine, torch_target, prompts, monkeypatch):
    reference = pytest.importorskip("dflash.model", reason="needs the published reference, PyPI's `dflash`")
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)  # its clock asks for CUDA
    draft = reference.DFlashDraftModel.from_pretrained(DEMO_DRAFT, dtype=torch.float32, attn_implementation="sdpa")
    stops = list(engine.stop_token_ids)
    for prompt in prompts[:30]:
        ours = engine.generate([prompt], SamplingConfig(max_new_tokens=NEW_TOKENS))[0]
        theirs = reference.dflash_generate(
            draft.eval(), torch_target, torch.tensor([prompt]), NEW_TOKENS, stops, block_size=8, return_stats=True
        )
        assert ours.token_ids == theirs.output_ids[0, len(prompt) :].tolist()
        compare_blocks(ours, theirs.acceptance_lengths)


def test_training_walks_thirty_answers_as_decoding_did(engine, prompts, tmp_path):
    answers = engine.generate(prompts[:30], SamplingConfig(max_new_tokens=NEW_TOKENS))
    rows = [
        (line, prompt + answer.token_ids, [False] * len(prompt) + [True] * len(answer.token_ids))
        for line, (prompt, answer) in enumerate(zip(prompts, answers, strict=False), 1)
    ]
    prepared.write_shard(tmp_path, 0, "", rows)
    prepared.finish(tmp_path, 1, {})
    pair = load_target(str(find_demo_target()), "float32"), load_draft(str(DEMO_DRAFT), "float32")
    walks = evaluate(*pair, prepared.open_prepared(tmp_path), "float32")["walks"]
    assert walks == [answer.emitted_per_block for answer in answers]


def compare_blocks(ours: Generation, theirs: list[int]) -> None:
    """Blocks are equal but for those that start less than a block before the cap, which the reference shortens."""
    start = 1
    for i, size in enumerate(ours.emitted_per_block):
        if start + 8 > NEW_TOKENS:
            break
        assert size == theirs[i], (i, ours.emitted_per_block, theirs)
        start += size


def transformers_greedy(model: Any, prompts: list[list[int]], stops: tuple[int, ...]) -> list[list[int]]:
    """Greedy answers of transformers' own loop, with its cache, a few prompts at a time."""
    answers = []
    for first in range(0, len(prompts), 10):
        some = prompts[first : first + 10]
        longest = max(map(len, some))
        ids = torch.tensor([[stops[0]] * (longest - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in some])
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": list(stops)}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, pad_token_id=stops[0], **settings)
        answers += [until_stop(row, stops) for row in out[:, longest:].tolist()]
    return answers


def until_stop(tokens: list[int], stops: tuple[int, ...]) -> list[int]:
    ends = [i + 1 for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0]] if ends else tokens


def margin(model: Any, text: list[int]) -> float:
    """By how much the target prefers the likeliest token after a text."""
    with torch.inference_mode():
        top = model(torch.tensor([text])).logits[0, -1].topk(2).values
    return float(top[0] - top[1])
