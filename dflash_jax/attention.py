"""Grouped-query attention over keys and values that lie in several places, under one softmax."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import TransformerConfig
from dflash_jax.layers import EXACT, Linear, RMSNorm
from dflash_jax.rope import rotate

# Rows of a buffer that are read at once.
PIECE = 256

CosSin = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]


class Segment(NamedTuple):
    """Keys and values of one place, and which of them each query sees. The mask's batch may be 1."""

    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s h"]
    visible: Bool[Array, "m t s"]


class Buffer(NamedTuple):
    """A segment that no query sees the rows of from `filled` on, in any row of the batch."""

    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s h"]
    visible: Bool[Array, "m t s"]
    filled: Int[Array, ""]


class _Mix(NamedTuple):
    """A softmax on its way over the keys: the highest score so far, and sums of weights relative to it."""

    highest: Float[Array, "b k m 1"]
    weights: Float[Array, "b k m 1"]
    values: Float[Array, "b k m h"]


def attend(queries: Float[Array, "b n t h"], segments: Sequence[Segment | Buffer]) -> Float[Array, "b t nh"]:
    """Attend to all segments under one softmax, which runs in float32 or wider (law 13).

    Every query must see at least one key. Query head i uses key head i // (n / k). Segments are never joined: a cache
    is read where it lies, and on CPUs only as far as it is filled.
    """
    b, n, t, h = queries.shape
    k = segments[0].keys.shape[1]
    # The heads that share a key head become rows of one product.
    grouped = queries.reshape(b, k, (n // k) * t, h)
    wide = np.promote_types(queries.dtype, np.float32)
    column = jnp.zeros((b, k, grouped.shape[2], 1), wide)
    mix = _Mix(column + jnp.finfo(wide).min, column, jnp.zeros(grouped.shape, wide))
    for segment in segments:
        if isinstance(segment, Buffer) and segment.keys.shape[2] % PIECE == 0:
            # An accelerator reads rows faster than it decides whether to.
            mix = jax.lax.platform_dependent(mix, grouped, segment, cpu=_add_pieces, default=_add)
        else:
            mix = _add(mix, grouped, segment)
    mixed = (mix.values / mix.weights).astype(queries.dtype)
    return mixed.reshape(b, n, t, h).swapaxes(1, 2).reshape(b, t, n * h)


def _add_pieces(mix: _Mix, grouped: Float[Array, "b k m h"], segment: Buffer) -> _Mix:
    """Add the filled rows of a buffer, and those after them up to the end of a piece."""

    def add(i: Array, mix: _Mix) -> _Mix:
        def piece(rows: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(rows, i * PIECE, PIECE, axis)

        return _add(mix, grouped, Segment(piece(segment.keys, 2), piece(segment.values, 2), piece(segment.visible, 2)))

    return jax.lax.fori_loop(0, -(-segment.filled // PIECE), add, mix)


def _add(mix: _Mix, grouped: Float[Array, "b k m h"], segment: Segment | Buffer) -> _Mix:
    """Add keys to the softmax. Adding hidden ones changes not a bit once a visible one is in."""
    scores = _scores(grouped, segment)
    highest = jnp.maximum(mix.highest, scores.max(axis=-1, keepdims=True))
    before = jnp.exp(mix.highest - highest)
    weights = jnp.exp(scores - highest)
    values = jnp.einsum(
        "bkms,bksh->bkmh",
        weights.astype(segment.values.dtype),
        segment.values,
        precision=EXACT,
        preferred_element_type=scores.dtype,
    )
    return _Mix(highest, mix.weights * before + weights.sum(axis=-1, keepdims=True), mix.values * before + values)


def _scores(grouped: Float[Array, "b k m h"], segment: Segment | Buffer) -> Float[Array, "b k m s"]:
    wide = np.promote_types(grouped.dtype, np.float32)
    scores = jnp.einsum("bkmh,bksh->bkms", grouped, segment.keys, precision=EXACT, preferred_element_type=wide)
    scores *= grouped.shape[-1] ** -0.5
    b, k, m, s = scores.shape
    t = segment.visible.shape[1]
    shown = jnp.where(segment.visible[:, None, None], scores.reshape(b, k, m // t, t, s), jnp.finfo(wide).min)
    return shown.reshape(b, k, m, s)


class Attention(nn.Module):
    """The projections of one attention layer; where keys and values are kept is the caller's business."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.q_proj = Linear(c.num_heads * c.head_dim, use_bias=c.attention_bias)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, use_bias=c.attention_bias)
        self.v_proj = Linear(c.num_kv_heads * c.head_dim, use_bias=c.attention_bias)
        self.o_proj = Linear(c.hidden_size, use_bias=c.attention_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps)
            self.k_norm = RMSNorm(c.rms_norm_eps)

    def queries(self, x: Float[Array, "b t d"], cos_sin: CosSin) -> Float[Array, "b n t h"]:
        """Project, norm and turn the queries of x."""
        heads = self._heads(self.q_proj(x))
        return rotate(self.q_norm(heads) if self.config.qk_norm else heads, cos_sin)

    def keys_values(
        self, x: Float[Array, "b t d"], cos_sin: CosSin
    ) -> tuple[Float[Array, "b k t h"], Float[Array, "b k t h"]]:
        """Project the keys and values of x, and norm and turn the keys."""
        heads = self._heads(self.k_proj(x))
        keys = rotate(self.k_norm(heads) if self.config.qk_norm else heads, cos_sin)
        return keys, self._heads(self.v_proj(x))

    def output(self, queries: Float[Array, "b n t h"], segments: Sequence[Segment | Buffer]) -> Float[Array, "b t d"]:
        """Attend, and project back to the hidden size."""
        return self.o_proj(attend(queries, segments))

    def _heads(self, x: Float[Array, "b t nh"]) -> Float[Array, "b n t h"]:
        b, t, _ = x.shape
        return x.reshape(b, t, -1, self.config.head_dim).swapaxes(1, 2)
