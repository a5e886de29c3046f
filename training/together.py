"""What the processes of one run do together: the first one writes, the others wait, and where it fails all end."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert import processes
from dflash_jax.errors import UserError


def by_first(do: Callable[[], Any]) -> None:
    """Do something in the first process, which all others wait for.

    Raises:
        UserError: it did not work; the first process says why.
    """
    fault = None
    if processes.first():
        try:
            do()
        except UserError as error:
            fault = error
    failed = processes.agree(fault is not None)
    if fault is not None:
        raise fault
    if failed:
        raise UserError("the first process of the run failed, and says why")


def whole(array: jax.Array) -> np.ndarray:
    """Return an array that lies on the devices of several processes, in each of them; all must ask for it."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
