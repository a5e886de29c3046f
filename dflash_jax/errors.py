"""The exceptions for faults that the user can put right."""

import os


class UserError(Exception):
    """A fault in what the user gave.

    The message is one line: it names the file, flag or field, says what is wrong with it and what would be right.
    Commands print it on standard error and exit with its status.
    """

    status = 2


class NotNowError(UserError):
    """A fault that may be gone when the same is tried again: another run, or a host that is not there yet."""

    status = os.EX_TEMPFAIL  # 75


def check(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)
