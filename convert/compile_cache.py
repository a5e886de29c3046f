"""Compiled programs are kept from one process to the next, so that only the first start of a command waits for them."""

import hashlib
import os
import platform
import re
import warnings
from pathlib import Path

import jax

from convert.progress import tell

# What takes less time is compiled again; what was not used for longest goes when all take more than this.
LEAST_SECONDS, MOST_BYTES = 0.1, 2**30
CPU = Path("/proc/cpuinfo")


def keep() -> None:
    """Have jax keep what it compiles, in the user's cache, unless JAX_COMPILATION_CACHE_DIR says where.

    JAX_ENABLE_COMPILATION_CACHE=false keeps nothing. It must run before anything is compiled.
    """
    # One that cannot be read or written is compiled again; nobody needs to know.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache")
    if not _is_enabled() or _kept_in() is not None:
        return
    try:
        place = _caches() / "dflash-jax" / "programs" / _machine()
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no room, or no home
        return
    if not os.access(place, os.W_OK):
        return
    for entry in place.glob("*-cache"):  # jax notes a time beside each that it could write whole
        if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
            entry.unlink(missing_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def tell_compiling() -> None:
    """Say that programs are made, and where they are kept for the next time; then it only takes tracing them."""
    place = _kept_in() if _is_enabled() else None
    is_first = place is not None and not any(Path(place).glob("*-cache"))
    tell(f"compiling; for the next time kept in {place}" if is_first else "compiling")


def _is_enabled() -> bool:
    return bool(jax.config.jax_enable_compilation_cache)  # type: ignore[attr-defined]


def _kept_in() -> str | None:
    place: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return place


def _caches() -> Path:
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return asked if asked.is_absolute() else Path.home() / ".cache"


def _machine() -> str:
    """Return a name for CPUs like this one: programs for CPUs run on no others, and homes may be shared."""
    told = CPU.read_text() if CPU.exists() else platform.processor()
    features = sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", told, re.MULTILINE))) or [told]
    return f"{platform.machine()}-{hashlib.blake2b(repr(features).encode(), digest_size=6).hexdigest()}"
