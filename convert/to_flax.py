"""From a checkpoint of any format to a Flax checkpoint of ours."""

from pathlib import Path
from typing import Any

from convert import flax_checkpoint, weights
from convert.files import new_directory, sha256
from convert.gguf_file import GgufSource
from convert.inspection import summary
from convert.load import any_config, read_params
from convert.progress import Watch, quiet
from convert.sources import Source, check_outside, open_source


def to_flax(source_name: str, destination: Path, dtype: str | None = None, *, watch: Watch = quiet) -> dict[str, Any]:
    """Write a Flax checkpoint, which appears whole or not at all, and return its manifest.

    Args:
        source_name: path or hub id of a target or a draft.
        destination: a directory that is not there yet.
        dtype: "float32" or "bfloat16"; None keeps what is stored.
        watch: follows the tensors and files as they come, for a display of progress.

    Raises:
        UserError: as for `load_target`, or a destination that is there already.
    """
    wanted = weights.asked_dtype(dtype)
    with new_directory(destination) as directory:
        source = open_source(source_name)
        check_outside(source, destination)
        config = any_config(source)
        params = read_params(source, config, wanted, place=weights.place, watch=watch)
        source.save_companions(directory)
        manifest = summary(config, params) | {"source": {"name": source_name, "files": _hashes(source, watch)}}
        hf_config = config.to_hf() if isinstance(source, GgufSource) else source.hf_config
        flax_checkpoint.write(directory, params, hf_config, manifest)
    return manifest


def _hashes(source: Source, watch: Watch) -> dict[str, str]:
    files = source.files()
    root = source.path if source.path.is_dir() else source.path.parent
    return {
        str(file.relative_to(root)): sha256(file) for file in watch(files, len(files), f"hashing {source.path.name}")
    }
