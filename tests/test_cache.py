import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache, presets

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def layer(rows: int = 8, dtype: str = "float32") -> cache.LayerCache:
    """Two rows, two heads of 3, every value -1."""
    return cache.LayerCache(*(jnp.full((2, 2, rows, 3), -1, dtype) for _ in range(2)))


def new(t: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    keys = jnp.arange(2 * 2 * t * 3, dtype=jnp.float32).reshape(2, 2, t, 3)
    return keys, keys + 100


def test_each_row_is_written_at_its_own_start():
    keys, values = new(3)
    written = cache.write(layer(), keys, values, jnp.array([0, 4]))
    for buffer, rows in zip(written, (keys, values), strict=True):
        for row, start in enumerate((0, 4)):
            expected = np.full((2, 8, 3), -1.0)
            expected[:, start : start + 3] = rows[row]
            np.testing.assert_array_equal(buffer[row], expected)


def test_writing_one_position_keeps_all_earlier_ones():
    filled = cache.write(layer(), *new(3), jnp.array([0, 4]))
    keys, values = new(1)
    written = cache.write(filled, keys, values, jnp.array([3, 5]))
    for before, after, rows in zip(filled, written, (keys, values), strict=True):
        for row, start in enumerate((3, 5)):
            np.testing.assert_array_equal(after[row, :, :start], before[row, :, :start])
            np.testing.assert_array_equal(after[row, :, start], rows[row, :, 0])


def test_a_write_past_the_end_lands_on_earlier_rows():
    """Not wanted, but what jax does (law 9): it is why callers keep room for a whole block past the cap."""
    keys, values = new(3)
    written = cache.write(layer(rows=8), keys, values, jnp.array([6, 100]))
    for row in range(2):
        np.testing.assert_array_equal(written.keys[row, :, 5:], keys[row])


def test_rows_are_kept_in_the_buffer_s_dtype():
    written = cache.write(layer(dtype="bfloat16"), *new(3), jnp.array([0, 4]))
    assert written.keys.dtype == written.values.dtype == jnp.bfloat16


def test_empty_has_a_buffer_a_layer_of_key_heads_by_positions_by_head_size():
    buffers = cache.empty(presets.TARGETS["qwen3-0.6b"], 2, 5, jnp.dtype("bfloat16"))
    assert len(buffers) == 28
    assert {(x.shape, x.dtype.name) for layer in buffers for x in layer} == {((2, 8, 5, 128), "bfloat16")}
    assert not buffers[0].keys.any()
