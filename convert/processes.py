"""One command in several processes, each with its own devices: all run alike, and the first one speaks."""

import os
import re
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert import progress
from dflash_jax.errors import UserError, check

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# Set by launchers to how many processes they started, or to a list of hosts; jax finds the rest by itself.
LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES")


def join() -> None:
    """Find the other processes, if the environment says that there are some. It must run before jax looks for devices.

    Either a launcher's variables say so, or JAX_COORDINATOR_ADDRESS (host:port of the first process),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID do.

    Raises:
        UserError: one of the three is missing or no number, or the processes do not find one another.
    """
    address = os.environ.get(ADDRESS)
    if not address and not any(_several(os.environ.get(name, "")) for name in LAUNCHERS):
        return
    count = index = None
    if address:
        check(
            bool(re.fullmatch(r".+:\d+", address)), f"{ADDRESS}: {address!r}; host:port of the first process is right"
        )
        count, index = _number(COUNT), _number(INDEX)
        if count is not None and index is not None:
            check(0 <= index < count, f"{INDEX}: {index} of {COUNT} {count}; 0 to {count - 1} is right")
    try:
        jax.distributed.initialize(address, count, index)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{ADDRESS} {address or ''}: the processes did not find one another ({error})") from error
    _silence_libraries()
    if not first():
        progress.hush()


def first() -> bool:
    """Say whether this process is the one that speaks and writes."""
    return jax.process_index() == 0


def agree(number: int) -> int:
    """Return the first process's number in all of them."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if jax.process_count() > 1 else number


def _silence_libraries() -> None:
    """Keep standard output for results: gloo, which connects CPU processes, writes to it behind Python's back."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    sys.stdout = results


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        # A launcher that jax knows may say it in its own way.
        check(any(os.environ.get(launcher) for launcher in LAUNCHERS), f"{name}: not set; {ADDRESS} needs it beside it")
        return None
    try:
        return int(text)
    except ValueError as error:
        raise UserError(f"{name}: {text!r}; a whole number is right") from error


def _several(value: str) -> bool:
    return "," in value or (value.isdecimal() and int(value) > 1)
