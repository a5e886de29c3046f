"""A GGUF file's metadata, spelled as a Hugging Face config."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.config import FAMILIES
from dflash_jax.errors import check
from dflash_jax.rope import Rotary

READ = ("qwen3", "llama")
ARCHITECTURE = "general.architecture"
ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
STOPS = ("eos", "eot", "eom")
# llama.cpp writes Llama 3.1's frequencies, not what they were made of; every published file has these.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(metadata: Mapping[str, Any], tensors: Mapping[str, Any], rope_factors: np.ndarray | None) -> dict[str, Any]:
    """Return the config of the target that a GGUF file holds.

    Args:
        metadata: the file's.
        tensors: the file's, by name, with their shapes.
        rope_factors: the values of `rope_freqs.weight`, where the file has it.

    Raises:
        UserError: an architecture or a feature that is not supported, or a number that is not there.
    """
    family = metadata.get(ARCHITECTURE)
    check(family in READ, f"{ARCHITECTURE} {family!r} is not supported; {' and '.join(READ)} are")
    check(
        metadata.get("split.count", 1) <= 1,
        f"one of {metadata.get('split.count')} parts of a model; the one file that llama-gguf-split --merge makes "
        "is right",
    )
    check(EMBEDDING in tensors, f"tensor {EMBEDDING} is missing")
    own = {key.removeprefix(f"{family}."): value for key, value in metadata.items() if key.startswith(f"{family}.")}
    heads = _required(own, family, "attention.head_count")
    check(heads > 0, f"metadata {family}.attention.head_count: {heads}; 1 or more is right")
    head_dim = own.get("attention.key_length", _required(own, family, "embedding_length") // heads)
    _check_features(own, family, head_dim)
    stops = [metadata[key] for stop in STOPS if (key := f"tokenizer.ggml.{stop}_token_id") in metadata]
    return {
        "architectures": [FAMILIES[str(family)]],
        "model_type": family,
        "vocab_size": tensors[EMBEDDING].shape[0],
        "hidden_size": own["embedding_length"],
        "intermediate_size": _required(own, family, "feed_forward_length"),
        "num_hidden_layers": _required(own, family, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(_required(own, family, "attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": _required(own, family, "context_length"),
        "rope_parameters": _rope(own, family, head_dim, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": HEAD not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(stops)),
    }


def _required(own: Mapping[str, Any], family: Any, key: str) -> Any:
    check(key in own, f"metadata {family}.{key} is missing")
    value = own[key]
    check(not isinstance(value, list), f"metadata {family}.{key}: a number for each layer is not supported; one is")
    return value


def _check_features(own: Mapping[str, Any], family: Any, head_dim: int) -> None:
    """Refuse what llama.cpp computes for these architectures and we do not."""
    only = {
        "expert_count": (0,),
        "attention.sliding_window": (0,),
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "rope.scaling.attn_factor": (1.0,),
    }
    for key, values in only.items():
        value = own.get(key)
        check(
            value is None or value in values,
            f"metadata {family}.{key}: {value!r} is not supported; {values[0]} is",
        )


def _rope(own: Mapping[str, Any], family: Any, head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    theta = _shortest(_required(own, family, "rope.freq_base"))
    kind = own.get("rope.scaling.type", "none")
    check(kind in ("none", "linear", "yarn"), f"metadata {family}.rope.scaling.type: {kind!r} is not supported")
    if factors is not None:
        check(kind == "none", f"metadata {family}.rope.scaling.type {kind!r} beside {ROPE_FACTORS} is not supported")
        return _llama3(theta, head_dim, factors)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    scaled = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": _shortest(_required(own, family, "rope.scaling.factor")),
    }
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = _required(own, family, "rope.scaling.original_context_length")
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if f"rope.scaling.{theirs}" in own:
                scaled[ours] = _shortest(own[f"rope.scaling.{theirs}"])
    return scaled


def _llama3(theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """Recover the scaling from its factors, and make sure that it gives them back."""
    section = {"rope_type": "llama3", "rope_theta": theta, "factor": _shortest(float(factors.max())), **LLAMA3}
    plain = Rotary(theta).frequencies(head_dim)
    scaled = Rotary.from_hf({"rope_parameters": section}, "full_attention").frequencies(head_dim)
    check(
        factors.shape == plain.shape and np.allclose(plain / scaled, factors, rtol=1e-4),
        f"tensor {ROPE_FACTORS}: not the llama3 scaling of original context 8192 that published files have",
    )
    return section


def _shortest(value: Any) -> float:
    """Return the decimal that was meant by a number kept in 32 bits: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))
