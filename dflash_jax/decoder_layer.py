"""What a layer of a target and one of a draft have in common: their modules. What attention sees differs."""

from flax import linen as nn

from dflash_jax.attention import Attention
from dflash_jax.config import LayerConfig, TransformerConfig
from dflash_jax.layers import Mlp, RMSNorm


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each after a norm and around a residual."""

    config: TransformerConfig
    layer: LayerConfig

    def setup(self) -> None:
        self.input_norm = RMSNorm(self.config.rms_norm_eps)
        self.attention = Attention(self.config)
        self.mlp_norm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = Mlp(self.config)
