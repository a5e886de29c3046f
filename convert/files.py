"""Small readers of files whose faults are the user's, told in one line that names the file."""

import collections
import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError


@contextlib.contextmanager
def about(file: Path | str) -> Iterator[None]:
    """Put the file's name in front of faults found in what it holds.

    Raises:
        UserError: the same fault, named; or an unreadable file.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error


@contextlib.contextmanager
def about_values(file: Path | str) -> Iterator[None]:
    """Do as `about` does where values of any type may turn up, and make a reader's stumbling over one a fault too."""
    with about(file):
        try:
            yield
        except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            raise UserError(f"a value of the wrong type or form ({error})") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: not there, not JSON, not an object, or with a key twice.
    """
    with about(file):
        try:
            value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
            raise UserError(f"not valid JSON ({error}); a JSON object is right") from error
        if not isinstance(value, dict):
            raise UserError(f"holds a JSON {type(value).__name__}; an object is right")
        return value


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON object as people read it."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(file: Path) -> str:
    """Return the hexadecimal digest of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that are there more than once."""
    return sorted(name for name, count in collections.Counter(names).items() if count > 1)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object's dictionary, for `object_pairs_hook`.

    Raises:
        UserError: a key that is there more than once, of which `json` would keep the last.
    """
    twice = repeated(name for name, _ in pairs)
    if twice:
        raise UserError(f"{', '.join(twice)} more than once; once is right")
    return dict(pairs)
