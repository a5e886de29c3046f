"""What a checkpoint is."""

import collections
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert import names
from convert.load import any_config, stop_token_ids, target_config_of
from convert.sources import open_source
from convert.speculators import is_speculators
from dflash_jax.config import DRAFT_ARCHITECTURE, FAMILIES, DraftConfig, TargetConfig, check_pair
from dflash_jax.errors import UserError


def inspect(name: str, target: str | None = None) -> dict[str, Any]:
    """Describe a checkpoint of any format, without loading its weights.

    Args:
        name: its path or hub id.
        target: of a draft, a target; `fits` then says whether the draft was made for it, and `misfit` what not.

    Raises:
        UserError: nothing there, or nothing that is a whole checkpoint that we support.
    """
    source = open_source(name)
    config = any_config(source)
    source.check(config)
    dtypes = {path: found for path, found in source.stored_names(config).items() if path != names.VOCABULARY}
    stops = stop_token_ids(source, config) if isinstance(config, TargetConfig) else ()
    return {
        "path": name,
        "format": source.format,
        **(_target(config, stops) if isinstance(config, TargetConfig) else _draft(config, source.hf_config)),
        "parameters": names.count(config),
        "dtypes": sorted(set().union(*dtypes.values())),
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
        **(_pair(config, target) if target is not None else {}),
        "layers": _layers(config, dtypes),
    }


def _pair(draft: TargetConfig | DraftConfig, name: str) -> dict[str, Any]:
    if isinstance(draft, TargetConfig):
        raise UserError("--target: it is for drafts, and this is a target; leaving it out is right")
    target = target_config_of(name)
    try:
        check_pair(target, draft)
    except UserError as error:
        return {"target": name, "fits": False, "misfit": str(error)}
    return {"target": name, "fits": True}


def _layers(config: TargetConfig | DraftConfig, stored: Mapping[str, set[str]]) -> list[dict[str, Any]]:
    """Say of every layer what it sees, what transforms, how large it is and in which dtypes it is stored."""
    sizes: collections.Counter[str] = collections.Counter()
    dtypes: dict[str, set[str]] = collections.defaultdict(set)
    for path, shape in names.shapes(config).items():
        layer = path.partition("/")[0]
        sizes[layer] += math.prod(shape)
        dtypes[layer] |= stored.get(path, set())
    return [
        {
            "layer": i,
            "attention": "full" if layer.window is None else f"last {layer.window}",
            "experts": f"{layer.experts.chosen} of {layer.experts.count}" if layer.experts else "none",
            "width": layer.experts.intermediate_size if layer.experts else config.intermediate_size,
            "parameters": sizes[f"layers_{i}"],
            "dtypes": sorted(dtypes[f"layers_{i}"]),
        }
        for i, layer in enumerate(config.layers)
    ]


def summary(config: TargetConfig | DraftConfig, dtypes: Mapping[str, np.dtype]) -> dict[str, Any]:
    """Say of a checkpoint what its kind is, its dtype (or those that it mixes), and how large it is."""
    return {
        "kind": "target" if isinstance(config, TargetConfig) else "draft",
        "dtype": "+".join(sorted({dtype.name for path, dtype in dtypes.items() if path != names.VOCABULARY})),
        "parameters": names.count(config),
    }


def _target(config: TargetConfig, stops: tuple[int, ...]) -> dict[str, Any]:
    return {
        "kind": "target",
        "architecture": FAMILIES[config.family],
        "tie_word_embeddings": config.tie_word_embeddings,
        "stop_token_ids": list(stops),
    }


def _draft(config: DraftConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": "draft",
        "layout": "speculators" if is_speculators(hf_config) else "published",
        "architecture": DRAFT_ARCHITECTURE,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "own_vocabulary": config.own_vocabulary,
        "own_embedding": config.own_embedding,
    }
