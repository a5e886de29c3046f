import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache
from dflash_jax.draft import Draft
from dflash_jax.target import Target
from inference import decode
from inference.engine import SamplingConfig
from tests import tiny

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(block_size=16)


def admitted(engine, prompt, sampling):
    """A state with one row that has its first token."""
    return engine._admit(engine._speculative, engine._empty_state(), 0, 0, prompt, sampling)[0]


def test_positions_and_contexts_follow_the_committed_length(engine, monkeypatch):
    # With wrong drafts after a known number of right ones, whatever counts rejected tokens drifts at once.
    sampling = SamplingConfig(max_new_tokens=60)
    text = PROMPT + tiny.plain_greedy(engine._weights.target, PROMPT, 60)
    pattern = [0, 3, 15, 1, 0, 7]
    truth = jnp.asarray(text, jnp.int32)
    right = jnp.asarray(pattern, jnp.int32)

    def propose(models, weights, anchors, buffers, start):
        assert models.block_size == 16
        spots = start[:, None] + 1 + jnp.arange(15)[None]
        wrong = (jnp.arange(15)[None] >= right[state_blocks[0]]).astype(jnp.int32)
        return (truth[spots] + wrong) % tiny.VOCABULARY

    state_blocks = [0]
    monkeypatch.setattr(decode, "propose", propose)
    state = admitted(engine, PROMPT, sampling)
    committed = len(PROMPT)
    for block, count in enumerate(pattern):
        state_blocks[0] = block
        before = state.lengths.item()
        assert before == committed
        state = jax.jit(functools.partial(decode.decode_block, engine._speculative))(engine._weights, state)
        committed += count + 1
        assert state.lengths.item() == committed
        assert state.emitted[0, block].item() == count + 1
        assert state.tokens[0, len(PROMPT) : committed + 1].tolist() == text[len(PROMPT) : committed + 1]
        assert state.drafted[0, before + 1 : committed + 1].tolist() == [True] * count + [False]
        fresh = contexts(engine, text[:committed])
        for kept, new in zip(jax.tree.leaves((state.target, state.draft)), jax.tree.leaves(fresh), strict=True):
            np.testing.assert_allclose(kept[:, :, :committed], new[:, :, :committed], atol=1e-4)


def contexts(engine, text):
    """Both caches as one pass over the whole text fills them."""
    models, weights, dtype = engine._speculative, engine._weights, jnp.dtype("float32")
    zero, rows = jnp.zeros(1, jnp.int32), len(text) + 1
    tokens = jnp.asarray([text], jnp.int32)
    target = cache.empty(models.target, 1, rows, dtype)
    _, features, target = tiny.run(Target(models.target, models.taps), weights.target, tokens, target, zero)
    draft = cache.empty(models.draft, 1, rows, dtype)
    return target, tiny.run(Draft(models.draft), weights.draft, features, draft, zero, method="extend")


def test_a_row_that_has_ended_changes_no_more(engine):
    state = admitted(engine, PROMPT, SamplingConfig(max_new_tokens=3))
    state = decode.decode(engine._speculative, engine._weights, state, jnp.asarray(9, jnp.int32))
    assert state.finish.tolist() == [decode.FULL]
    again = jax.jit(functools.partial(decode.decode_block, engine._speculative))(engine._weights, state)
    for field in ("tokens", "drafted", "lengths", "emitted", "blocks", "finish"):
        assert (getattr(again, field) == getattr(state, field)).all(), field


def test_decoding_stops_after_the_blocks_it_was_given(engine):
    state = admitted(engine, PROMPT, SamplingConfig(max_new_tokens=60))
    state = decode.decode(engine._speculative, engine._weights, state, jnp.asarray(2, jnp.int32))
    assert state.blocks.tolist() == [2]
    assert state.finish.tolist() == [decode.RUNNING]


def test_the_mask_token_is_the_only_thing_the_draft_is_told_of_the_block(engine):
    anchors = jnp.asarray([[4]], jnp.int32)
    buffers = contexts(engine, PROMPT)[1]
    start = jnp.asarray([len(PROMPT)], jnp.int32)
    drafts = decode.propose(engine._speculative, engine._weights, anchors, buffers, start)
    block = engine._weights.target["embedding"][jnp.asarray([[4] + [tiny.MASK] * 15])]
    hidden = tiny.run(Draft(tiny.DRAFT), engine._weights.draft, block, buffers, start)
    logits = tiny.run(Target(tiny.TARGET), engine._weights.target, hidden, method="logits")
    assert drafts.tolist() == jnp.argmax(logits[:, 1:], axis=-1).tolist()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("speculate", [True, False])
def test_the_compiled_loop_updates_caches_in_place(batch, speculate):
    engine = tiny.engine(max_length=448, batch_size=batch)
    state = engine._empty_state()
    models = engine._models(speculate)
    compiled: Any = decode.decode.lower(models, engine._weights, state, jnp.asarray(4, jnp.int32)).compile()
    buffers = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= buffers
    shapes = collections.Counter(re.findall(r"= f32\[([\d,]+)\]\S* copy\(", compiled.as_text()))
    cache_shape = ",".join(map(str, state.target[0].keys.shape))
    assert cache_shape == f"{batch},2,512,6"
    assert shapes[cache_shape] == 0


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_programs_lower_for_accelerators(platform):
    engine = tiny.engine(batch_size=2)
    state, count = engine._empty_state(), jnp.asarray(4, jnp.int32)
    for speculate in (True, False):
        program = functools.partial(decode.decode, engine._models(speculate))
        exported = jax.export.export(jax.jit(program), platforms=[platform])(engine._weights, state, count)
        assert exported.platforms == (platform,)
