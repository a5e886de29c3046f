"""Our own checkpoints: config.json, orbax parameters, the tokenizer's files, and a manifest that is written last."""

import contextlib
import functools
import itertools
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from convert import names, weights
from convert.files import about, read_json, write_json
from convert.huggingface import HuggingFaceSource
from convert.trees import flatten, nest
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError, check
from dflash_jax.parameters import Params

MANIFEST, PARAMS = "manifest.json", "params"
FORMAT_VERSION = 1


class FlaxSource(HuggingFaceSource):
    """A checkpoint that `write` wrote. What lies beside the parameters is as in a Hugging Face directory."""

    format = "Flax checkpoint"

    def __init__(self, path: Path) -> None:
        check(
            (path / MANIFEST).is_file(),
            f"{path}: has {PARAMS}/ but no {MANIFEST}, so it was never finished; converting again is right",
        )
        self.manifest = read_json(path / MANIFEST)
        version = self.manifest.get("format_version")
        check(
            version == FORMAT_VERSION,
            f"{path / MANIFEST}: format_version {version!r} is not supported; {FORMAT_VERSION} is",
        )
        check((path / PARAMS).is_dir(), f"{path}: has no {PARAMS}/; a whole checkpoint is right")
        super().__init__(path)

    @functools.cached_property
    def stored(self) -> dict[str, Any]:
        """Orbax's record of each parameter, with its shape and dtype, by path."""
        with _readable(self.path / PARAMS), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(self.path.absolute() / PARAMS).item_metadata.tree
            return flatten(tree, is_leaf=lambda node: hasattr(node, "shape"))

    def check(self, config: TargetConfig | DraftConfig) -> None:
        """Refuse parameters that are not those of the config."""
        with about(self.path / PARAMS):
            found = {path: tuple(record.shape) for path, record in self.stored.items()}
            names.check_shapes(found, names.expected(config, "flax"))

    def dtypes(self) -> list[str]:
        """Return the dtypes that are stored, by name."""
        return sorted({np.dtype(record.dtype).name for record in self.stored.values()})

    def arrays(self, config: TargetConfig | DraftConfig, dtype: np.dtype | None) -> weights.Arrays:
        """Yield every parameter, read and cast a layer at a time."""
        paths = names.expected(config, "flax")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            for _, group in itertools.groupby(paths, key=lambda path: path.split("/")[0]):
                wanted = {}
                for path in group:
                    kind = weights.loaded_dtype(dtype, np.dtype(self.stored[path].dtype), f"{self.path}: {path}")
                    wanted[path] = ocp.RestoreArgs(restore_type=np.ndarray, dtype=kind)
                tree = nest(wanted.items())
                with _readable(self.path / PARAMS):
                    restored = checkpointer.restore(
                        self.path.absolute() / PARAMS,
                        args=ocp.args.PyTreeRestore(
                            item=jax.tree.map(lambda _: 0, tree), restore_args=tree, partial_restore=True
                        ),
                    )
                yield from flatten(restored).items()
                del restored

    def files(self) -> list[Path]:
        """Return every file of the checkpoint."""
        return sorted(file for file in self.path.rglob("*") if file.is_file())


@contextlib.contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Give a directory to fill, which becomes `destination` when all went well and is removed when not.

    Raises:
        UserError: the destination is there already, or its parent is not.
    """
    check(not os.path.lexists(destination), f"{destination}: is there already; a path that is not is right")
    parent = destination.absolute().parent
    check(parent.is_dir(), f"{parent}: no such directory; one that is there is right")
    partial = parent / f".{destination.name}.{os.getpid()}.partial"
    try:
        partial.mkdir()
    except OSError as error:
        raise UserError(f"{parent}: cannot be written to ({error.strerror})") from error
    try:
        yield partial
        _sync(partial)
        check(not os.path.lexists(destination), f"{destination}: appeared meanwhile; a path of one's own is right")
        partial.rename(destination)
        _sync(parent)
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write(directory: Path, params: Params, hf_config: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Write config, parameters and, last, the manifest into a directory."""
    write_json(directory / "config.json", hf_config)
    # Compressing would hold everything a second time, and take ten times as long, for little: weights are noise.
    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(directory.absolute() / PARAMS, args=ocp.args.PyTreeSave(params))
    write_json(directory / MANIFEST, {"format_version": FORMAT_VERSION} | manifest)
    _sync(directory / MANIFEST)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        with _quiet():
            yield
    except UserError:
        raise
    except Exception as error:  # orbax and tensorstore raise whatever their backends do
        raise UserError(f"{path}: not readable as orbax parameters ({error}); converting again is right") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep orbax's notes on its own workings from the user."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
