"""Compiled programs are kept from one process to the next, so that only the first start of a command waits for them."""

import os
import platform
from pathlib import Path

import jax

from convert.progress import tell

# What takes less time is compiled again; what was not used for longest goes when all take more than this.
LEAST_SECONDS, MOST_BYTES = 0.1, 2**30


def keep() -> None:
    """Have jax keep what it compiles, in the user's cache, unless JAX_COMPILATION_CACHE_DIR says where.

    JAX_ENABLE_COMPILATION_CACHE=false keeps nothing. It must run before anything is compiled.
    """
    if _kept_in() is not None:
        return
    # Programs for CPUs are for those of this machine, and homes may be shared.
    place = _caches() / "dflash-jax" / "programs" / (platform.node() or "here")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(place, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def tell_compiling() -> None:
    """Say that programs are made, and where they are kept for the next time."""
    place = _kept_in()
    is_first = place is not None and not any(Path(place).glob("*-cache"))
    tell(f"compiling; for the next time kept in {place}" if is_first else "compiling")


def _kept_in() -> str | None:
    place: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return place


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
