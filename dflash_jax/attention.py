"""Grouped-query attention over keys and values that lie in several places, under one softmax."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from dflash_jax import running_softmax
from dflash_jax.config import TransformerConfig
from dflash_jax.layers import Linear, RMSNorm
from dflash_jax.rope import rotate
from dflash_jax.running_softmax import Mix, Segment

# Rows of a buffer that are read at once.
PIECE = 256

CosSin = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]


class Buffer(NamedTuple):
    """A segment that no query sees the rows of from `filled` on, in any row of the batch."""

    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s h"]
    visible: Bool[Array, "m t s"]
    filled: Int[Array, ""]


def attend(queries: Float[Array, "b n t h"], segments: Sequence[Segment | Buffer]) -> Float[Array, "b t nh"]:
    """Attend to all segments under one softmax.

    Every query must see at least one key. Segments are never joined: a cache is read where it lies, and on CPUs only
    as far as it is filled.
    """
    grouped = running_softmax.group(queries, segments[0].keys.shape[1])
    mix = running_softmax.begin(grouped)
    for segment in segments:
        if isinstance(segment, Buffer) and segment.keys.shape[2] % PIECE == 0:
            # An accelerator reads rows faster than it decides whether to.
            mix = jax.lax.platform_dependent(mix, grouped, segment, cpu=_add_pieces, default=_add)
        else:
            mix = _add(mix, grouped, segment)
    mixed = (mix.values / mix.weights).astype(queries.dtype)
    return join_heads(mixed.reshape(queries.shape))


def join_heads(heads: Float[Array, "b n t h"]) -> Float[Array, "b t nh"]:
    """Put what the heads of a position found side by side."""
    b, n, t, h = heads.shape
    return heads.swapaxes(1, 2).reshape(b, t, n * h)


def _add(mix: Mix, grouped: Float[Array, "b k m h"], segment: Segment | Buffer) -> Mix:
    return running_softmax.add(mix, grouped, Segment(segment.keys, segment.values, segment.visible))


def _add_pieces(mix: Mix, grouped: Float[Array, "b k m h"], segment: Buffer) -> Mix:
    """Add the filled rows of a buffer, and those after them up to the end of a piece."""

    def add(i: Array, mix: Mix) -> Mix:
        def piece(rows: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(rows, i * PIECE, PIECE, axis)

        return _add(mix, grouped, Segment(piece(segment.keys, 2), piece(segment.values, 2), piece(segment.visible, 2)))

    return jax.lax.fori_loop(0, -(-segment.filled // PIECE), add, mix)


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
        return self.project(attend(queries, segments))

    def project(self, mixed: Float[Array, "b t nh"]) -> Float[Array, "b t d"]:
        """Project what was attended to back to the hidden size."""
        return self.o_proj(mixed)

    def _heads(self, x: Float[Array, "b t nh"]) -> Float[Array, "b n t h"]:
        b, t, _ = x.shape
        # Else XLA for TPUs turns the weights, all of them in each pass, to have the product come out by heads.
        x = jax.lax.optimization_barrier(x)
        return x.reshape(b, t, -1, self.config.head_dim).swapaxes(1, 2)
