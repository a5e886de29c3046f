"""The target: one decoder for Qwen3 and Llama, whose layers can be tapped.

Parameters are plain nested dictionaries; modules are used as pure functions through `apply`.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax import masks, sharding
from dflash_jax.anchors import row_spans
from dflash_jax.attention import Buffer, CosSin, join_heads
from dflash_jax.block_attention import attend_spans
from dflash_jax.cache import Cache, LayerCache, write
from dflash_jax.config import TargetConfig
from dflash_jax.decoder_layer import DecoderLayer, traced_once
from dflash_jax.heads import score
from dflash_jax.layers import RMSNorm
from dflash_jax.rope import angles


class TargetLayer(DecoderLayer):
    """A layer that attends causally to its cache, after adding to it."""

    def __call__(
        self, x: Float[Array, "b t d"], cos_sin: CosSin, cache: LayerCache, start: Int[Array, "b"]
    ) -> tuple[Float[Array, "b t d"], LayerCache]:
        """Return the layer's output, and its cache with the t new rows."""
        normed = self.input_norm(x)
        queries = self.attention.queries(normed, cos_sin)
        cache = write(cache, *self.attention.keys_values(normed, cos_sin), start)
        seen = masks.cached(self.layer, start, x.shape[1], cache.keys.shape[2])
        filled = start.max() + x.shape[1]
        x = x + self.attention.output(queries, [Buffer(cache.keys, cache.values, seen, filled)])
        return self.transform(x), cache

    def over_row(self, x: Float[Array, "b s d"], cos_sin: CosSin, starts: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """Return the layer's output for whole rows at once, without a cache."""
        normed = self.input_norm(x)
        queries = self.attention.queries(normed, cos_sin)
        keys, values = self.attention.keys_values(normed, cos_sin)
        mixed = attend_spans(queries, keys, values, row_spans(self.layer, starts), None)
        x = sharding.by_rows(x + self.attention.project(join_heads(mixed)))
        return sharding.by_rows(self.transform(x))


class Target(nn.Module):
    """A decoder that returns its last hidden states, the tapped features, and its cache.

    `taps` are 0-based layers whose *outputs* are returned, joined in that order (law 1).
    """

    config: TargetConfig
    taps: tuple[int, ...] = ()

    def setup(self) -> None:
        c = self.config
        normal = nn.initializers.normal(0.02)
        self.embedding = self.param("embedding", normal, (c.vocab_size, c.hidden_size), jnp.float32)
        self.layers = [TargetLayer(c, layer) for layer in c.layers]
        self.final_norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.head = self.param("head", normal, (c.hidden_size, c.vocab_size), jnp.float32)

    def __call__(
        self, tokens: Int[Array, "b t"], cache: Cache, start: Int[Array, "b"]
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t pd"], Cache]:
        """Run tokens at positions start…start+t-1, which see the cache's earlier rows and one another.

        Returns:
            Hidden states after the final norm, which `logits` takes; features; and the cache with t more rows.
        """
        x = self.embed(tokens)
        spots = masks.positions(start, tokens.shape[1])
        turns = {layer.rotary: angles(layer.rotary, self.config.head_dim, spots) for layer in self.config.layers}
        outputs, filled = [], []
        run = traced_once(self, TargetLayer.__call__, x)
        for module, layer, rows in zip(self.layers, self.config.layers, cache, strict=True):
            x, grown = run(module, x, turns[layer.rotary], rows, start)
            outputs.append(x)
            filled.append(grown)
        features = jnp.concatenate([outputs[i] for i in self.taps] or [x[..., :0]], axis=-1)
        return self.final_norm(x), features, tuple(filled)

    def embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Look up the embedding's rows; also for drafts, which have none of their own (law 4)."""
        return sharding.looked_up(self.embedding, tokens)

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Score the vocabulary, in float32 or wider; also for drafts."""
        if self.config.tie_word_embeddings:
            return score(hidden, self.embedding, "vd")
        return score(hidden, self.head, "dv")
