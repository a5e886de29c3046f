"""What the processes of one run do together: the first one writes, the others wait, and where it fails all end."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert import cli, processes
from dflash_jax.errors import UserError


def by_first(do: Callable[[], Any]) -> None:
    """Do something in the first process, which all others wait for.

    Raises:
        UserError: it did not work; the first process says why.
    """
    fault: Exception | None = None
    if processes.first():
        try:
            do()
        except Exception as error:  # whatever it is, the others must not wait for ever
            fault = error
    failed = processes.agree(fault is not None)
    if fault is not None:
        raise fault
    if failed:
        raise UserError("the first process of the run failed, and says why")


def whole(array: jax.Array) -> np.ndarray:
    """Return an array that lies on the devices of several processes, in each of them; all must ask for it."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


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
        if isinstance(error, UserError):
            cli.tell_fault(error)
            cli.leave(2)
        traceback.print_exc()
        cli.leave(1)
