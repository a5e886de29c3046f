"""Strictness that every test runs under, and what several of them share."""

from collections.abc import Iterator

import jax
import pytest

# A vector added to a matrix is usually a forgotten axis.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def strict_dtypes() -> Iterator[None]:
    """Mixed dtypes raise instead of widening silently."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    """Let jax make and keep float64 arrays."""
    with jax.enable_x64(True):
        yield
