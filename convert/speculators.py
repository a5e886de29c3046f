"""Drafts in the layout of the library `speculators`: with a head of their own, for a part of all tokens.

Older files bring an embedding, too, and a head where it knows all tokens; newer ones leave both to the target.

Its `aux_hidden_state_layer_ids` count the embedding as 0, so they are one higher than ours. `d2t` holds how far a row
of the head lies before the token that it means, `t2d` which tokens have a row.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dflash_jax.config import DRAFT_ARCHITECTURE, DraftConfig
from dflash_jax.errors import UserError, check

KIND = "dflash"
D2T, T2D = "d2t", "t2d"
LAYERS = "transformer_layer_config"
# Fields of the published layout that this one has elsewhere.
ELSEWHERE = (
    "architectures",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "is_causal",
    "own_vocabulary",
    "own_embedding",
)
# Of the slots, which a config in this layout may name as a published one does.
SLOTS = ("sample_from_anchor", "shift_label", "projector_type")
# What transformers' Qwen3Config has where a file says nothing: such files hold what differs from it alone.
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Say whether a config is in this layout."""
    return "speculators_model_type" in config


def has_whole_vocabulary(config: Mapping[str, Any]) -> bool:
    """Say whether a draft's head knows all tokens; `d2t` and `t2d`, where there are any, may then change nothing."""
    own = config.get("draft_vocab_size")
    return is_speculators(config) and own is not None and own == _layers(config)["vocab_size"]


def read_config(config: Mapping[str, Any], held: Collection[str]) -> DraftConfig:
    """Read a draft's config; `held` are those of embedding and head that lie beside it.

    Raises:
        UserError: another kind of draft, one with other slots, or a field that is absent or absurd.
    """
    kind = config.get("speculators_model_type")
    check(kind == KIND, f"speculators_model_type: {kind!r} is not supported; {KIND!r} is")
    inner = _layers(config)
    width = config.get("target_hidden_size")
    check(
        width in (None, inner.get("hidden_size")),
        f"target_hidden_size: {width!r}, and the draft has {inner.get('hidden_size')!r}; a target as wide as its draft "
        "is right",
    )
    ids: Any = config.get("aux_hidden_state_layer_ids")
    check(
        isinstance(ids, list) and all(isinstance(i, int) and i > 0 for i in ids) and len(ids) > 0,
        f"aux_hidden_state_layer_ids: {ids!r}; a list of the target's layers (1 and up; 0 is its embedding) is needed, "
        "and never guessed",
    )
    vocabulary, own = inner.get("vocab_size"), config.get("draft_vocab_size")
    check(
        isinstance(own, int) and isinstance(vocabulary, int) and 0 < own <= vocabulary,
        f"draft_vocab_size: {own!r}; a number from 1 to the vocabulary's, {vocabulary!r}, is right",
    )
    published = (
        inner
        | {
            "architectures": [DRAFT_ARCHITECTURE],
            "block_size": config.get("block_size"),
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": [i - 1 for i in ids],
            "is_causal": False if config.get("sliding_window_non_causal") else None,
            "own_vocabulary": None if own == vocabulary and "head" not in held else own,
            "own_embedding": "embedding" in held,
        }
        | {field: config[field] for field in SLOTS if field in config}
    )
    return DraftConfig.from_hf(published)


def write_config(config: DraftConfig) -> dict[str, Any]:
    """Spell a config; `read_config` reads it back to an equal one."""
    published = config.to_hf()
    # Where the field is absent, readers differ about what false would tell them.
    both_ways = {"sliding_window_non_causal": True} if config.is_causal is False else {}
    return both_ways | {
        "speculators_model_type": KIND,
        LAYERS: {name: value for name, value in published.items() if name not in ELSEWHERE},
        "draft_vocab_size": config.own_vocabulary or config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
    }


def read_vocabulary(d2t: np.ndarray, t2d: np.ndarray) -> np.ndarray:
    """Return which of the target's tokens each column of the head means.

    Raises:
        UserError: tokens outside the vocabulary, out of order or twice, or a `t2d` that marks others.
    """
    tokens = np.arange(len(d2t)) + d2t
    check(
        bool(np.array_equal(np.flatnonzero(t2d), tokens)),
        f"{D2T}: its tokens are not those that {T2D} marks, in their order; a pair that says the same is right",
    )
    return tokens.astype(np.int32)


def check_whole(d2t: np.ndarray, t2d: np.ndarray) -> None:
    """Refuse a map of a head that knows all tokens, unless every row means the token that it stands for.

    Raises:
        UserError: it says something else.
    """
    check(
        not d2t.any() and bool(t2d.all()),
        f"{D2T}, {T2D}: of a head that knows all tokens, in another order; {D2T} of zeros, or neither, is right",
    )


def write_vocabulary(tokens: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """Return `d2t` and `t2d` for a vocabulary of so many tokens."""
    marked = np.zeros(size, bool)
    marked[tokens] = True
    return {D2T: tokens.astype(np.int64) - np.arange(len(tokens)), T2D: marked}


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's config, whole."""
    inner = config.get(LAYERS)
    if not isinstance(inner, dict):
        raise UserError(f"transformer_layer_config: {inner!r}; the config of the draft's layers is right")
    kind = inner.get("model_type", "qwen3")
    check(kind == "qwen3", f"transformer_layer_config: model_type {kind!r} is not supported; 'qwen3' is")
    return DEFAULTS | {name: value for name, value in inner.items() if value is not None}
