import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention import PIECE, Buffer, attend
from dflash_jax.running_softmax import Segment

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def dense(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Attention one query at a time, in float64."""
    b, n, t, h = queries.shape
    out = np.zeros((b, t, n, h))
    for row, head, query in np.ndindex(b, n, t):
        shown = visible[row % len(visible), query]
        key_head = head // (n // keys.shape[1])
        scores = keys[row, key_head, shown].astype(float) @ queries[row, head, query].astype(float) / np.sqrt(h)
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights @ values[row, key_head, shown].astype(float) / weights.sum()
    return out.reshape(b, t, n * h)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_one_segment_equals_the_dense_oracle(key_heads):
    queries, keys, values = random(2, 6, 3, 4), random(2, key_heads, 7, 4, seed=1), random(2, key_heads, 7, 4, seed=2)
    visible = random(2, 3, 7, seed=3) > 0
    visible[..., 2] = True  # every query sees a key
    ours = attend(jnp.asarray(queries), [Segment(*map(jnp.asarray, (keys, values, visible)))])
    np.testing.assert_allclose(ours, dense(queries, keys, values, visible), atol=1e-6)


def test_segments_share_one_softmax():
    queries, keys, values = random(2, 4, 3, 8), random(2, 2, 9, 8, seed=1), random(2, 2, 9, 8, seed=2)
    visible = random(1, 3, 9, seed=3) > 0
    visible[..., 0] = True
    parts = [slice(0, 4), slice(4, 5), slice(5, 9)]
    segments = [Segment(*map(jnp.asarray, (keys[:, :, p], values[:, :, p], visible[..., p]))) for p in parts]
    np.testing.assert_allclose(attend(jnp.asarray(queries), segments), dense(queries, keys, values, visible), atol=1e-6)


def test_hidden_keys_change_nothing():
    queries, keys, values = (jnp.asarray(random(1, 2, 5, 4, seed=seed)) for seed in range(3))
    visible = jnp.arange(5)[None, None] < jnp.array([1, 2, 2, 3, 3])[None, :, None]
    rubbish = jnp.where(jnp.arange(5)[None, None, :, None] < 3, 0.0, 1e30)
    expected = attend(queries, [Segment(keys, values, visible)])
    np.testing.assert_array_equal(attend(queries, [Segment(keys + rubbish, values + rubbish, visible)]), expected)


@pytest.mark.parametrize("filled", [1, PIECE, PIECE + 1, 2 * PIECE + 7])
def test_a_buffer_is_read_only_as_far_as_it_is_filled(filled, monkeypatch):
    rows = 4 * PIECE
    queries, keys, values = random(2, 4, 3, 8), random(2, 2, rows, 8, seed=1), random(2, 2, rows, 8, seed=2)
    visible = random(2, 3, rows, seed=3) > 0
    visible[..., 0] = True
    visible[..., filled:] = False
    read = -(-filled // PIECE) * PIECE
    keys[:, :, read:] = np.nan
    buffer = Buffer(jnp.asarray(keys), jnp.asarray(values), jnp.asarray(visible), jnp.asarray(filled, jnp.int32))
    within = [jnp.asarray(random(2, 2, 3, 8, seed=seed)) for seed in (4, 5)]
    block = Segment(within[0], within[1], jnp.ones((1, 3, 3), bool))
    ours = attend(jnp.asarray(queries), [buffer, block])
    all_keys = np.concatenate([keys[:, :, :read], within[0]], axis=2)
    all_values = np.concatenate([values[:, :, :read], within[1]], axis=2)
    seen = np.concatenate([visible[..., :read], np.ones((2, 3, 3), bool)], axis=2)
    expected = dense(queries, all_keys, all_values, seen)
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    # Elsewhere than on CPUs it is read whole.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    whole = buffer._replace(keys=jnp.nan_to_num(buffer.keys))
    np.testing.assert_allclose(attend(jnp.asarray(queries), [whole, block]), expected, atol=1e-6)


def test_how_far_neighbours_are_filled_changes_not_a_bit():
    queries, keys, values = (jnp.asarray(random(1, 2, rows, 4, seed=rows)) for rows in (3, 4 * PIECE, 4 * PIECE))
    visible = jnp.broadcast_to(jnp.arange(4 * PIECE) < 9, (1, 3, 4 * PIECE))
    alone, *beside = (
        attend(queries, [Buffer(keys, values, visible, jnp.asarray(filled, jnp.int32))]) for filled in (9, 300, 1000)
    )
    for other in beside:
        np.testing.assert_array_equal(alone, other)


def test_keys_that_come_after_hidden_ones_only_still_count():
    queries, keys, values = random(1, 2, 2, 4), random(1, 2, 3 * PIECE, 4, seed=1), random(1, 2, 3 * PIECE, 4, seed=2)
    visible = np.broadcast_to(np.arange(3 * PIECE) >= 2 * PIECE + 5, (1, 2, 3 * PIECE))
    filled = jnp.asarray(3 * PIECE, jnp.int32)
    buffer = Buffer(jnp.asarray(keys), jnp.asarray(values), jnp.asarray(visible), filled)
    np.testing.assert_allclose(attend(jnp.asarray(queries), [buffer]), dense(queries, keys, values, visible), atol=1e-6)


def test_the_softmax_of_bfloat16_heads_runs_in_float32():
    """Scores near 100 are 0.5 apart in bfloat16, which would change weights by up to a fourth."""
    shift = np.zeros((1, 1, 1, 16), np.float32)
    shift[..., 0] = 20
    queries, keys = (jnp.asarray(random(1, 1, 8, 16, seed=seed) + shift, jnp.bfloat16) for seed in (0, 1))
    values = jnp.asarray(random(1, 1, 8, 16, seed=2), jnp.bfloat16)
    visible = np.ones((1, 8, 8), bool)
    ours = attend(queries, [Segment(keys, values, jnp.asarray(visible))])
    assert ours.dtype == jnp.bfloat16
    wide = [np.asarray(x, np.float32) for x in (queries, keys, values)]
    expected = dense(wide[0], wide[1], wide[2], visible)
    np.testing.assert_allclose(ours.astype(np.float32), expected, atol=0.02)


def test_float64_heads_stay_float64(float64):
    queries, keys, values = (random(1, 2, 5, 4, seed=seed).astype(np.float64) for seed in range(3))
    visible = np.tril(np.ones((1, 5, 5), bool))
    ours = attend(jnp.asarray(queries), [Segment(*map(jnp.asarray, (keys, values, visible)))])
    np.testing.assert_allclose(ours, dense(queries, keys, values, visible), atol=1e-14)
