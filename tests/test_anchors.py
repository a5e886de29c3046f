import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.anchors import Anchors, Labels, among, block_spans, candidates, draw, label, row_spans
from dflash_jax.config import LayerConfig
from dflash_jax.rope import Rotary
from tests.dense import weighted

# Two documents and a rest: answers at 2…5 and at 8…9 and 11.
SUPERVISED = jnp.asarray([[0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 0]], bool)
STARTS = jnp.asarray([[0] * 6 + [6] * 6 + [12]], jnp.int32)
TOKENS = jnp.arange(100, 113, dtype=jnp.int32)[None]


def anchors(*rows, valid=None):
    return Anchors(jnp.asarray([rows], jnp.int32), jnp.asarray([valid or [True] * len(rows)]))


def test_an_anchor_and_its_next_are_supervised_and_of_one_document():
    # 5 is followed by 6, which is another document's; 6 by a question.
    assert np.flatnonzero(candidates(SUPERVISED, STARTS)).tolist() == [2, 3, 4, 8]


def test_anchors_come_in_rising_order_and_each_once():
    for seed in range(20):
        drawn = draw(jax.random.key(seed), candidates(SUPERVISED, STARTS), 3)
        rows = drawn.positions[0].tolist()
        assert drawn.valid.all()
        assert rows == sorted(set(rows))
        assert set(rows) <= {2, 3, 4, 8}


def test_where_there_are_fewer_all_are_drawn_and_the_rest_is_not_valid():
    drawn = draw(jax.random.key(0), candidates(SUPERVISED, STARTS), 6)
    assert drawn.valid[0].tolist() == [True] * 4 + [False] * 2
    assert drawn.positions[0, :4].tolist() == [2, 3, 4, 8]
    nothing = draw(jax.random.key(0), jnp.zeros((1, 13), bool), 6)
    assert not nothing.valid.any()


def test_every_allowed_position_is_drawn_alike_often():
    allowed = jnp.asarray([[1, 0, 1, 1, 1, 0]], bool)
    keys = jax.random.split(jax.random.key(1), 4000)
    counts = jnp.zeros(6).at[jax.vmap(lambda key: draw(key, allowed, 2).positions[0])(keys).reshape(-1)].add(1)
    assert (abs(np.asarray(counts) / 4000 - np.array([0.5, 0, 0.5, 0.5, 0.5, 0])) < 0.03).all()


def test_slot_k_is_to_say_the_token_k_after_the_anchor_as_far_as_the_answer_goes():
    labels = label(TOKENS, SUPERVISED, STARTS, anchors(2, 4, 8), 5)
    assert labels.tokens[0].tolist() == [[103, 104, 105, 106], [105, 106, 107, 108], [109, 110, 111, 112]]
    assert labels.weighted[0].astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_what_a_part_of_the_head_cannot_say_takes_the_weight_of_its_slot_and_of_those_after():
    rows = jnp.asarray([3, 0, 3, 1, 2], jnp.int32)  # of tokens 1, 3 and 4; 0 and 2 have none
    tokens = jnp.asarray([[[1, 3, 4], [4, 2, 1], [0, 1, 1], [3, 3, 2]]], jnp.int32)
    weighted = jnp.asarray([[[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]], bool)
    found = among(Labels(tokens, weighted), rows, 3)
    assert found.tokens[0].tolist() == [[0, 1, 2], [2, 3, 0], [3, 0, 0], [1, 1, 3]]
    assert found.weighted[0].astype(int).tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0]]


def test_blocks_that_stand_nowhere_count_nothing():
    labels = label(TOKENS, SUPERVISED, STARTS, anchors(2, 2, valid=[False, True]), 5)
    assert labels.weighted[0].any(axis=-1).tolist() == [False, True]


@settings(max_examples=30)
@given(st.data())
def test_weights_are_those_of_law_11(data):
    s, t = 12, 6
    supervised = np.array(data.draw(st.lists(st.booleans(), min_size=s, max_size=s)))
    cut = data.draw(st.integers(0, s))
    starts = np.where(np.arange(s) < cut, 0, cut)
    arrays = jnp.zeros((1, s), jnp.int32), jnp.asarray(supervised[None]), jnp.asarray(starts[None], jnp.int32)
    allowed = candidates(*arrays[1:])[0].tolist()
    labels = label(*arrays, anchors(*range(s), valid=allowed), t)
    nothing = [False] * (t - 1)
    expected = [weighted(supervised, starts, row, t) if allowed[row] else nothing for row in range(s)]
    assert labels.weighted[0].tolist() == expected


def test_a_block_sees_its_document_strictly_before_its_anchor():
    spans = block_spans(LayerConfig(Rotary(1e4), causal=False), STARTS, anchors(2, 8), 3)
    assert spans.first[0].tolist() == [0, 0, 0, 6, 6, 6]
    assert spans.last[0].tolist() == [2, 2, 2, 8, 8, 8]


def test_a_window_moves_with_the_slot():
    spans = block_spans(LayerConfig(Rotary(1e4), window=4), STARTS, anchors(5, 8), 4)
    assert spans.first[0].tolist() == [2, 3, 4, 5, 6, 6, 7, 8]
    assert spans.last[0].tolist() == [5, 5, 5, 5, 8, 8, 8, 8]


def test_a_block_that_stands_nowhere_sees_no_context():
    spans = block_spans(LayerConfig(Rotary(1e4), causal=False), STARTS, anchors(0, valid=[False]), 3)
    assert (spans.first >= spans.last).all()


@pytest.mark.parametrize(("window", "first"), [(None, [0, 0, 0, 3, 3]), (2, [0, 0, 1, 3, 3])])
def test_the_target_sees_its_document_up_to_itself(window, first):
    spans = row_spans(LayerConfig(Rotary(1e4), window=window), jnp.asarray([[0, 0, 0, 3, 3]], jnp.int32))
    assert spans.first[0].tolist() == first
    assert spans.last[0].tolist() == [1, 2, 3, 4, 5]
