"""The one exception for faults that the user can put right."""


class UserError(Exception):
    """A fault in what the user gave.

    The message is one line: it names the file, flag or field, says what is wrong with it and what would be right.
    Commands print it on standard error and exit with status 2.
    """


def check(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)
