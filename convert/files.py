"""Files in and out, whose faults are the user's and are told in one line that names the file."""

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from dflash_jax.errors import NotNowError, UserError, check


@contextlib.contextmanager
def about(file: Path | str, done: str = "read") -> Iterator[None]:
    """Put the file's name in front of faults found in what it holds; `done` is what is done to it.

    Raises:
        UserError: the same fault, named; or a file to which that cannot be done.
    """
    try:
        yield
    except UserError as error:
        raise type(error)(f"{file}: {error}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be {done} ({error.strerror or error})") from error


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


@contextlib.contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Give a directory to fill, which becomes `destination` when all went well and is removed when not.

    Raises:
        UserError: the destination is there already, or its parent is not.
    """
    told = f"{destination}: is there already; another path, or removing it, is right"
    check(not os.path.lexists(destination), told)
    parent = destination.absolute().parent
    # Not by the process's number: in containers it is the same again, and one that was killed leaves its own behind.
    partial = parent / f".{destination.name}.{secrets.token_hex(4)}.partial"
    try:
        check(parent.is_dir(), f"{parent}: no such directory; one that is there is right")
        partial.mkdir()
    except OSError as error:
        raise UserError(f"{parent}: cannot be written to ({error.strerror})") from error
    try:
        yield partial
        for written in (*partial.rglob("*"), partial):
            _sync(written)
        check(not os.path.lexists(destination), f"{destination}: appeared meanwhile; a path of one's own is right")
        partial.rename(destination)
        _sync(parent)
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_file(file: Path) -> Iterator[Path]:
    """Give a name to write to; what was written becomes `file`, for good and in one go, when all went well.

    Raises:
        UserError: it cannot be written.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        _sync(partial)
        partial.replace(file)
        _sync(file.parent)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be written ({error.strerror or error}); room for it, then the same again, is right"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep other processes from doing the same, for as long as this one lives at most.

    Raises:
        NotNowError: another one does it.
        UserError: the file system has no locks.
        OSError: the file cannot be written.
    """
    with file.open("w") as opened:
        lock(opened, "another run is in it; waiting for that, or another name, is right")
        yield


def lock(opened: IO[Any], taken: str) -> None:
    """Lock an open file until it is closed.

    Raises:
        NotNowError: another process has it, in the words of `taken`.
        UserError: the file system has no locks.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise NotNowError(taken) from error
    except OSError as error:
        raise UserError(
            f"{opened.name}: cannot be locked ({error.strerror}); a file system that has locks, or mounting it with "
            "them, is right"
        ) from error


def check_room(directory: Path, needed: int) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        OSError: fewer bytes are free where the directory lies.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"{needed:,} bytes are needed, and {free:,} are free")


def sha256(file: Path) -> str:
    """Return the hexadecimal digest of a file's bytes.

    Raises:
        UserError: it cannot be read.
    """
    with about(file), file.open("rb") as opened:
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
