import collections
import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache
from dflash_jax.config import DraftConfig
from dflash_jax.draft import Draft
from dflash_jax.target import Target
from inference import decode
from inference.engine import SamplingConfig
from inference.engine import WaitingPrompt as Prompt
from tests import tiny

PROMPT = [7, 9, 8, 4, 0, 5, 7, 1]  # greedily answered by nine different tokens, in blocks of one to six


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(block_size=16)


def admitted(engine, prompt, sampling):
    """A state with one row that has its first token."""
    return engine._admit(engine._speculative, engine._empty_state(), 0, Prompt(0, 0, prompt), sampling)[0]


def test_positions_and_contexts_follow_the_committed_length(engine, monkeypatch):
    # With wrong drafts after a known number of right ones, whatever counts rejected tokens drifts at once.
    sampling = SamplingConfig(max_new_tokens=60)
    text = PROMPT + tiny.plain_greedy(engine._weights.target, PROMPT, 60)
    pattern = [0, 3, 15, 1, 0, 7]
    anchors = len(PROMPT) + np.cumsum([0, *(count + 1 for count in pattern[:-1])])
    truth, right = jnp.asarray(text, jnp.int32), jnp.zeros(len(text), jnp.int32).at[anchors].set(jnp.asarray(pattern))

    def propose(models, weights, anchors, buffers, start):
        assert models.block_size == 16
        slots = jnp.arange(15, dtype=jnp.int32)[None]
        wrong = (slots >= right[start][:, None]).astype(jnp.int32)
        return (truth[start[:, None] + 1 + slots] + wrong) % tiny.VOCABULARY

    monkeypatch.setattr(decode, "propose", propose)
    step = jax.jit(functools.partial(decode.decode_block, engine._speculative))
    state = admitted(engine, PROMPT, sampling)
    committed = len(PROMPT)
    for block, count in enumerate(pattern):
        before = state.lengths.item()
        assert before == committed
        state = step(engine._weights, state)
        committed += count + 1
        assert state.lengths.item() == committed
        assert state.emitted[0, block].item() == count + 1
        assert state.tokens[0, len(PROMPT) : committed + 1].tolist() == text[len(PROMPT) : committed + 1]
        assert state.drafted[0, before + 1 : committed + 1].tolist() == [True] * count + [False]
        expect_contexts(state, engine, text[:committed])


