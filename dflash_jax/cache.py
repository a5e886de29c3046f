"""Key and value buffers, and the one function that writes them.

Rows of a buffer past a row's committed length are garbage that masks hide and later writes replace (law 9). The length
itself lives once, in the decoding state, not here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import TransformerConfig


class LayerCache(NamedTuple):
    """One layer's keys and values. Heads come before positions: XLA's products read each head's rows in one run."""

    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s h"]


Cache = tuple[LayerCache, ...]


def empty(config: TransformerConfig, batch: int, rows: int, dtype: jnp.dtype) -> Cache:
    """Return zeroed buffers of `rows` positions for every layer."""
    shape = (batch, config.num_kv_heads, rows, config.head_dim)
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in config.layers)


def write(
    layer: LayerCache,
    keys: Float[Array, "b k t h"],
    values: Float[Array, "b k t h"],
    start: Int[Array, "b"],
) -> LayerCache:
    """Put t rows at positions start…start+t-1 of each row.

    The caller keeps room for them and one more: `dynamic_update_slice` moves a write that would cross the end back over
    committed rows. The row after a single one is garbage: XLA's CPU backend copies the whole buffer to update one row
    in a loop, and updates two in place.
    """

    def put(buffer: Array, rows: Array, first: Array) -> Array:
        rows = rows.astype(buffer.dtype)
        rows = jnp.repeat(rows, 2, axis=1) if rows.shape[1] == 1 else rows
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, first, axis=1)

    return LayerCache(jax.vmap(put)(layer.keys, keys, start), jax.vmap(put)(layer.values, values, start))
