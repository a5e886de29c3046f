"""The header of a GGUF file: its metadata, and where its tensors lie."""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from convert.files import about_values, repeated
from convert.names import Shape
from dflash_jax.errors import UserError, check

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
NUMBERS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and how. The shape is in numpy's order, outermost first."""

    shape: Shape
    type: GGMLQuantizationType
    start: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes from `start` on."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Metadata as plain Python values, and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> GgufHeader:
    """Read everything before the tensors' data.

    Raises:
        UserError: not GGUF, of another version or byte order, truncated, or corrupt.
    """
    with about_values(path), path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        check(reader.take(4) == MAGIC, "not a GGUF file (its first four bytes are not GGUF); a .gguf file is right")
        version = reader.number("<u4")
        check(version & 0xFFFF != 0, "a big-endian GGUF file; a little-endian one is right")
        check(version in VERSIONS, f"GGUF version {version} is not supported; 2 and 3 are")
        tensor_count, field_count = reader.number("<u8"), reader.number("<u8")
        metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = reader.string()
            check(key not in metadata, f"metadata {key} is there twice; once is right")
            metadata[key] = reader.value(reader.number("<u4"))
        infos = [reader.tensor_info() for _ in range(tensor_count)]
        return GgufHeader(metadata, _locate(infos, metadata, reader))


class _Reader:
    """Reads values one after another, and never more than the file holds."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size

    def take(self, count: int) -> bytes:
        left = self.size - self.file.tell()
        check(count <= left, "truncated or corrupt: its header runs past its end; a complete file is right")
        return self.file.read(count)

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> list[Any]:
        return np.frombuffer(self.take(count * np.dtype(code).itemsize), code).tolist()

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            kind, count = self.number("<u4"), self.number("<u8")
            check(kind != GGUFValueType.ARRAY, "an array of arrays in its metadata is not supported")
            if kind != GGUFValueType.STRING:
                return self.numbers(_code(kind), count)
            check(count * 8 <= self.size, "truncated or corrupt: an array in its metadata is longer than the file")
            return [self.string() for _ in range(count)]
        return self.number(_code(kind))

    def tensor_info(self) -> tuple[str, Shape, int, int]:
        name = self.string()
        dimensions = self.number("<u4")
        check(dimensions <= MAX_DIMENSIONS, f"corrupt: tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed(self.numbers("<u8", dimensions)))
        return name, shape, self.number("<u4"), self.number("<u8")


def _code(kind: int) -> str:
    check(kind in NUMBERS, f"corrupt: metadata of type {kind}, which GGUF does not have")
    return NUMBERS[GGUFValueType(kind)]


def _locate(
    infos: list[tuple[str, Shape, int, int]], metadata: dict[str, Any], reader: _Reader
) -> dict[str, StoredTensor]:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    check(isinstance(alignment, int) and alignment > 0, f"general.alignment: {alignment!r}; a power of two is right")
    data = -(-reader.file.tell() // alignment) * alignment
    twice = repeated(name for name, *_ in infos)
    check(not twice, f"tensors {', '.join(twice)} are there twice; once is right")
    tensors = {}
    for name, shape, number, offset in infos:
        tensor = StoredTensor(shape, *_row_format(name, shape, number, data + offset))
        end = tensor.start + tensor.nbytes
        check(
            end <= reader.size,
            f"truncated: tensor {name} ends at byte {end} and the file at {reader.size}; a complete file is right",
        )
        tensors[name] = tensor
    return tensors


def _row_format(name: str, shape: Shape, number: int, start: int) -> tuple[GGMLQuantizationType, int, int]:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise UserError(f"tensor {name} is of type {number}, which is not supported") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    check(
        len(shape) > 0 and shape[-1] % block == 0,
        f"corrupt: tensor {name} has shape {shape}, whose rows are no whole {kind.name} blocks of {block}",
    )
    return kind, start, shape[-1] // block * block_bytes
