import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import block_attention
from dflash_jax.block_attention import Own, Spans, attend_spans

HEADS, KEY_HEADS, SIZE = 4, 2, 6


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles, none of them full, in little time."""
    monkeypatch.setattr(block_attention, "QUERIES", 8)
    monkeypatch.setattr(block_attention, "KEYS", 8)


def dense(queries, keys, values, spans, own):
    """Every query against every key under one softmax and one mask."""
    keys, values = (jnp.repeat(x, HEADS // KEY_HEADS, axis=1) for x in (keys, values))
    rows = np.arange(keys.shape[2])[None, None]
    mask = (rows >= spans.first[..., None]) & (rows < spans.last[..., None])
    if own is not None:
        t, q = len(own.within), queries.shape[2]
        theirs = jnp.kron(jnp.eye(q // t), own.within.astype(jnp.float32)) > 0
        mask = jnp.concatenate([mask, jnp.broadcast_to(theirs[None], (len(mask), q, q))], axis=-1)
        keys, values = (
            jnp.concatenate([x, jnp.repeat(mine, HEADS // KEY_HEADS, axis=1)], axis=2)
            for x, mine in ((keys, own.keys), (values, own.values))
        )
    scores = jnp.einsum("bnqh,bnsh->bnqs", queries, keys) * SIZE**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bnqs,bnsh->bnqh", weights, values)


def inputs(seed, q, s, t):
    rng = np.random.default_rng(seed)
    draw = lambda heads, rows: jnp.asarray(rng.standard_normal((2, heads, rows, SIZE)), jnp.float32)  # noqa: E731
    last = rng.integers(0, s + 1, (2, q))
    spans = Spans(*(jnp.asarray(edge, jnp.int32) for edge in ((last * rng.random((2, q))).astype(int), last)))
    arrays = draw(HEADS, q), draw(KEY_HEADS, s), draw(KEY_HEADS, s)
    own = Own(draw(KEY_HEADS, q), draw(KEY_HEADS, q), jnp.asarray(np.tril(np.ones((t, t), bool)))) if t else None
    return arrays, spans, own, draw(HEADS, q)


@functools.cache
def both(function, with_own):
    def weighted(arrays, spans, own, weights):
        return (function(*arrays, spans, own) * weights).sum()

    def run(arrays, mine, spans, own, weights):
        return weighted(arrays, spans, own._replace(keys=mine[0], values=mine[1]) if own else None, weights)

    return jax.jit(jax.value_and_grad(run, argnums=(0, 1)))


def assert_same(ours, theirs, terms):
    """Gradients to 5e-6, and the value as a sum of so many terms rounds."""
    np.testing.assert_allclose(ours[0], theirs[0], atol=5e-6 * np.sqrt(terms))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=5e-6), ours[1], theirs[1])


@pytest.mark.parametrize(("q", "s", "t"), [(20, 21, 4), (12, 40, 3), (5, 7, 5), (24, 8, 2), (16, 16, 8)])
def test_values_and_gradients_are_those_of_a_dense_mask(q, s, t):
    arrays, spans, own, weights = inputs(q, q, s, t)
    args = arrays, (own.keys, own.values), spans, own, weights
    ours, theirs = both(attend_spans, True)(*args), both(dense, True)(*args)
    assert_same(ours, theirs, weights.size)


@pytest.mark.parametrize(("q", "s"), [(21, 21), (9, 40)])
def test_a_row_over_itself_needs_no_blocks(q, s):
    arrays, spans, _, weights = inputs(q, q, s, 0)
    spans = spans._replace(last=jnp.maximum(spans.last, spans.first + 1))  # each sees something
    args = arrays, (), spans, None, weights
    ours, theirs = both(attend_spans, False)(*args), both(dense, False)(*args)
    assert_same(ours, theirs, weights.size)


def test_a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient():
    (queries, keys, values), spans, _, _ = inputs(0, 6, 9, 0)
    nothing = jax.tree.map(jnp.zeros_like, spans)

    def total(queries, keys, values):
        return attend_spans(queries, keys, values, nothing, None).sum()

    out, gradients = jax.value_and_grad(total, argnums=(0, 1, 2))(queries, keys, values)
    assert out == 0
    assert all((gradient == 0).all() for gradient in gradients)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_what_no_query_sees_changes_not_a_bit(seed):
    (queries, keys, values), spans, own, _ = inputs(seed, 12, 30, 4)
    hidden = np.ones((2, 30), bool)
    for row in range(2):
        for first, last in zip(spans.first[row], spans.last[row], strict=True):
            hidden[row, int(first) : int(last)] = False
    rubbish = jnp.where(hidden[:, None, :, None], 1e3, 0.0)
    run = jax.jit(attend_spans)
    assert (run(queries, keys, values, spans, own) == run(queries, keys + rubbish, values + rubbish, spans, own)).all()


def test_no_temporary_grows_with_queries_times_context():
    def temporaries(q, s):
        arrays, spans, own, weights = jax.eval_shape(lambda: inputs(0, q, s, 4))
        compiled = both(attend_spans, True).lower(arrays, (own.keys, own.values), spans, own, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one = temporaries(256, 256)
    assert temporaries(512, 512) < 2.2 * one
