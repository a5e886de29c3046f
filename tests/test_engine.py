import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from convert import LoadedDraft, LoadedTarget
from dflash_jax.attention import PIECE
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError
from inference import decode
from inference.demo import first_difference
from inference.engine import Engine, SamplingConfig
from tests import tiny, torch_models

PROMPT = [7, 9, 8, 4, 0, 5, 7, 1]  # greedily answered by nine different tokens, in blocks of one to six


@pytest.fixture(scope="module")
def engine():
    return tiny.engine()


@pytest.fixture(scope="module")
def long_answer(engine):
    return engine.generate([PROMPT], SamplingConfig(max_new_tokens=60), speculate=False)[0].token_ids


def test_plain_decoding_is_the_target_run_anew_for_each_token(engine, long_answer):
    assert long_answer == tiny.plain_greedy(engine._weights.target, PROMPT, 60)


def test_speculation_changes_no_token(engine):
    prompts, sampling = tiny.prompts(60), SamplingConfig(max_new_tokens=30)
    drafted = engine.generate(prompts, sampling)
    plain = engine.generate(prompts, sampling, speculate=False)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    sizes = {size for g in drafted for size in g.emitted_per_block}
    assert {1, 2, 3} <= sizes  # the drafts were right and wrong in several ways
    for g in drafted:
        assert sum(g.emitted_per_block) == len(g.token_ids) - 1
    for g in plain:
        assert g.emitted_per_block == [1] * 29
        assert not any(g.drafted)


def test_speculation_changes_no_token_of_a_thousand_answers_in_float64(float64):
    engine: Any = tiny.engine(dtype=jnp.float64, batch_size=8)
    prompts, sampling = tiny.prompts(1000), SamplingConfig(max_new_tokens=30)
    drafted = engine.generate(prompts, sampling)
    plain = engine.generate(prompts, sampling, speculate=False)
    assert engine._state.target[0].keys.dtype == jnp.float64
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]


def test_speculation_in_bfloat16_differs_only_where_rounding_explains_it():
    engine: Any = tiny.engine(dtype=jnp.bfloat16)
    prompts, sampling = tiny.prompts(200), SamplingConfig(max_new_tokens=30)
    drafted = engine.generate(prompts, sampling)
    plain = engine.generate(prompts, sampling, speculate=False)
    differing = 0
    for prompt, one, other in zip(prompts, drafted, plain, strict=True):
        at = first_difference(one.token_ids, other.token_ids)
        if at is not None:
            differing += 1
            logits = tiny.following_logits(engine._weights.target, prompt + one.token_ids[:at])
            first, second = np.sort(logits)[-2:][::-1]
            assert first - second < 0.02 * np.abs(logits).max()  # a bfloat16 is right to one part in 256
    assert differing < 40


def test_speculation_changes_no_sampled_token(engine):
    # The same random numbers judge the same positions, so even the samples are equal.
    prompts = tiny.prompts(20)
    greedy = engine.generate(prompts, SamplingConfig(30))
    for sampling in (
        SamplingConfig(30, temperature=1.0, seed=3),
        SamplingConfig(30, temperature=0.7, top_k=4, top_p=0.8),
    ):
        drafted = engine.generate(prompts, sampling)
        plain = engine.generate(prompts, sampling, speculate=False)
        assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
        assert sum(a.token_ids == b.token_ids for a, b in zip(plain, greedy, strict=True)) < 5


@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_the_block_size_changes_no_token(long_answer, block_size):
    answer = tiny.engine(block_size=block_size).generate([PROMPT], SamplingConfig(max_new_tokens=60))[0]
    assert answer.token_ids == long_answer


