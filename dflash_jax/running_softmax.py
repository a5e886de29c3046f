"""A softmax over keys that come piece by piece, so that scores never exist for more than a piece of them.

It runs in float32 or wider (law 13), and hidden keys change not a bit of it once a visible one is in.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dflash_jax.layers import EXACT


class Segment(NamedTuple):
    """Keys and values of one place, and which of them each query sees. The mask's batch may be 1."""

    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s h"]
    visible: Bool[Array, "m t s"]


class Mix(NamedTuple):
    """A softmax on its way over the keys: the highest score so far, and sums of weights relative to it."""

    highest: Float[Array, "b k m 1"]
    weights: Float[Array, "b k m 1"]
    values: Float[Array, "b k m h"]


def group(heads: Float[Array, "b n t h"], key_heads: int) -> Float[Array, "b k m h"]:
    """Make the heads that share a key head the rows of one product: head i uses key head i // (n / k)."""
    b, n, t, h = heads.shape
    return heads.reshape(b, key_heads, (n // key_heads) * t, h)


def begin(grouped: Float[Array, "b k m h"]) -> Mix:
    """Return the softmax over no keys yet."""
    wide = np.promote_types(grouped.dtype, np.float32)
    column = jnp.zeros((*grouped.shape[:3], 1), wide)
    return Mix(column + jnp.finfo(wide).min, column, jnp.zeros(grouped.shape, wide))


def add(mix: Mix, grouped: Float[Array, "b k m h"], segment: Segment) -> Mix:
    """Add a segment's keys."""
    shown = scores(grouped, segment)
    highest = jnp.maximum(mix.highest, shown.max(axis=-1, keepdims=True))
    before = jnp.exp(mix.highest - highest)
    weights = jnp.exp(shown - highest)
    values = jnp.einsum(
        "bkms,bksh->bkmh",
        weights.astype(segment.values.dtype),
        segment.values,
        precision=EXACT,
        preferred_element_type=shown.dtype,
    )
    return Mix(highest, mix.weights * before + weights.sum(axis=-1, keepdims=True), mix.values * before + values)


def scores(grouped: Float[Array, "b k m h"], segment: Segment) -> Float[Array, "b k m s"]:
    """Return the scores of all keys, the lowest number for those that a query does not see."""
    wide = np.promote_types(grouped.dtype, np.float32)
    products = jnp.einsum("bkmh,bksh->bkms", grouped, segment.keys, precision=EXACT, preferred_element_type=wide)
    products *= grouped.shape[-1] ** -0.5
    b, k, m, s = products.shape
    t = segment.visible.shape[1]
    shown = jnp.where(segment.visible[:, None, None], products.reshape(b, k, m // t, t, s), jnp.finfo(wide).min)
    return shown.reshape(b, k, m, s)
