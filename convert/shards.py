"""Safetensors files that are filled tensor by tensor, in any order, so that nobody holds all of them."""

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from convert import weights
from convert.files import check_room, write_json
from convert.names import Shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# By width, the widest first, so that every tensor of a file starts aligned.
DTYPES = {
    np.dtype(np.int64): "I64",
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(bool): "BOOL",
}
FLOATS = tuple(kind for kind in DTYPES if jnp.issubdtype(kind, jnp.floating))
METADATA = {"format": "pt"}  # transformers asks for it


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as a file stores it."""

    shape: Shape
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Shards:
    """The files of a model: one, or several of at most `most` bytes and an index; a larger tensor has its own.

    Raises:
        OSError: no room, or whatever else the file system objects to.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, Stored], most: int) -> None:
        self._directory, self._tensors = directory, tensors
        check_room(directory, sum(tensor.nbytes for tensor in tensors.values()))
        parts = _split(tensors, most)
        self._places: dict[str, tuple[Path, int]] = {}
        for number, part in enumerate(parts, 1):
            name = SINGLE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
            self._begin(directory / name, part)
        if len(parts) > 1:
            self._write_index()

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a tensor, turned and cast as its rows go out."""
        file, start = self._places[name]
        kind = self._tensors[name].dtype
        with file.open("r+b") as opened:
            opened.seek(start)
            for block in weights.row_blocks(array.shape):
                opened.write(np.ascontiguousarray(array[block], kind).reshape(-1).view(np.uint8).data)

    def _begin(self, file: Path, names: list[str]) -> None:
        rank = list(DTYPES).index
        header: dict[str, Any] = {"__metadata__": METADATA}
        end = 0
        for name in sorted(names, key=lambda name: (rank(self._tensors[name].dtype), name)):
            tensor = self._tensors[name]
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with file.open("xb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            self._places[name] = file, 8 + len(text) + header[name]["data_offsets"][0]

    def _write_index(self) -> None:
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        listing = {name: file.name for name, (file, _) in sorted(self._places.items())}
        write_json(self._directory / INDEX, {"metadata": {"total_size": total}, "weight_map": listing})


def _split(tensors: Mapping[str, Stored], most: int) -> list[list[str]]:
    """Cut the tensors, in their order, into files."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts
