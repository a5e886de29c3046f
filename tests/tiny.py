"""Random pairs small enough to decode by the thousand, and plain decoding without any of the machinery under test."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from convert import LoadedDraft, LoadedTarget
from dflash_jax import cache, parameters
from dflash_jax.config import DraftConfig, LayerConfig, TargetConfig
from dflash_jax.rope import Rotary
from dflash_jax.target import Target
from inference.engine import Engine

VOCABULARY = 11  # few tokens, so that a random draft is right often enough to be accepted in every pattern
MASK = 10
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "max_positions": 512,
}
ROTARY = Rotary(theta=1e4)
TARGET = TargetConfig(**SIZES, layers=(LayerConfig(ROTARY),) * 4, family="qwen3")
DRAFT = DraftConfig(
    **SIZES,
    layers=(LayerConfig(ROTARY, causal=False), LayerConfig(ROTARY, window=6)),
    block_size=8,
    mask_token_id=MASK,
    target_layer_ids=(0, 2),
)


def params(config: TargetConfig | DraftConfig, seed: int, dtype: Any = jnp.float32) -> parameters.Params:
    """Random parameters with logits far enough apart that ties are rare."""
    tree = _init(config, jax.random.key(seed))
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf * (20 if leaf.ndim == 2 and leaf.std() < 0.03 else 1), dtype), tree
    )


_init = jax.jit(parameters.init, static_argnums=0)


def engine(
    target: TargetConfig = TARGET,
    draft: DraftConfig | None = DRAFT,
    *,
    dtype: Any = jnp.float32,
    stop_token_ids: tuple[int, ...] = (),
    **options: Any,
) -> Engine:
    """A pair of random models; the same every time. The buffers end just where a last chunk may."""
    loaded = LoadedTarget(config=target, params=params(target, 0, dtype), stop_token_ids=stop_token_ids, source="tiny")
    paired = LoadedDraft(config=draft, params=params(draft, 1, dtype), source="tiny") if draft else None
    return Engine(loaded, paired, **{"max_length": 192} | options)


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def run(module: nn.Module, weights: parameters.Params, *inputs: Any, method: str = "__call__") -> Any:
    return module.apply({"params": weights}, *inputs, method=method)


def following_logits(weights: parameters.Params, text: list[int]) -> np.ndarray:
    """The target's logits after a text, which is run whole: nothing is kept, nothing is verified."""
    rows = 32 * (len(text) // 32 + 1)  # few shapes, few compilations
    padded = jnp.asarray([text + [0] * (rows - len(text))], jnp.int32)
    return np.asarray(_logits(weights, padded)[0, len(text) - 1])


@jax.jit
def _logits(weights: parameters.Params, tokens: jax.Array) -> jax.Array:
    model, zero = Target(TARGET), jnp.zeros(1, jnp.int32)
    buffers = cache.empty(TARGET, 1, tokens.shape[1], weights["embedding"].dtype)
    return run(model, weights, run(model, weights, tokens, buffers, zero)[0], method="logits")


def plain_greedy(weights: parameters.Params, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens, the whole text run anew for each."""
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(int(following_logits(weights, text).argmax()))
    return text[len(prompt) :]
