"""The draft: a small decoder that proposes a whole block in one pass (DFlash, arXiv 2602.06036, section 4).

Every layer's keys and values come from two places: the target's features of the context, and the block itself.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax import masks, sharding
from dflash_jax.anchors import Anchors, block_spans
from dflash_jax.attention import Buffer, CosSin, join_heads
from dflash_jax.block_attention import Own, Spans, attend_spans
from dflash_jax.cache import Cache, LayerCache, write
from dflash_jax.config import DraftConfig
from dflash_jax.decoder_layer import DecoderLayer, traced_once
from dflash_jax.heads import score
from dflash_jax.layers import DEAR, Linear, RMSNorm
from dflash_jax.rope import angles
from dflash_jax.running_softmax import Segment
from dflash_jax.sampling import likeliest


class DraftLayer(DecoderLayer):
    """A layer that attends to context and block, with the same key and value projections for both (law 3)."""

    def __call__(
        self, x: Float[Array, "b t d"], cos_sin: CosSin, context: LayerCache, start: Int[Array, "b"]
    ) -> Float[Array, "b t d"]:
        """Return the layer's output for a block whose anchors stand at `start`; nothing of it is cached."""
        t = x.shape[1]
        normed = self.input_norm(x)
        queries = self.attention.queries(normed, cos_sin)
        before = masks.context(self.layer, start, t, context.keys.shape[2])
        within = masks.block(self.layer, t)
        segments: list[Segment | Buffer] = [
            Buffer(context.keys, context.values, before, start.max()),
            Segment(*self.attention.keys_values(normed, cos_sin), within),
        ]
        x = x + self.attention.output(queries, segments)
        return self.transform(x)

    def over_blocks(
        self,
        x: Float[Array, "b q d"],
        block_turns: tuple[Float[Array, "b q r"], Float[Array, "b q r"]],
        fused: Float[Array, "b s d"],
        context_turns: tuple[Float[Array, "b s r"], Float[Array, "b s r"]],
        spans: Spans,
        t: int,
    ) -> Float[Array, "b q d"]:
        """Return the layer's output for all blocks of a row at once, each t of the q slots."""
        normed = self.input_norm(x)
        queries = self.attention.queries(normed, block_turns)
        context = self.attention.keys_values(fused, context_turns)
        own = Own(*self.attention.keys_values(normed, block_turns), masks.block(self.layer, t)[0])
        x = sharding.by_rows(x + self.attention.project(join_heads(attend_spans(queries, *context, spans, own))))
        return sharding.by_rows(self.transform(x))