@pytest.mark.parametrize("batch_size", [1, 3])
def test_sizes_that_follow_the_text_change_no_token(engine, batch_size):
    auto = tiny.engine(block_size="auto", batch_size=batch_size)
    auto.warm_up()
    assert auto._costs is not None
    auto._costs = jnp.asarray([1.0, 1.1, 1.2, 1.4])  # as measured elsewhere, and the same in every run
    prompts = tiny.prompts(12)
    used: set[int] = set()
    for sampling in (SamplingConfig(30), SamplingConfig(30, temperature=1.0, seed=3)):
        found, fixed = auto.generate(prompts, sampling), engine.generate(prompts, sampling)
        assert [one.token_ids for one in found] == [one.token_ids for one in fixed]
        for one in found:
            assert sum(one.emitted_per_block) == len(one.token_ids) - 1
            assert all(1 <= n <= size for n, size in zip(one.emitted_per_block, one.block_sizes, strict=True))
            used |= set(one.block_sizes)
    assert len(used) > 1
    assert used <= {1, 2, 4, 8}


@pytest.mark.parametrize("costs", [[1, np.inf, np.inf, np.inf], [1, 1.5, 2, 3]], ids=["plain", "both"])
def test_the_drafts_context_is_that_of_fixed_blocks_also_after_plain_tokens(costs):
    auto, fixed = tiny.engine(block_size="auto"), tiny.engine()
    auto.warm_up()
    auto._costs = jnp.asarray(costs, jnp.float32)
    sampling = SamplingConfig(27)  # no whole number of the blocks that wait together
    [answer], [other] = (engine.generate([PROMPT], sampling) for engine in (auto, fixed))
    assert answer.token_ids == other.token_ids
    assert 1 in answer.block_sizes
    assert auto._state is not None
    assert fixed._state is not None
    filled = len(PROMPT) + 26  # the last token is in no cache
    for found, expected in zip(auto._state.draft, fixed._state.draft, strict=True):
        np.testing.assert_allclose(found.keys[:, :, :filled], expected.keys[:, :, :filled], atol=1e-4)
        np.testing.assert_allclose(found.values[:, :, :filled], expected.values[:, :, :filled], atol=1e-4)


def test_the_least_room_that_there_can_be_is_enough():
    auto = tiny.engine(block_size="auto", max_length=2)
    [answer] = auto.generate([[1]], SamplingConfig(1))
    assert len(answer.token_ids) == 1


def test_a_size_that_costs_too_much_is_not_used():
    auto = tiny.engine(block_size="auto")
    auto.warm_up()
    for size, place in ((1, 0), (4, 2), (8, 3)):
        auto._costs = jnp.full(4, jnp.inf).at[place].set(1.0)
        [answer] = auto.generate([PROMPT], SamplingConfig(30))
        assert set(answer.block_sizes) == {size}


@pytest.mark.parametrize("speculate", [True, False])
def test_the_cap_is_met_exactly(engine, long_answer, speculate):
    for cap in range(1, 34):
        answer = engine.generate([PROMPT], SamplingConfig(max_new_tokens=cap), speculate)[0]
        assert answer.token_ids == long_answer[:cap]
        assert answer.finish_reason == "length"
        assert sum(answer.emitted_per_block) == cap - 1


@pytest.mark.parametrize("costs", [None, [1, 1.2, 1.4, 1.6], [1, 2, np.inf, np.inf]], ids=["fixed", "auto", "plain"])
def test_the_cap_is_met_exactly_at_the_end_of_the_buffers(costs):
    # Whatever is written past the last position must not slide back over committed rows (law 9). Buffers are whole
    # pieces long, so that only where the last position ends a piece is there no room by chance.
    engine = tiny.engine(block_size="auto" if costs else None, max_length=PIECE)
    engine.warm_up()
    engine._costs = jnp.asarray(costs, jnp.float32) if costs else None
    roomy = tiny.engine(max_length=2 * PIECE)
    text = tiny.prompts(1, seed=7)[0] * 128
    for cap in range(1, 34):
        prompt, sampling = text[: engine.max_length - cap], SamplingConfig(max_new_tokens=cap)
        expected = roomy.generate([prompt], sampling, speculate=False)[0].token_ids
        assert engine.generate([prompt], sampling)[0].token_ids == expected


