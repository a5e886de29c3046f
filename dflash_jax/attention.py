"""Grouped-query attention over keys and values that lie in several places, under one softmax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from dflash_jax.config import TransformerConfig
from dflash_jax.layers import EXACT, Linear, RMSNorm
from dflash_jax.rope import rotate

CosSin = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]


class Segment(NamedTuple):
    """Keys and values of one place, and which of them each query sees. The mask's batch may be 1."""

    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s h"]
    visible: Bool[Array, "m t s"]


def attend(queries: Float[Array, "b n t h"], segments: list[Segment]) -> Float[Array, "b t nh"]:
    """Attend to all segments under one softmax, which runs in float32 or wider (law 13).

    Every query must see at least one key. Query head i uses key head i // (n / k). Segments are never joined: a cache
    is read where it lies.
    """
    b, n, t, h = queries.shape
    k = segments[0].keys.shape[1]
    # The heads that share a key head become rows of one product.
    grouped = queries.reshape(b, k, (n // k) * t, h)
    scores = jnp.concatenate([_scores(grouped, segment, t) for segment in segments], axis=-1)
    weights = jax.nn.softmax(scores * h**-0.5, axis=-1).reshape(b, k, (n // k) * t, -1)
    ends = [segment.keys.shape[2] for segment in segments]
    parts = jnp.split(weights, [sum(ends[:i]) for i in range(1, len(ends))], axis=-1)
    mixed = jnp.zeros((), queries.dtype)
    for part, segment in zip(parts, segments, strict=True):
        values = part.astype(segment.values.dtype)
        mixed += jnp.einsum("bkms,bksh->bkmh", values, segment.values, precision=EXACT)
    return mixed.reshape(b, n, t, h).swapaxes(1, 2).reshape(b, t, n * h)


def _scores(grouped: Float[Array, "b k m h"], segment: Segment, t: int) -> Float[Array, "b k g t s"]:
    wide = np.promote_types(grouped.dtype, np.float32)
    scores = jnp.einsum("bkmh,bksh->bkms", grouped, segment.keys, precision=EXACT, preferred_element_type=wide)
    b, k, m, s = scores.shape
    shown = segment.visible[:, None, None]
    return jnp.where(shown, scores.reshape(b, k, m // t, t, s), jnp.finfo(wide).min)


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

    def output(self, queries: Float[Array, "b n t h"], segments: list[Segment]) -> Float[Array, "b t d"]:
        """Attend, and project back to the hidden size."""
        return self.o_proj(attend(queries, segments))

    def _heads(self, x: Float[Array, "b t nh"]) -> Float[Array, "b n t h"]:
        b, t, _ = x.shape
        return x.reshape(b, t, -1, self.config.head_dim).swapaxes(1, 2)
