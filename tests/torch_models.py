"""Small random torch models, and their weights in the trees of `dflash_jax`; independent of `convert` on purpose."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import unflatten_dict
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dflash_jax import cache, parameters
from dflash_jax.cache import Cache
from dflash_jax.config import DraftConfig, TargetConfig, TransformerConfig
from dflash_jax.target import Target

# Heads are wider than hidden_size / num_attention_heads, and every size differs, so that a mixed-up axis raises.
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
TARGETS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-tied": Qwen3Config(**SIZES | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "qwen3-biased": Qwen3Config(**SIZES | {"num_key_value_heads": 4}, attention_bias=True),
    "qwen3-sliding": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3-linear": Qwen3Config(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    "qwen3-yarn": Qwen3Config(**SIZES, rope_parameters=dict(YARN)),
    "qwen3-yarn-untruncated": Qwen3Config(**SIZES, rope_parameters=YARN | {"truncate": False, "beta_fast": 4.0}),
    "qwen3-yarn-mscale": Qwen3Config(**SIZES, rope_parameters=YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-partly-dense": Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1], tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES | {"head_dim": None}),
    "llama3-biased": LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3), attention_bias=True, mlp_bias=True),
}
MODELS: dict[type[PreTrainedConfig], type[torch.nn.Module]] = {
    Qwen3Config: Qwen3ForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
    LlamaConfig: LlamaForCausalLM,
}
NAMES = {
    "model.": "",
    "layers.": "layers_",
    "self_attn": "attention",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mlp_norm",
    "hidden_norm": "context_norm",
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
}


def hf_dict(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """Return a config as its `config.json` holds it."""
    return config.to_dict() | {"architectures": [architecture]}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter values that show a fault: norms and biases too, and at a scale that reaches the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("norm.weight"):
            value.data = 1 + 0.3 * noise
        elif value.ndim == 1:
            value.data = 0.3 * noise
        elif value.ndim == 3:
            value.data = noise * value.shape[2] ** -0.5
        elif name.endswith("embed_tokens.weight"):
            value.data = noise
        else:
            value.data = noise * value.shape[1] ** -0.5


def params_of(model: torch.nn.Module, *, tied: bool = False) -> dict[str, Any]:
    """Return a torch model's weights as our tree: kernels are transposed, norms hold `scale`."""
    flat: dict[str, jax.Array] = {}
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        path = name
        for theirs, ours in NAMES.items():
            path = path.replace(theirs, ours)
        path = re.sub(r"^norm\.", "final_norm.", path)
        path = re.sub(r"norm\.weight$", "norm.scale", path)
        kernel = path.endswith(".weight") or path == "head"
        array = value.detach().numpy()
        if ".mlp.experts." in name:
            flat |= _experts(path.replace(".mlp.", "."), jnp.asarray(array.swapaxes(1, 2)))
            continue
        path = path.replace(".mlp.gate.weight", ".experts.router.weight")
        flat[path.replace(".weight", ".kernel")] = jnp.asarray(array.T if kernel else array)
    return unflatten_dict(flat, sep=".")


def _experts(path: str, array: jax.Array) -> dict[str, jax.Array]:
    """Take apart what transformers joins, [experts, in, out]."""
    if not path.endswith("gate_up_proj"):
        return {path: array}
    gate, up = jnp.split(array, 2, axis=2)
    return {path.replace("gate_up_proj", "gate_proj"): gate, path.replace("gate_up_proj", "up_proj"): up}


def random_params(config: TargetConfig | DraftConfig, seed: int = 0) -> dict[str, Any]:
    """Return float32 weights that show a fault, as `randomise` does, without a torch model."""
    rng = np.random.default_rng(seed)

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.normal(size=shape.shape)
        value = noise * shape.shape[-2] ** -0.5 if noise.ndim > 1 else 1 + 0.3 * noise
        return jnp.asarray(value, jnp.float32)

    return jax.tree.map(leaf, parameters.shapes(config))


def hf_target(name: str) -> tuple[torch.nn.Module, TargetConfig, dict[str, Any]]:
    """Return the torch model of `TARGETS[name]`, its config as we read it, and its weights as our tree."""
    hf = TARGETS[name]
    made = MODELS[type(hf)](hf).eval()
    randomise(made)
    config = TargetConfig.from_hf(hf_dict(hf, type(made).__name__))
    return made, config, params_of(made, tied=config.tie_word_embeddings)


@functools.cache
def _step(config: TargetConfig) -> Callable[..., Any]:
    model = Target(config, tuple(range(config.num_layers)))

    @jax.jit
    def step(params: Any, tokens: jax.Array, filled: Cache, start: jax.Array) -> tuple[Any, ...]:
        outputs: Any = model.apply({"params": params}, tokens, filled, start)
        hidden, taps, filled = outputs
        return hidden, taps, model.apply({"params": params}, hidden, method="logits"), filled

    return step


def run_target(
    config: TargetConfig,
    params: dict[str, Any],
    tokens: np.ndarray,
    chunks: tuple[int, ...] | None = None,
    starts: tuple[int, ...] | None = None,
    buffers: Cache | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Cache]:
    """Run tokens through our target, in the given chunks; return hidden states, every tap, logits and the cache."""
    filled = buffers if buffers is not None else empty(config, len(tokens), params["embedding"].dtype)
    start = jnp.asarray(starts if starts is not None else [0] * len(tokens), jnp.int32)
    parts = []
    for chunk in np.split(tokens, np.cumsum(chunks or (tokens.shape[1],))[:-1], axis=1):
        *outputs, filled = _step(config)(params, jnp.asarray(chunk, jnp.int32), filled, start)
        start += chunk.shape[1]
        parts.append([np.asarray(output) for output in outputs])
    hidden, taps, logits = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return hidden, taps, logits, filled


def empty(config: TransformerConfig, batch: int, dtype: Any = "float32", rows: int = 40) -> Cache:
    """Return a cache whose rows hold rubbish: what a mask fails to hide, shows."""
    return jax.tree.map(lambda buffer: buffer + 5, cache.empty(config, batch, rows, jnp.dtype(dtype)))


def tokens(batch: int, length: int, vocab: int = 61, seed: int = 0) -> np.ndarray:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, (batch, length))
