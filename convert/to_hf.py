"""From a checkpoint of any format to a directory in the published layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.conversion import converting
from convert.progress import Watch, quiet
from convert.published import LARGEST_SHARD, spell, write_published
from convert.speculators import LAYERS, is_speculators

# Names code that lies beside the weights, which is not carried over: it is never loaded.
CODE = "auto_map"


def to_hf(
    source_name: str,
    destination: Path,
    dtype: str | None = None,
    *,
    max_shard_bytes: int = LARGEST_SHARD,
    verify: bool = False,
    watch: Watch = quiet,
) -> dict[str, Any]:
    """Write a published directory, which appears whole or not at all, and return its manifest.

    The tokenizer and the generation config come along, and so do fields of the config that we do not interpret.
    Memory holds one tensor at a time, never the model.

    Args:
        source_name: path or hub id of a target or a draft.
        destination: a directory that is not there yet.
        dtype: "float32" or "bfloat16"; None keeps what is stored.
        max_shard_bytes: of a file of weights; a tensor that is larger has a file of its own.
        verify: read what was written once more, and compare it with the source.
        watch: follows the tensors as they come, for a display of progress.

    Raises:
        UserError: as for `load_target`, a destination that is there already, or no room for it.
    """
    with converting(source_name, destination, dtype, watch) as conversion:
        config, dtypes, theirs = conversion.config, conversion.dtypes, conversion.source.hf_config
        hf_config = _carry(theirs, spell(config, dtypes, in_speculators=is_speculators(theirs)))
        write_published(conversion.directory, hf_config, config, dtypes, conversion.arrays(), max_shard_bytes)
        return conversion.finish(verify=verify)


def _carry(theirs: Mapping[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Add the source's other fields to a config."""
    merged = {**theirs, **ours}
    merged.pop(CODE, None)
    for inner in ("dflash_config", LAYERS):
        if inner in ours:
            merged[inner] = {**(theirs.get(inner) or {}), **ours[inner]}
    return merged
