"""From a checkpoint of any format to a directory in the published layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert import weights
from convert.files import new_directory, read_json, write_json
from convert.inspection import summary
from convert.load import any_config, read_params
from convert.progress import Watch, quiet
from convert.published import write_published
from convert.sources import check_outside, open_source

# Names code that lies beside the weights, which is not carried over: it is never loaded.
CODE = "auto_map"


def to_hf(source_name: str, destination: Path, dtype: str | None = None, *, watch: Watch = quiet) -> dict[str, Any]:
    """Write a published directory, which appears whole or not at all, and return what it holds.

    The tokenizer and the generation config come along, and so do fields of the config that we do not interpret.

    Args:
        source_name: path or hub id of a target or a draft.
        destination: a directory that is not there yet.
        dtype: "float32" or "bfloat16"; None keeps what is stored.
        watch: follows the tensors as they come, for a display of progress.

    Raises:
        UserError: as for `load_target`, a destination that is there already, or no room for it.
    """
    wanted = weights.asked_dtype(dtype)
    with new_directory(destination) as directory:
        source = open_source(source_name)
        check_outside(source, destination)
        config = any_config(source)
        params = read_params(source, config, wanted, place=weights.place, watch=watch)
        source.save_companions(directory)
        write_published(directory, config, params, None)
        file = directory / "config.json"
        write_json(file, _carry(source.hf_config, read_json(file)))
    return summary(config, params)


def _carry(theirs: Mapping[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Add the source's other fields to a config."""
    merged = {**theirs, **ours}
    merged.pop(CODE, None)
    if "dflash_config" in ours:
        merged["dflash_config"] = {**(theirs.get("dflash_config") or {}), **ours["dflash_config"]}
    return merged
