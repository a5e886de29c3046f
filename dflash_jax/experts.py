"""The expert layer of Qwen3-MoE: each token goes through a few SwiGLUs of many, which its router chooses.

Tokens are sorted by expert, so that each expert multiplies its own in one go, and none meets an expert that was not
chosen for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax import sharding
from dflash_jax.config import ExpertsConfig, TransformerConfig
from dflash_jax.layers import EXACT, Linear


class Experts(nn.Module):
    """Σ_i w_i down_i(silu(gate_i(x)) * up_i(x)) over the chosen experts i."""

    config: TransformerConfig
    experts: ExpertsConfig

    def setup(self) -> None:
        count, d, f = self.experts.count, self.config.hidden_size, self.experts.intermediate_size
        self.router = Linear(count, use_bias=False)
        each = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
        self.gate_proj = self.param("gate_proj", each, (count, d, f), jnp.float32)
        self.up_proj = self.param("up_proj", each, (count, d, f), jnp.float32)
        self.down_proj = self.param("down_proj", each, (count, f, d), jnp.float32)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the layer to every position."""
        chosen, shares = choose(self.router(x), self.experts)
        weights = tuple(kernel.astype(x.dtype) for kernel in (self.gate_proj, self.up_proj, self.down_proj))
        return sharding.on_expert_shards(mix)(x, chosen, shares, *weights)


def choose(logits: Float[Array, "b t e"], config: ExpertsConfig) -> tuple[Int[Array, "b t k"], Float[Array, "b t k"]]:
    """Return the likeliest experts of each token, and how much each of them counts.

    Chances are in float32 or wider, and cast back at the end, as Hugging Face has them.
    """
    chances = jax.nn.softmax(logits.astype(np.promote_types(logits.dtype, np.float32)), axis=-1)
    shares, chosen = jax.lax.top_k(chances, config.chosen)
    if config.normalised:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    return chosen, shares.astype(logits.dtype)


def mix(
    x: Float[Array, "b t d"],
    chosen: Int[Array, "b t k"],
    shares: Float[Array, "b t k"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
) -> Float[Array, "b t d"]:
    """Send each token through its experts, and add up what they return by their shares."""
    b, t, k = chosen.shape
    tokens, experts = x.reshape(b * t, -1), chosen.reshape(-1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=gate.shape[0])

    def product(rows: Float[Array, "n i"], kernels: Float[Array, "e i o"]) -> Float[Array, "n o"]:
        return jax.lax.ragged_dot(rows, kernels, sizes, precision=EXACT)

    rows = tokens[order // k]
    found = product(nn.silu(product(rows, gate)) * product(rows, up), down)
    back = jnp.argsort(order)
    return (found[back].reshape(b, t, k, -1) * shares[..., None]).sum(axis=2)
