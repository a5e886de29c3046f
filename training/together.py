"""What the processes of one run do together: the first one writes, the others wait, and where it fails all end."""

import contextlib
import json
import re
import time
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert import cli, processes
from convert.weights import Place
from dflash_jax.errors import NotNowError, UserError, check

# The first process's end is at once that of all others, which may have something to say.
SECONDS_TO_SPEAK = 2
# How long a file that one host wrote may take to show on another.
SECONDS_TO_SEE = 60
# What exchanging with a process that is gone runs into; any other fault of a device or a compiler would come again.
PASSING = r"unavailable|deadline|aborted|cancelled|gloo|nccl|connection|peer|heartbeat|coordination"


def whole(array: jax.Array) -> np.ndarray:
    """Return an array that lies on the devices of several processes, in each of them; all must ask for it."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def total(counts: np.ndarray) -> np.ndarray:
    """Return the sum of what all processes counted."""
    if jax.process_count() == 1:
        return counts
    return np.asarray(multihost_utils.process_allgather(counts.astype(np.int32))).sum(axis=0, dtype=np.int64)


def check_same(what: Any) -> None:
    """Refuse a process that has something else than the first one.

    Raises:
        UserError: in the process that differs.
    """
    check(
        _agreed(json.dumps(what, sort_keys=True).encode()),
        "this process has other settings, another target or other data than the first one; the same for all is right",
    )


@contextlib.contextmanager
def read_alike(place: Place) -> Iterator[Place]:
    """Give a `place` that notes each tensor before it is split over devices, and in the end compare with the others.

    Where processes read different weights, each would put its own on its devices, and none would notice.

    Raises:
        UserError: in a process that read something else than the first one.
    """
    if jax.process_count() == 1:
        yield place
        return
    noted: dict[str, int] = {}

    def noting(path: tuple[str, ...], array: np.ndarray) -> jax.Array:
        noted["/".join(path)] = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return place(path, array)

    yield noting
    check_same(noted)


def wait_for(file: Path, told: str) -> None:
    """Wait until a host sees what the first process has written.

    Raises:
        UserError: it never does, or sees another file there.
    """
    last = time.monotonic() + SECONDS_TO_SEE
    while not file.exists() and time.monotonic() < last:
        time.sleep(1)
    content = file.read_bytes() if file.exists() else b""
    check(_agreed(content), f"{told}: not where the first process writes; one directory that all hosts see is right")


def _agreed(content: bytes) -> bool:
    mark = zlib.crc32(content) >> 1  # fits into 31 bits
    return mark == processes.agree(mark)


@contextlib.contextmanager
def none_left_waiting() -> Iterator[None]:
    """End this process at once where it fails while others compute with it.

    Python's way out waits for the other processes, which wait for this one. Once it is gone, jax ends them.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        status = _tell(error)
        if processes.first():
            time.sleep(SECONDS_TO_SPEAK)
        cli.leave(status)


def _tell(error: Exception) -> int:
    """Say what went wrong, and return the status that it has. What exchanging runs into is another's end."""
    if isinstance(error, jax.errors.JaxRuntimeError) and re.search(PASSING, str(error), re.IGNORECASE):
        first = str(error).splitlines()[0][:200]
        error = NotNowError(f"another process of the run is gone ({first}); its log says why")
    if isinstance(error, UserError):
        cli.tell_fault(error)
        return error.status
    traceback.print_exc()
    return 1
