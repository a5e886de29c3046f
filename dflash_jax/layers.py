"""Building blocks that target and draft share."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from dflash_jax.config import TransformerConfig

# TPUs and GPUs multiply float32 in fewer bits unless told otherwise, which would break law 7; bf16 is not slowed by it.
EXACT = jax.lax.Precision.HIGHEST
# What is dear to compute again: in training a backward pass finds it kept.
DEAR = "dear"


class Linear(nn.Module):
    """x W + b, in the dtype of x. Gradients of W and b are added up in float32 or wider, over devices too (law 13)."""

    features: int
    use_bias: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*rows i"]) -> Float[Array, "*rows o"]:
        """Multiply the last axis."""
        shape = (x.shape[-1], self.features)
        y = _product(x, self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32))
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return y + jnp.broadcast_to(bias, y.shape).astype(y.dtype)


@jax.custom_vjp
def _product(x: Float[Array, "*rows i"], kernel: Float[Array, "i o"]) -> Float[Array, "*rows o"]:
    return jnp.matmul(x, kernel.astype(x.dtype), precision=EXACT)


def _product_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return checkpoint_name(_product(x, kernel), DEAR), (x, kernel)


def _product_backward(kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = kept
    wide = np.promote_types(x.dtype, np.float32)
    d_kernel = jnp.einsum("...i,...o->io", x, cotangent, precision=EXACT, preferred_element_type=wide)
    return jnp.matmul(cotangent, kernel.astype(x.dtype).T, precision=EXACT), d_kernel.astype(kernel.dtype)


_product.defvjp(_product_forward, _product_backward)


class RMSNorm(nn.Module):
    """Root-mean-square norm with statistics in float32 or wider, cast back before the scale as Hugging Face does."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """Norm the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * jnp.broadcast_to(scale, x.shape).astype(x.dtype)


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