class Draft(nn.Module):
    """The draft's trunk. Embedding and head are the target's (law 4), unless the draft has its own.

    `vocabulary` says which of the target's tokens each column of its own head means, where it has not all of them.
    """

    config: DraftConfig

    def setup(self) -> None:
        c = self.config
        self.fc = Linear(c.hidden_size, use_bias=False)
        self.context_norm = RMSNorm(c.rms_norm_eps)
        self.layers = [DraftLayer(c, layer) for layer in c.layers]
        self.final_norm = RMSNorm(c.rms_norm_eps)
        normal = nn.initializers.normal(0.02)
        if c.own_embedding:
            self.embedding = self.param("embedding", normal, (c.vocab_size, c.hidden_size), jnp.float32)
        if c.own_vocabulary is not None:
            self.head = self.param("head", normal, (c.hidden_size, c.own_vocabulary), jnp.float32)
            if c.own_vocabulary != c.vocab_size:
                self.vocabulary = self.param("vocabulary", nn.initializers.zeros, (c.own_vocabulary,), jnp.int32)

    def embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Look up the draft's own embedding."""
        return sharding.looked_up(self.embedding, tokens)

    def propose(self, hidden: Float[Array, "b t d"]) -> Int[Array, "b t"]:
        """Return the target's token that the draft's own head scores highest."""
        best = likeliest(adjust_logits(self.config, score(hidden, self.head, "dv")))
        return best if self.config.own_vocabulary == self.config.vocab_size else self.vocabulary[best]

    def extend(self, features: Float[Array, "b t pd"], cache: Cache, start: Int[Array, "b"]) -> Cache:
        """Add t positions of target features, from `start` on, to the context's keys and values (laws 2 and 3)."""
        fused = self.context_norm(self.fc(features))
        turns = self._turns(start, features.shape[1])
        return tuple(
            write(rows, *module.attention.keys_values(fused, turns[layer.rotary]), start)
            for module, layer, rows in zip(self.layers, self.config.layers, cache, strict=True)
        )

    def __call__(self, block: Float[Array, "b t d"], cache: Cache, start: Int[Array, "b"]) -> Float[Array, "b t d"]:
        """Run a block of target embeddings: the anchor at `start`, then masks. Slot k speaks for position start + k.

        Returns:
            Hidden states after the final norm, for the target's head; slot 0's mean nothing.
        """
        x = block * jnp.asarray(self.config.input_embedding_scale, block.dtype)
        turns = self._turns(start, block.shape[1])
        run = traced_once(self, DraftLayer.__call__, x)
        for module, layer, rows in zip(self.layers, self.config.layers, cache, strict=True):
            x = run(module, x, turns[layer.rotary], rows, start)
        return self.final_norm(x)

    def over_blocks(
        self,
        blocks: Float[Array, "b m t d"],
        anchors: Anchors,
        features: Float[Array, "b s pd"],
        starts: Int[Array, "b s"],
        remat: bool = False,
    ) -> Float[Array, "b m t d"]:
        """Run all blocks of whole rows at once, for training; no block sees another (law 5).

        Args:
            blocks: target embeddings, the anchor's, then masks.
            anchors: where the blocks stand.
            features: the target's taps of the rows.
            starts: where each position's document starts.
            remat: keep only the layers' inputs for the backward pass, and compute the rest again.

        Returns:
            Hidden states after the final norm, for the target's head; slot 0's, and those of anchors that are not
            valid, mean nothing.
        """
        b, m, t, d = blocks.shape
        x = blocks.reshape(b, m * t, d) * jnp.asarray(self.config.input_embedding_scale, blocks.dtype)
        fused = sharding.by_rows(self.context_norm(self.fc(features)))
        rows = masks.positions(jnp.zeros(b, starts.dtype), features.shape[1]) - starts
        spots = anchors.positions - jnp.take_along_axis(starts, anchors.positions, axis=1)
        slots = masks.positions(spots.reshape(-1), t).reshape(b, m * t)
        kept = None if remat else jax.checkpoint_policies.save_only_these_names(DEAR)
        run = nn.remat(DraftLayer.over_blocks, static_argnums=(6,), policy=kept)
        for module, layer in zip(self.layers, self.config.layers, strict=True):
            turns = [angles(layer.rotary, self.config.head_dim, at) for at in (slots, rows)]
            x = run(module, x, turns[0], fused, turns[1], block_spans(layer, starts, anchors, t), t)
        return self.final_norm(x).reshape(b, m, t, d)

    def initialise(self, features: Float[Array, "b t pd"], block: Float[Array, "b t d"], cache: Cache) -> None:
        """Touch every parameter once, for `init`."""
        start = jnp.zeros(block.shape[0], jnp.int32)
        self(block, self.extend(features, cache, start), start)

    def _turns(self, start: Int[Array, "b"], t: int) -> dict:
        spots = masks.positions(start, t)
        return {layer.rotary: angles(layer.rotary, self.config.head_dim, spots) for layer in self.config.layers}


def adjust_logits(config: DraftConfig, logits: Float[Array, "b t v"]) -> Float[Array, "b t v"]:
    """Apply the draft's own scale and soft cap to the logits of the target's head (law 4)."""
    logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else jnp.tanh(logits / cap) * cap