def expect_contexts(state, engine, text):
    """Both caches hold what one pass over the whole text fills them with."""
    fresh = _contexts(engine._weights, jnp.asarray([text + [0] * (100 - len(text))], jnp.int32))
    for kept, new in zip(jax.tree.leaves((state.target, state.draft)), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_allclose(kept[:, :, : len(text)], new[:, :, : len(text)], atol=1e-4)


@jax.jit
def _contexts(weights, tokens):
    dtype, zero, rows = jnp.dtype("float32"), jnp.zeros(1, jnp.int32), tokens.shape[1] + 1
    target = cache.empty(tiny.TARGET, 1, rows, dtype)
    model = Target(tiny.TARGET, tiny.DRAFT.target_layer_ids)
    _, features, target = tiny.run(model, weights.target, tokens, target, zero)
    draft = cache.empty(tiny.DRAFT, 1, rows, dtype)
    return target, tiny.run(Draft(tiny.DRAFT), weights.draft, features, draft, zero, method="extend")


def test_a_prompt_read_in_chunks_fills_both_contexts(engine, monkeypatch):
    monkeypatch.setattr(engine, "_chunk", 16)
    prompt = (PROMPT * 5)[:39]
    state = admitted(engine, prompt, SamplingConfig(max_new_tokens=3))
    expect_contexts(state, engine, prompt)


@pytest.mark.parametrize("finish", [decode.FULL, decode.STOPPED])
def test_a_row_that_has_ended_changes_no_more(engine, finish):
    third = tiny.plain_greedy(engine._weights.target, PROMPT, 3)[2]
    asked = {decode.FULL: SamplingConfig(3), decode.STOPPED: SamplingConfig(60, stop_token_ids=(third,))}
    state = admitted(engine, PROMPT, asked[finish])
    state = decode.decode(engine._speculative, engine._weights, state, jnp.asarray(9, jnp.int32))
    assert state.finish.tolist() == [finish]
    again = jax.jit(functools.partial(decode.decode_block, engine._speculative))(engine._weights, state)
    for field in ("tokens", "drafted", "lengths", "emitted", "blocks", "finish"):
        assert (getattr(again, field) == getattr(state, field)).all(), field


def test_decoding_stops_after_the_blocks_it_was_given(engine):
    state = admitted(engine, PROMPT, SamplingConfig(max_new_tokens=60))
    state = decode.decode(engine._speculative, engine._weights, state, jnp.asarray(2, jnp.int32))
    assert state.blocks.tolist() == [2]
    assert state.finish.tolist() == [decode.RUNNING]


def test_the_mask_token_is_the_only_thing_the_draft_is_told_of_the_block(engine):
    # Every anchor at every place of a text: what is shifted by a slot or a position changes some proposal.
    text = tiny.prompts(1, seed=4)[0]
    places = [(anchor, start) for anchor in range(tiny.VOCABULARY) for start in range(1, len(text))]
    anchors = jnp.asarray([[anchor] for anchor, _ in places], jnp.int32)
    start = jnp.asarray([start for _, start in places], jnp.int32)
    buffers = jax.tree.map(
        lambda rows: jnp.repeat(rows, len(places), axis=0),
        _contexts(engine._weights, jnp.asarray([text], jnp.int32))[1],
    )
    block = engine._weights.target["embedding"][jnp.concatenate([anchors, jnp.full((len(places), 15), tiny.MASK)], 1)]
    hidden = jax.jit(functools.partial(tiny.run, Draft(tiny.DRAFT)))(engine._weights.draft, block, buffers, start)
    logits = tiny.run(Target(tiny.TARGET), engine._weights.target, hidden, method="logits")
    propose = jax.jit(functools.partial(decode.propose, engine._speculative))
    assert propose(engine._weights, anchors, buffers, start).tolist() == jnp.argmax(logits[:, 1:], axis=-1).tolist()


def test_a_draft_whose_block_size_is_8_proposes_7_tokens():
    draft = DraftConfig.from_hf(tiny.DRAFT.to_hf())
    assert draft.block_size == 8
    engine = tiny.engine(draft=draft)
    state = engine._empty_state()
    anchors = jnp.zeros((1, 1), jnp.int32)
    drafts = jax.eval_shape(
        functools.partial(decode.propose, engine._speculative), engine._weights, anchors, state.draft, state.lengths
    )
    assert drafts.shape == (1, 7)


def test_three_sampled_tokens_follow_the_law_whatever_the_draft_proposes(monkeypatch):
    target = dataclasses.replace(tiny.TARGET, vocab_size=8)
    engine = tiny.engine(target, dataclasses.replace(tiny.DRAFT, vocab_size=8, mask_token_id=7, block_size=4))
    prompt, sampling = [0, 6], SamplingConfig(max_new_tokens=3, temperature=1.0, top_k=3, top_p=0.8)
    law = law_of_three_tokens(engine, prompt)
    plain = two_blocks(engine, engine._plain, admitted_often(engine, engine._plain, prompt, sampling))
    begun = admitted_often(engine, engine._speculative, prompt, sampling)
    drafted = two_blocks(engine, engine._speculative, begun)

    def propose(off, models, weights, anchors, buffers, start):
        spots = start[:, None] + 1 + jnp.arange(3, dtype=jnp.int32)[None]
        return (jnp.take_along_axis(plain.tokens, spots, axis=1) + off) % 8

    states = [plain, drafted]
    for off in (0, 1):  # always right, always wrong
        monkeypatch.setattr(decode, "propose", functools.partial(propose, off))
        states.append(two_blocks(engine, engine._speculative, begun))
    sizes = [jnp.mean(state.emitted[:, 0], dtype=jnp.float32).item() for state in states]
    assert sizes == [1.0, pytest.approx(1.48, abs=0.02), 2.0, 1.0]
    for state in states:
        tokens = np.asarray(state.tokens[:, 2:5])
        counts = collections.Counter(map(tuple, tokens.tolist()))
        assert set(counts) <= set(law)  # nothing outside the filters
        assert sum(abs(counts[answer] / len(tokens) - law[answer]) for answer in law) / 2 < 0.02


def admitted_often(engine, models, prompt, sampling):
    """The first tokens of 50,000 answers to one prompt, each with a seed of its own."""
    weights, row = engine._weights, jnp.asarray(0, jnp.int32)
    state, end = decode.empty_state(models, 1, 10, jnp.dtype("float32")), jnp.asarray(len(prompt) - 1, jnp.int32)
    state, hidden = decode.prefill(models, weights, state, row, jnp.asarray([prompt], jnp.int32), row, end)
    asked = engine._asked(len(prompt), 0, sampling)

    def admit(i):
        policy = asked.policy._replace(seed=i[None])
        return decode.admit(models, weights, state, row, hidden, asked._replace(policy=policy))

    states = jax.jit(jax.vmap(admit))(jnp.arange(50_000, dtype=jnp.uint32))
    return jax.tree.map(lambda leaf: leaf[:, 0], states)


def two_blocks(engine, models, state):
    step = jax.jit(functools.partial(decode.decode_block, models))
    return step(engine._weights, step(engine._weights, state))


def law_of_three_tokens(engine, prompt):
    """The probability of every answer of three tokens at temperature 1, top-k 3 and top-p 0.8."""
    answers = [answer for n in range(3) for answer in itertools.product(range(8), repeat=n)]
    texts = jnp.asarray([[*prompt, *answer, 0, 0][:4] for answer in answers], jnp.int32)
    model, zeros = Target(engine.config), jnp.zeros(len(answers), jnp.int32)
    buffers = cache.empty(engine.config, len(answers), 5, jnp.dtype("float32"))
    hidden = jax.jit(functools.partial(tiny.run, model))(engine._weights.target, texts, buffers, zeros)[0]
    logits = tiny.run(model, engine._weights.target, hidden, method="logits")
    rows = dict(zip(answers, np.asarray(logits, np.float64), strict=True))

    def after(answer):
        row = rows[answer][len(prompt) + len(answer) - 1]
        likeliest = np.argsort(-row)[:3]
        weights = np.exp(row[likeliest])
        weights /= weights.sum()
        weights *= np.cumsum(weights) - weights < 0.8
        return {int(token): p for token, p in zip(likeliest, weights / weights.sum(), strict=True) if p > 0}

    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        law = {(*said, token): so_far * p for said, so_far in law.items() for token, p in after(said).items()}
    return law


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("speculate", "block_size"), [(True, None), (False, None), (True, "auto")])
def test_the_compiled_loop_updates_caches_in_place(batch, speculate, block_size):
    engine = tiny.engine(max_length=448, batch_size=batch, block_size=block_size)
    state = engine._empty_state()
    models = engine._models(speculate)
    costs = jnp.ones(len(models.sizes)) if models.sizes else None
    compiled: Any = decode.decode.lower(models, engine._weights, state, jnp.asarray(4, jnp.int32), costs).compile()
    buffers = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= buffers
    shapes = collections.Counter(re.findall(r"= f32\[([\d,]+)\]\S* copy\(", compiled.as_text()))
    cache_shape = ",".join(map(str, state.target[0].keys.shape))
    assert cache_shape == f"{batch},2,512,6"
    assert shapes[cache_shape] == 0


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_programs_lower_for_accelerators(platform):
    engine, auto = tiny.engine(batch_size=2), tiny.engine(batch_size=2, block_size="auto")
    state, count = engine._empty_state(), jnp.asarray(4, jnp.int32)
    for models in (engine._speculative, engine._plain, auto._speculative):
        program = functools.partial(decode.decode, models)
        costs = (jnp.ones(len(models.sizes)),) if models.sizes else ()
        exported = jax.export.export(jax.jit(program), platforms=[platform])(engine._weights, state, count, *costs)
        assert exported.platforms == (platform,)


def test_a_second_turn_fills_both_contexts_as_the_whole_chat_does(engine):
    """Engines that took the first turn's over lacked the draft's part of it; ours takes nothing over."""
    sampling = SamplingConfig(max_new_tokens=20)
    [first] = engine.generate([PROMPT], sampling)
    chat = [*PROMPT, *first.token_ids, 3, 8]
    [second] = engine.generate([chat], sampling)
    expect_contexts(engine._state, engine, [*chat, *second.token_ids][:-1])  # the last token is in no cache
