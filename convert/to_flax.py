"""From a checkpoint of any format to a Flax checkpoint of ours."""

from pathlib import Path
from typing import Any

import jax

from convert import flax_checkpoint, weights
from convert.files import sha256
from convert.flax_checkpoint import FlaxSource
from convert.gguf_file import GgufSource
from convert.load import any_config, read_params
from convert.progress import Watch, quiet
from convert.sources import Source, open_source
from dflash_jax.config import TargetConfig
from dflash_jax.errors import check
from dflash_jax.parameters import Params


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
    with flax_checkpoint.new_directory(destination) as directory:
        source = open_source(source_name)
        inside = isinstance(source, FlaxSource) and destination.resolve().is_relative_to(source.path.resolve())
        check(not inside, f"{destination}: lies in the Flax checkpoint that is read; a path outside it is right")
        config = any_config(source)
        params = read_params(source, config, wanted, place=weights.place, watch=watch)
        source.save_companions(directory)
        manifest = {
            "kind": "target" if isinstance(config, TargetConfig) else "draft",
            "source": {"name": source_name, "files": _hashes(source, watch)},
            "dtype": _dtype(params),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        }
        hf_config = config.to_hf() if isinstance(source, GgufSource) else source.hf_config
        flax_checkpoint.write(directory, params, hf_config, manifest)
    return manifest


def _hashes(source: Source, watch: Watch) -> dict[str, str]:
    files = source.files()
    root = source.path if source.path.is_dir() else source.path.parent
    return {
        str(file.relative_to(root)): sha256(file) for file in watch(files, len(files), f"hashing {source.path.name}")
    }


def _dtype(params: Params) -> str:
    """Name the dtype, or those of a checkpoint that mixes them."""
    return "+".join(sorted({leaf.dtype.name for leaf in jax.tree.leaves(params)}))