def test_writing_past_the_end_of_an_answer_leaves_the_prompt_in_the_caches():
    engine: Any = tiny.engine(max_length=PIECE)  # no room by chance
    prompt = (tiny.prompts(1, seed=5)[0] * 128)[: engine.max_length - 3]

    def prompt_rows(cap):
        engine.generate([prompt], SamplingConfig(max_new_tokens=cap))
        leaves = jax.tree.leaves((engine._state.target, engine._state.draft))
        return [np.array(leaf[:, :, : len(prompt)]) for leaf in leaves]

    for before, after in zip(prompt_rows(1), prompt_rows(3), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_stop_in_each_slot_of_a_block_ends_there(engine):
    # Every prompt's answer is cut at the first time each token of the vocabulary appears in it.
    wanted = {"first", (0, "target"), (0, "draft"), (1, "draft"), (1, "target"), (2, "target")}
    seen: set[Any] = set()
    for prompt in tiny.prompts(200, seed=1):
        if wanted <= seen:
            break
        whole = engine.generate([prompt], SamplingConfig(max_new_tokens=40))[0]
        for stop in range(tiny.VOCABULARY):
            answer = engine.generate([prompt], SamplingConfig(max_new_tokens=40, stop_token_ids=(stop,)))[0]
            if stop not in whole.token_ids:
                assert answer.token_ids == whole.token_ids
                continue
            at = whole.token_ids.index(stop)
            assert answer.token_ids == whole.token_ids[: at + 1]
            assert answer.finish_reason == "stop"
            seen.add(slot(whole.emitted_per_block, at))
    assert wanted <= seen


def slot(blocks, at):
    """Where token `at` of an answer was emitted: its slot in its block, and whether draft or target said it."""
    if at == 0:
        return "first"
    start = 1
    for size in blocks:
        if at < start + size:
            return at - start, "target" if at == start + size - 1 else "draft"
        start += size
    raise AssertionError


def test_a_stop_wins_over_the_cap(engine, long_answer):
    at = long_answer.index(long_answer[5])
    sampling = SamplingConfig(max_new_tokens=at + 1, stop_token_ids=(long_answer[5],))
    assert engine.generate([PROMPT], sampling)[0].finish_reason == "stop"


def test_a_stop_as_the_first_token_ends_the_answer_without_a_block(engine, long_answer):
    answer = engine.generate([PROMPT], SamplingConfig(stop_token_ids=(long_answer[0],), max_new_tokens=9))[0]
    assert (answer.token_ids, answer.emitted_per_block, answer.finish_reason) == ([long_answer[0]], [], "stop")
    assert answer.acceptance_length is None
    assert answer.tokens_per_second is None


def test_the_checkpoints_stops_and_the_users_are_all_stops(long_answer):
    early, own, late = list(dict.fromkeys(long_answer))[1:4]  # by their first places in the answer
    engine = tiny.engine(stop_token_ids=(own,))
    for users, first in (((), own), ((late,), own), ((early,), early), ((own,), own)):
        answer = engine.generate([PROMPT], SamplingConfig(max_new_tokens=60, stop_token_ids=users))[0]
        assert answer.token_ids == long_answer[: long_answer.index(first) + 1]
        assert answer.finish_reason == "stop"


def test_the_mask_token_means_nothing_in_an_answer(engine):
    answers = engine.generate(tiny.prompts(60), SamplingConfig(max_new_tokens=30))
    assert any(tiny.MASK in g.token_ids[:-1] for g in answers)


def test_nothing_is_kept_between_requests(engine):
    long, short = tiny.prompts(2, seed=9, longest=80)
    sampling = SamplingConfig(max_new_tokens=40)
    first = engine.generate([long], sampling)[0].token_ids
    engine.generate([short], SamplingConfig(max_new_tokens=3))
    assert engine.generate([long], sampling)[0].token_ids == first


def test_an_abandoned_stream_leaves_nothing_behind(engine, long_answer):
    stream = engine.stream(PROMPT, SamplingConfig(max_new_tokens=60))
    next(stream)
    stream.close()
    assert engine.generate([PROMPT], SamplingConfig(max_new_tokens=60))[0].token_ids == long_answer


def test_a_stream_is_the_answer_in_pieces(engine, long_answer):
    pieces = list(engine.stream(PROMPT, SamplingConfig(max_new_tokens=60)))
    assert list(itertools.chain(*pieces)) == long_answer
    assert len(pieces) > 5


def test_a_stream_ends_with_the_stop_wherever_in_a_block_it_falls(engine, long_answer):
    for stop in set(long_answer):
        pieces = engine.stream(PROMPT, SamplingConfig(max_new_tokens=60, stop_token_ids=(stop,)))
        assert list(itertools.chain(*pieces)) == long_answer[: long_answer.index(stop) + 1]


@pytest.fixture
def one_torch_thread():
    """Products this small are slower where threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the reference calls what transformers has renamed
def test_blocks_of_a_random_pair_are_those_of_the_published_reference(monkeypatch):
    reference = pytest.importorskip("dflash.model", reason="the published reference (PyPI dflash) is not installed")
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)  # its clock asks for CUDA
    hf_target, hf_draft, engine = random_pair(reference)
    seen = set()
    for prompt in [*tiny.prompts(3), tiny.prompts(1, seed=7)[0] * 128]:
        ids = [token % 5 for token in prompt[:90]]  # the last is more than a chunk
        ours = engine.generate([ids], SamplingConfig(max_new_tokens=24))[0]
        theirs = reference.dflash_generate(hf_draft, hf_target, torch.tensor([ids]), 24, None, return_stats=True)
        assert ours.token_ids == theirs.output_ids[0, len(ids) :].tolist()
        # Blocks that start less than a block before the cap, the reference shortens.
        starts = itertools.accumulate(theirs.acceptance_lengths, initial=1)
        whole = sum(start + 5 <= 24 for start in starts)
        assert ours.emitted_per_block[:whole] == theirs.acceptance_lengths[:whole]
        seen |= set(ours.emitted_per_block[:whole])
    assert {1, 2} < seen


def random_pair(reference: Any) -> tuple[Any, Any, Engine]:
    """A target and a draft of five tokens, which often agree, as torch modules and in an engine."""
    sizes = torch_models.SIZES | {"vocab_size": 5, "use_sliding_window": True, "sliding_window": 6}
    target_config = Qwen3Config(**sizes, max_window_layers=3)
    draft_config = Qwen3Config(
        **sizes,
        max_window_layers=1,
        block_size=5,
        num_target_layers=3,
        dflash_config={"mask_token_id": 4, "target_layer_ids": [1, 0]},
    )
    target, draft = Qwen3ForCausalLM(target_config).eval(), reference.DFlashDraftModel(draft_config).eval()
    for seed, model in enumerate((target, draft)):
        torch_models.randomise(model, seed)
    read_target = TargetConfig.from_hf(torch_models.hf_dict(target_config, "Qwen3ForCausalLM"))
    read_draft = DraftConfig.from_hf(torch_models.hf_dict(draft_config, "DFlashDraftModel"))
    loaded_target = LoadedTarget(
        config=read_target, params=torch_models.params_of(target), stop_token_ids=(), source=""
    )
    loaded_draft = LoadedDraft(config=read_draft, params=torch_models.params_of(draft), source="")
    return target, draft, Engine(loaded_target, loaded_draft, max_length=128)


def test_accepted_drafts_are_told_apart(engine):
    answer = engine.generate([PROMPT], SamplingConfig(max_new_tokens=60))[0]
    expected = [False]
    for size in answer.emitted_per_block[:-1]:
        expected += [True] * (size - 1) + [False]
    assert answer.drafted[: len(expected)] == expected


def test_rows_of_a_batch_answer_as_they_do_alone(engine):
    prompts = [tiny.prompts(1, seed=n, longest=n)[0] for n in (3, 17, 40, 64, 5, 30)]
    together = tiny.engine(batch_size=4)
    for sampling in (SamplingConfig(max_new_tokens=20), SamplingConfig(20, temperature=1.0, top_k=5)):
        alone = engine.generate(prompts, sampling)
        answers = together.generate(prompts, sampling)
        assert [g.token_ids for g in answers] == [g.token_ids for g in alone]
        assert [g.emitted_per_block for g in answers] == [g.emitted_per_block for g in alone]


@pytest.fixture(scope="module")
def four():
    return tiny.engine(batch_size=4)


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("sampling", [SamplingConfig(24), SamplingConfig(24, temperature=1.0, top_p=0.9, seed=5)])
def test_in_a_stream_through_a_batch_each_prompt_gets_what_it_gets_alone(engine, four, sampling, speculate):
    prompts = tiny.prompts(60, seed=11, longest=90)
    sampling = dataclasses.replace(sampling, stop_token_ids=(3, 5))  # rows end at many different times
    answers = four.generate(prompts, sampling, speculate)
    ended = [answer.finish_reason for answer in answers]
    assert ended.count("stop") > 15
    assert ended.count("length") > 10
    for prompt, answer in zip(prompts, answers, strict=True):
        assert engine.generate([prompt], sampling, speculate)[0].token_ids == answer.token_ids


def test_neighbours_change_not_even_the_order_of_a_sample(four):
    prompts, sampling = tiny.prompts(9, seed=2), SamplingConfig(20, temperature=1.0)
    forwards = four.generate(prompts, sampling)
    backwards = four.generate(prompts[::-1], sampling)[::-1]
    assert [g.token_ids for g in forwards] == [g.token_ids for g in backwards]


def test_a_prompt_that_comes_again_is_sampled_anew(four):
    sampling = SamplingConfig(20, temperature=1.0)
    answers = [tuple(g.token_ids) for g in four.generate([PROMPT] * 8, sampling)]
    assert len(set(answers)) == 8
    assert [tuple(g.token_ids) for g in four.generate([PROMPT] * 3, sampling)] == answers[:3]
    assert {tuple(four.generate([PROMPT], dataclasses.replace(sampling, seed=n))[0].token_ids) for n in (0, 1)} > {
        answers[0]
    }


def test_a_place_is_taken_while_neighbours_go_on(four):
    # One long answer and many short ones: all short ones have their turn before the long one ends.
    prompts = tiny.prompts(20, seed=3)
    long = four.generate(prompts[:1], SamplingConfig(80))[0]
    stop = next(t for t in range(tiny.VOCABULARY) if t not in long.token_ids)
    order = [
        index
        for index, answer in four.serve(prompts, SamplingConfig(80, stop_token_ids=(stop,)))
        if answer.finish_reason
    ]
    assert sorted(order) == list(range(20))
    assert order != sorted(order)


def test_answers_that_are_there_are_skipped_and_the_others_stay_the_same(four):
    prompts, sampling = [PROMPT, *tiny.prompts(6), PROMPT, PROMPT], SamplingConfig(20, temperature=1.0)
    whole = four.generate(prompts, sampling)
    rest = dict(four.serve(prompts, sampling, skip=5))
    assert sorted(rest) == [5, 6, 7, 8]
    assert [rest[i].token_ids for i in range(5, 9)] == [g.token_ids for g in whole[5:]]


def test_a_thousand_requests_leave_nothing_in_memory(four):
    sampling, resident = SamplingConfig(6), {}
    for done, prompt in enumerate(tiny.prompts(1000, seed=8), 1):
        four.generate([prompt], sampling)
        if done in (100, 1000):
            resident[done] = int(Path("/proc/self/statm").read_text().split()[1])
    assert resident[1000] < 1.02 * resident[100]


@pytest.mark.parametrize(("batch_size", "block_size"), [(1, None), (4, None), (4, "auto")])
def test_nothing_compiles_after_the_warm_up(batch_size, block_size):
    engine = tiny.engine(batch_size=batch_size, block_size=block_size)
    for speculate in (True, False):
        engine.warm_up(speculate)
    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for i, length in enumerate(range(1, 100, 5)):
            prompt = tiny.prompts(1, seed=i)[0] * 99
            sampling = SamplingConfig(
                max_new_tokens=(5, 9, 20)[i % 3],
                temperature=float(i % 2),
                seed=i % 2,
                top_k=i % 4,
                top_p=(1.0, 0.9)[i % 2],
                stop_token_ids=(i % 5,),
            )
            for speculate in (True, False):
                engine.generate([prompt[:length], *tiny.prompts(i % 6)], sampling, speculate)
                list(engine.stream(prompt[:length], sampling, speculate))
        assert compiled == []
        jax.jit(lambda x: x + len(compiled))(jnp.ones(3))  # the listener does hear
        assert compiled
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
        ({"max_new_tokens": -3}, "max_new_tokens: -3"),
        ({"temperature": -0.5}, "temperature: -0.5"),
        ({"temperature": 1e-9}, "temperature: 1e-09"),
        ({"temperature": 1e9}, "temperature: 1000000000.0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": float("inf")}, "temperature: inf"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: 2.5; a whole number"),
        ({"seed": "1"}, "seed: '1'; a whole number"),
        ({"top_p": 0.0}, "top_p: 0.0"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"top_k": -1}, "top_k: -1"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": 2**32}, "seed: 4294967296"),
    ],
)
def test_absurd_numbers_are_refused_by_name(options, named):
    with pytest.raises(UserError, match=named):
        SamplingConfig(**options)


def test_prompts_that_cannot_be_answered_are_refused_by_index(engine):
    sampling = SamplingConfig(max_new_tokens=20)
    cases: dict[str, Any] = {
        "prompt 1: empty": [],
        "prompt 1: 'hello'; a list of token ids is right": "hello",
        "prompt 1: 7; a list of token ids is right": 7,
        "prompt 1: .'a'.; a list of token ids is right": ["a"],
        "prompt 1: token id 11 is outside": [0, 11],
        "prompt 1: token id -1 is outside": [-1],
        "prompt 1: 173 tokens and max_new_tokens 20 make 193": [0] * 173,
    }
    for message, prompt in cases.items():
        with pytest.raises(UserError, match=message):
            engine.generate([[1], prompt], sampling)
    assert len(engine.generate([[0] * 108], sampling)[0].token_ids) == 20
    with pytest.raises(UserError, match="stop_token_ids: token id 11 is outside"):
        engine.generate([[1]], SamplingConfig(stop_token_ids=(11,)))


def test_too_many_stops_are_refused():
    target = tiny.TARGET.__class__(**(vars(tiny.TARGET) | {"vocab_size": 64}))
    engine = tiny.engine(target, None)
    with pytest.raises(UserError, match="stop_token_ids: 33 with the checkpoint's own; at most 32"):
        engine.generate([[1]], SamplingConfig(max_new_tokens=2, stop_token_ids=tuple(range(33))))


def test_pairs_and_sizes_that_make_no_sense_are_refused():
    untappable = dataclasses.replace(tiny.DRAFT, target_layer_ids=(0, 3))
    for options, message in (
        ({"draft": untappable}, "target_layer_ids: 3 cannot be tapped"),
        ({"block_size": 1}, "block_size: 1"),
        ({"max_length": 1}, "max_length: 1"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"draft": None, "block_size": 4}, "block_size: 4 needs a draft"),
    ):
        with pytest.raises(UserError, match=message):
            tiny.engine(**options)


def test_the_target_ends_where_its_positions_do():
    assert tiny.engine(max_length=4096).max_length == 512


def test_without_a_draft_a_block_is_one_token(long_answer):
    engine: Any = tiny.engine(draft=None)
    answer = engine.generate([PROMPT], SamplingConfig(max_new_tokens=60))[0]
    assert answer.token_ids == long_answer
    assert engine.block_size == 1
    assert engine._state.draft == ()


def test_buffers_have_room_for_a_block_and_a_chunk_past_the_cap_in_whole_pieces():
    engine = tiny.engine(max_length=192, block_size=90)
    assert engine._empty_state().tokens.shape == (1, 512)  # with room for a chunk alone 256 would do
    engine = tiny.engine(max_length=192)
    assert engine._empty_state().target[0].keys.shape[2] == 192 + engine._chunk == 256
    assert decode.MAX_STOPS == 32
