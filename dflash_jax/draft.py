"""The draft: a small decoder that proposes a whole block in one pass (DFlash, arXiv 2602.06036, section 4).

Every layer's keys and values come from two places: the target's features of the context, and the block itself.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax import masks
from dflash_jax.attention import Buffer, CosSin, Segment
from dflash_jax.cache import Cache, LayerCache, write
from dflash_jax.config import DraftConfig
from dflash_jax.decoder_layer import DecoderLayer
from dflash_jax.layers import Linear, RMSNorm
from dflash_jax.rope import angles


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
        return x + self.mlp(self.mlp_norm(x))


class Draft(nn.Module):
    """The draft's trunk. Embedding and head are the target's (law 4)."""

    config: DraftConfig

    def setup(self) -> None:
        c = self.config
        self.fc = Linear(c.hidden_size, use_bias=False)
        self.context_norm = RMSNorm(c.rms_norm_eps)
        self.layers = [DraftLayer(c, layer) for layer in c.layers]
        self.final_norm = RMSNorm(c.rms_norm_eps)

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
        for module, layer, rows in zip(self.layers, self.config.layers, cache, strict=True):
            x = module(x, turns[layer.rotary], rows, start)
        return self.final_norm(x)

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
