"""Our own checkpoints: config.json, orbax parameters, the tokenizer's files, and a manifest that is written last."""

import contextlib
import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from convert import names, weights
from convert.files import about, check_room, read_json, write_json
from convert.huggingface import HuggingFaceSource
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError, check
from dflash_jax.parameters import Params

MANIFEST, PARAMS = "manifest.json", "params"
ARRAY_HEADER = "/.zarray"
FORMAT_VERSION = 1


class FlaxSource(HuggingFaceSource):
    """A checkpoint that `write` wrote. What lies beside the parameters is as in a Hugging Face directory."""

    format = "Flax checkpoint"

    def __init__(self, path: Path) -> None:
        check(
            (path / MANIFEST).is_file(),
            f"{path}: has {PARAMS}/ but no {MANIFEST}, so it was never finished; converting again is right",
        )
        version = read_json(path / MANIFEST).get("format_version")
        check(
            version == FORMAT_VERSION,
            f"{path / MANIFEST}: format_version {version!r} is not supported; {FORMAT_VERSION} is",
        )
        check((path / PARAMS).is_dir(), f"{path}: has no {PARAMS}/; a whole checkpoint is right")
        super().__init__(path)

    @functools.cached_property
    def stored(self) -> dict[str, tuple[names.Shape, np.dtype]]:
        """Every parameter's shape and dtype, by path."""
        with _readable(self.path / PARAMS):
            store = tensorstore.KvStore.open(self._store()).result()
            keys = [key.decode() for key in store.list().result()]
            heads = {key: json.loads(store[key]) for key in keys if key.endswith(ARRAY_HEADER)}
            return {
                key.removesuffix(ARRAY_HEADER).replace(".", "/"): (tuple(head["shape"]), np.dtype(head["dtype"]))
                for key, head in heads.items()
            }

    def check(self, config: TargetConfig | DraftConfig) -> None:
        """Refuse parameters that are not those of the config."""
        found = {path: shape for path, (shape, _) in self.stored.items()}
        with about(self.path / PARAMS):
            names.check_shapes(found, names.expected(config, "flax"))

    def dtypes(self) -> list[str]:
        """Return the dtypes that are stored, by name."""
        return sorted({dtype.name for _, dtype in self.stored.values()})

    def arrays(self, config: TargetConfig | DraftConfig, dtype: np.dtype | None) -> weights.Arrays:
        """Yield every parameter, one at a time."""
        for path, tensor in names.expected(config, "flax").items():
            kind = weights.loaded_dtype(dtype, self.stored[path][1], f"{self.path}: {path}")
            array = self._read(path)
            yield path, array if kind == array.dtype else weights.assemble([array], tensor, kind)

    def _read(self, path: str) -> np.ndarray:
        with _readable(self.path / PARAMS):
            kvstore = self._store() | {"path": f"{path.replace('/', '.')}/"}
            return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True).result().read().result()

    def _store(self) -> dict[str, Any]:
        # Orbax would read the whole tree at once, or a part of it at the price of its records of everything; what it
        # writes is arrays of a documented format in a store of another, and both are tensorstore's.
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self.path.absolute() / PARAMS}/"}}

    def files(self) -> list[Path]:
        """Return every file of the checkpoint."""
        return sorted(file for file in self.path.rglob("*") if file.is_file())


def write(directory: Path, params: Params, hf_config: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Write config, parameters and, last, the manifest into a directory.

    Raises:
        OSError: no room, or whatever else the file system objects to.
    """
    check_room(directory, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
    write_json(directory / "config.json", hf_config)
    # Compressing would hold everything a second time, and take ten times as long, for little: weights are noise.
    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        try:
            checkpointer.save(directory.absolute() / PARAMS, args=ocp.args.PyTreeSave(params))
        except ValueError as error:  # what tensorstore makes of one
            raise OSError(str(error)) from error
    write_json(directory / MANIFEST, {"format_version": FORMAT_VERSION} | manifest)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # tensorstore raises what its drivers do
        raise UserError(f"{path}: not readable as orbax parameters ({error}); converting again is right") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep orbax's notes on its own workings from the user; a fault of its threads is raised as well as noted."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
