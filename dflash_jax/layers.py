"""Building blocks that target and draft share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from dflash_jax.config import TransformerConfig

# TPUs and GPUs multiply float32 in fewer bits unless told otherwise, which would break law 7; bf16 is not slowed by it.
EXACT = jax.lax.Precision.HIGHEST
Linear = functools.partial(nn.Dense, precision=EXACT)


class RMSNorm(nn.Module):
    """Root-mean-square norm with statistics in float32 or wider, cast back before the scale as Hugging Face does."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """Norm the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.gate_proj = Linear(c.intermediate_size, use_bias=c.mlp_bias)
        self.up_proj = Linear(c.intermediate_size, use_bias=c.mlp_bias)
        self.down_proj = Linear(c.hidden_size, use_bias=c.mlp_bias)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the layer to every position."""
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
