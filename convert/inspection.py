"""What a checkpoint is."""

import math
from typing import Any

import jax

from convert import names
from convert.load import any_config, stop_token_ids
from convert.sources import open_source
from dflash_jax.config import DRAFT_ARCHITECTURE, FAMILIES, DraftConfig, TargetConfig
from dflash_jax.parameters import Params


def inspect(name: str) -> dict[str, Any]:
    """Describe a checkpoint of any format, without loading its weights.

    Raises:
        UserError: nothing there, or nothing that is a whole checkpoint that we support.
    """
    source = open_source(name)
    config = any_config(source)
    source.check(config)
    return {
        "path": name,
        "format": source.format,
        **(_target(config, stop_token_ids(source, config)) if isinstance(config, TargetConfig) else _draft(config)),
        "parameters": sum(map(math.prod, names.shapes(config).values())),
        "dtypes": source.dtypes(),
        "bytes": sum(file.stat().st_size for file in source.files()),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_positions": config.max_positions,
        "chat_template": source.has_chat_template(),
    }


def summary(config: TargetConfig | DraftConfig, params: Params) -> dict[str, Any]:
    """Say of a checkpoint in memory what its kind is, its dtype (or those that it mixes), and how large it is."""
    leaves = jax.tree.leaves(params)
    return {
        "kind": "target" if isinstance(config, TargetConfig) else "draft",
        "dtype": "+".join(sorted({leaf.dtype.name for leaf in leaves})),
        "parameters": sum(leaf.size for leaf in leaves),
    }


def _target(config: TargetConfig, stops: tuple[int, ...]) -> dict[str, Any]:
    return {
        "kind": "target",
        "architecture": FAMILIES[config.family],
        "tie_word_embeddings": config.tie_word_embeddings,
        "stop_token_ids": list(stops),
    }


def _draft(config: DraftConfig) -> dict[str, Any]:
    return {
        "kind": "draft",
        "architecture": DRAFT_ARCHITECTURE,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
    }
