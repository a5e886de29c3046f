"""Strictness that every test runs under, and what several of them share."""

import atexit
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from hypothesis import settings

from tests import processes

# Read when jax first compiles; programs that tests start inherit it.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {processes.QUICK}"

# Tests compile the same small programs again and again: what one process compiles, those of this run read.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="programs-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
for setting in ("MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES"):
    os.environ[f"JAX_PERSISTENT_CACHE_{setting}"] = "0"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

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


@pytest.fixture(scope="module")
def _pair() -> Any:
    """The tiny pair; imported here, since this file is read before what checks types as modules are imported."""
    return importlib.import_module("tests.pair")


@pytest.fixture(scope="module")
def target(_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the tiny pair's target lies; modules with another one have a fixture of their own."""
    return str(_pair.write_target(tmp_path_factory.mktemp("pair") / "target"))


@pytest.fixture(scope="module")
def draft(_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where its draft lies."""
    return str(_pair.write_draft(tmp_path_factory.mktemp("pair") / "draft"))


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Compiled programs of a module are of no use to the next, and take gigabytes together."""
    yield
    jax.clear_caches()
