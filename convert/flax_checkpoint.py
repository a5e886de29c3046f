"""Our own checkpoints: config.json, orbax parameters, the tokenizer's files, and a manifest that is written last."""

import contextlib
import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
from orbax.checkpoint.experimental import v1 as ocp

from convert import names, weights
from convert.files import about, check_room, read_json, write_json
from convert.huggingface import HuggingFaceSource
from convert.trees import nest
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError, check

MANIFEST, PARAMS = "manifest.json", "params"
ARRAY_HEADER = "/.zarray"
FORMAT_VERSION = 2
STATE = "state"  # where orbax puts a tree
AT_ONCE = 2**28  # bytes, and a tensor more
CHUNK = 2**25  # bytes


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
    def parameters(self) -> dict[str, tuple[names.Shape, np.dtype]]:
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
        found = {path: shape for path, (shape, _) in self.parameters.items()}
        with about(self.path / PARAMS):
            names.check_shapes(found, names.expected(config, "flax"))

    def holds(self, path: str) -> bool:
        """Say whether a parameter is there."""
        return path in self.parameters

    def stored_names(self, config: TargetConfig | DraftConfig) -> dict[str, set[str]]:
        """Return the name of the dtype in which each parameter is stored."""
        return {path: {dtype.name} for path, dtype in self.stored_dtypes(config).items()}

    def stored_dtypes(self, config: TargetConfig | DraftConfig) -> dict[str, np.dtype]:
        """Return each parameter's dtype."""
        return {path: self.parameters[path][1] for path in names.expected(config, "flax")}

    def arrays(self, config: TargetConfig | DraftConfig, dtypes: Mapping[str, np.dtype]) -> weights.Arrays:
        """Yield every parameter, one at a time."""
        for path, tensor in names.expected(config, "flax").items():
            yield path, self._as(dtypes[path], path, tensor)  # held by no name: the next may be as large

    def _as(self, dtype: np.dtype, path: str, tensor: names.Tensor) -> np.ndarray:
        array = self._read(path)
        return array if dtype == array.dtype else weights.assemble([(tensor, [array])], dtype)

    def _read(self, path: str) -> np.ndarray:
        with _readable(self.path / PARAMS):
            kvstore = self._store() | {"path": f"{path.replace('/', '.')}/"}
            return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True).result().read().result()

    def _store(self) -> dict[str, Any]:
        # Orbax would read the whole tree at once, or a part of it at the price of its records of everything; what it
        # writes is arrays of a documented format in a store of another, and both are tensorstore's, which takes no ".."
        # in a path.
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self.path.resolve() / PARAMS / STATE}/"}}

    def files(self) -> list[Path]:
        """Return every file of the checkpoint."""
        return sorted(file for file in self.path.rglob("*") if file.is_file())


def write(
    directory: Path,
    config: TargetConfig | DraftConfig,
    dtypes: Mapping[str, np.dtype],
    arrays: weights.Arrays,
    hf_config: dict[str, Any],
) -> None:
    """Write config and parameters into a directory, a few at a time; a manifest is still to come.

    Raises:
        OSError: no room, or whatever else the file system objects to.
    """
    shapes = names.shapes(config)
    check_room(directory, sum(math.prod(shapes[path]) * dtype.itemsize for path, dtype in dtypes.items()))
    write_json(directory / "config.json", hf_config)
    place = directory.absolute() / PARAMS
    context = ocp.Context()
    context.array.saving.use_zarr3 = False
    # Either would hold everything a second time; and weights are noise, which compresses little.
    context.array.saving.use_compression = False
    # A reader then holds little more than the tensor.
    context.array.saving.storage_options.chunk_byte_size = CHUNK
    context.memory.deepcopy_host_arrays = False
    with _quiet(), context:
        try:
            for some in _groups(arrays):
                ocp.partial.save(place, nest(some))
                some.clear()
            ocp.partial.finalize(place)
        except ValueError as error:  # what tensorstore makes of one
            raise OSError(str(error)) from error


def _groups(arrays: weights.Arrays) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Put arrays together that are worth a save of their own."""
    group: list[tuple[str, np.ndarray]] = []
    for item in arrays:
        group.append(item)
        del item  # the next one is made while this loop would hold it
        if sum(one.nbytes for _, one in group) > AT_ONCE:
            yield group
            group = []
    if group:
        yield group


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
