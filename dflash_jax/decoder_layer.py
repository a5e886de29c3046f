"""What a layer of a target and one of a draft have in common: their modules. What attention sees differs."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from dflash_jax.attention import Attention
from dflash_jax.config import LayerConfig, TransformerConfig
from dflash_jax.experts import Experts
from dflash_jax.layers import Mlp, RMSNorm


class DecoderLayer(nn.Module):
    """Attention, then the MLP or the experts, each after a norm and around a residual."""

    config: TransformerConfig
    layer: LayerConfig

    def setup(self) -> None:
        self.input_norm = RMSNorm(self.config.rms_norm_eps)
        self.attention = Attention(self.config)
        self.mlp_norm = RMSNorm(self.config.rms_norm_eps)
        if self.layer.experts:
            self.experts = Experts(self.config, self.layer.experts)
        else:
            self.mlp = Mlp(self.config)

    def transform(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Add to every position what the MLP, or its experts, make of it."""
        return x + (self.experts if self.layer.experts else self.mlp)(self.mlp_norm(x))


def traced_once(model: nn.Module, run: Callable[..., Any], x: Array) -> Callable[..., Any]:
    """Have a method of a model's layers traced once for all that are alike, in a program that is traced.

    What is compiled stays the same.
    """
    # While parameters are drawn it would change what a seed means; outside of a program it would compile at every call.
    return nn.jit(run) if isinstance(x, jax.core.Tracer) and not model.is_initializing() else run
