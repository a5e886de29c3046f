"""Weights in float8 with a scale for each block of rows and columns, as in Qwen3-FP8."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from convert import weights
from convert.files import about
from convert.safetensors_headers import Header
from dflash_jax.errors import UserError, check

STORED = "F8_E4M3"
DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = "_scale_inv"  # after the name of the tensor
METHOD = "fp8"


def block_size(settings: Any) -> tuple[int, int] | None:
    """Read a `quantization_config`: how many rows and columns share a scale, None where nothing is quantised.

    Raises:
        UserError: another kind of quantisation.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise UserError(f"quantization_config: {settings!r}; an object is right")
    method = settings.get("quant_method")
    check(method == METHOD, f"quantization_config: quant_method {method!r} is not supported; {METHOD!r} is")
    size: Any = settings.get("weight_block_size")
    check(
        isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size),
        f"quantization_config: weight_block_size {size!r}; rows and columns of a block are right",
    )
    return size[0], size[1]


def is_matrix(header: Header) -> bool:
    """Say whether a tensor can be dequantised."""
    return header.dtype == STORED and len(header.shape) == 2


def scale_shape(shape: tuple[int, ...], size: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of a tensor's scales."""
    return tuple(-(-whole // part) for whole, part in zip(shape, size, strict=True))


def blocks(header: Header) -> Iterator[np.ndarray]:
    """Read a tensor in blocks of rows; the library of safetensors has no numpy arrays of this dtype."""
    width = math.prod(header.shape[1:])
    with about(header.file):
        for rows in weights.row_blocks(header.shape):
            size = (rows.stop - rows.start) * width
            raw = np.fromfile(header.file, np.uint8, size, offset=header.start + rows.start * width)
            yield raw.view(DTYPE).reshape(-1, *header.shape[1:])


def dequantised(blocks: Iterable[np.ndarray], scale: np.ndarray, size: tuple[int, int]) -> Iterator[np.ndarray]:
    """Multiply consecutive blocks of rows by their scales, in float32."""
    start = 0
    for block in blocks:
        rows = np.arange(start, start + len(block)) // size[0]
        yield block.astype(np.float32) * np.repeat(scale[rows].astype(np.float32), size[1], axis=1)[:, : block.shape[1]]
        start += len(block)
