"""Strictness that every test runs under, and what several of them share."""

import os
import signal
from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings

from tests import processes

# Read when jax first compiles; programs that tests start inherit it.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {processes.QUICK}"

# A vector added to a matrix is usually a forgotten axis.
jax.config.update("jax_numpy_rank_promotion", "raise")


# Shells let what they start in the background ignore interrupts, and programs that tests start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example of a test may compile; how long that takes is the machine's business.
settings.register_profile("compiled", deadline=None)
settings.load_profile("compiled")


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


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Compiled programs of a module are of no use to the next, and take gigabytes together."""
    yield
    jax.clear_caches()
