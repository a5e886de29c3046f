"""Published target sizes, by name: for shape tests, plans and random initialisation."""

from dflash_jax.config import ExpertsConfig, LayerConfig, TargetConfig
from dflash_jax.rope import Rotary


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> TargetConfig:
    return TargetConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_positions=40960,
        layers=(LayerConfig(Rotary(theta=1e6)),) * layers,
        family="qwen3",
        tie_word_embeddings=tied,
        bos_token_id=151643,
        stop_token_ids=(151645,),
    )


def _qwen3_coder() -> TargetConfig:
    experts = ExpertsConfig(count=128, chosen=8, intermediate_size=768, normalised=True)
    return TargetConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5472,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_positions=262144,
        layers=(LayerConfig(Rotary(theta=1e7), experts=experts),) * 48,
        family="qwen3_moe",
        stop_token_ids=(151645,),
    )


def _llama3(hidden: int, intermediate: int, layers: int, heads: int, *, factor: float, tied: bool) -> TargetConfig:
    rotary = Rotary(theta=5e5, kind="llama3", factor=factor, original_max_positions=8192)
    return TargetConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=64 if hidden == 2048 else 128,
        rms_norm_eps=1e-5,
        max_positions=131072,
        layers=(LayerConfig(rotary),) * layers,
        qk_norm=False,
        family="llama",
        tie_word_embeddings=tied,
        bos_token_id=128000,
        stop_token_ids=(128001, 128008, 128009),
    )


TARGETS: dict[str, TargetConfig] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "qwen3-coder-30b-a3b": _qwen3_coder(),
    "llama3.2-1b": _llama3(2048, 8192, 16, 32, factor=32.0, tied=True),
    "llama3.2-3b": _llama3(3072, 8192, 28, 24, factor=32.0, tied=True),
    "llama3.1-8b": _llama3(4096, 14336, 32, 32, factor=8.0, tied=False),
}
