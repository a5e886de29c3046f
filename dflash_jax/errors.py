"""The exceptions for faults that the user can put right."""

import contextlib
import os
from collections.abc import Iterator

import jax


class UserError(Exception):
    """A fault in what the user gave.

    The message is one line: it names the file, flag or field, says what is wrong with it and what would be right.
    Commands print it on standard error and exit with its status.
    """

    status = 2


class NotNowError(UserError):
    """A fault that may be gone when the same is tried again: another run, or a host that is not there yet."""

    status = os.EX_TEMPFAIL  # 75


@contextlib.contextmanager
def memory_named(told: str) -> Iterator[None]:
    """Turn running out of memory into a line that names what to ask less of."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(told) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether a fault is that memory, the host's or a device's, does not suffice."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def check(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)
