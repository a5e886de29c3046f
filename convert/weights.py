"""Tensors on their way in: block by block from a file, into an array of our layout and dtype."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import ml_dtypes
import numpy as np

from convert.names import VOCABULARY, Shape, Tensor
from dflash_jax.errors import check

# Takes the tensor's path in the parameter tree, and the tensor; returns what the tree will hold.
Place = Callable[[tuple[str, ...], np.ndarray], jax.Array]
# The source's tensors as they come: path in the tree, and values of our layout and dtype.
Arrays = Iterator[tuple[str, np.ndarray]]

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float64": np.dtype(np.float64)}
BLOCK_ELEMENTS = 1 << 18
ALIGNMENT = 64


def asked_dtype(name: str | None) -> np.dtype | None:
    """Read a `--dtype`; None and "keep" leave every tensor as it is stored.

    Raises:
        UserError: a name that is no dtype of ours, or float64 where JAX would narrow it.
    """
    if name is None or name == "keep":
        return None
    check(name in DTYPES, f"--dtype {name}: not supported; keep, float32 or bfloat16 is")
    _check_width(DTYPES[name], f"--dtype {name}")
    return DTYPES[name]


def dtypes(stored: Mapping[str, np.dtype], asked: np.dtype | None) -> dict[str, np.dtype]:
    """Return the dtype that each parameter gets: what was asked for, or what is stored.

    Raises:
        UserError: a float64 tensor that is to be kept, where JAX would narrow it.
    """
    given = {path: asked if asked and path != VOCABULARY else dtype for path, dtype in stored.items()}
    for path, dtype in given.items():
        _check_width(dtype, path)
    return given


def assemble(parts: Sequence[tuple[Tensor, Iterable[np.ndarray]]], dtype: np.dtype) -> np.ndarray:
    """Fill one parameter from the tensors that it consists of, each in consecutive blocks of rows, turned and cast."""
    [(first, _), *others] = parts
    shape = first.shape[::-1] if first.transposed else first.shape
    array = _aligned(shape if first.expert is None else (1 + len(others), *shape), dtype)
    for tensor, blocks in parts:
        whole = array if tensor.expert is None else array[tensor.expert]
        rows = whole.T if tensor.transposed else whole
        start = 0
        for block in blocks:
            rows[start : start + len(block)] = block
            start += len(block)
    return array


def row_blocks(shape: Shape) -> Iterator[slice]:
    """Cut a tensor's rows into blocks small enough to stay in the processor's cache."""
    step = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def place(path: tuple[str, ...], array: np.ndarray) -> jax.Array:  # noqa: ARG001
    """Put a tensor on the default device."""
    return jax.device_put(array)


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    # The CPU backend takes over an aligned array as it lies, and copies any other.
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _check_width(dtype: np.dtype, name: str) -> None:
    check(
        dtype != np.float64 or jax.config.read("jax_enable_x64"),
        f"{name}: float64 needs JAX's 64-bit mode (JAX_ENABLE_X64=1); --dtype float32 is right without it",
    )
