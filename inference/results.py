"""Answers as JSON, an object a line: to standard output, or to a file that a later run goes on with."""

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.files import lock
from dflash_jax.errors import UserError, check
from inference.engine import Generation
from inference.text import text_of

Settings = Mapping[str, Any]
NO_RESULT = "no result of this command; a file that --output wrote is right"


def record(generation: Generation, tokenizer: Any, prompt_tokens: int, settings: Settings) -> dict[str, Any]:
    """Return what `--json` says of an answer; without a tokenizer its text is null."""
    return {
        "text": None if tokenizer is None else text_of(generation, tokenizer),
        "token_ids": generation.token_ids,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "emitted_per_block": generation.emitted_per_block,
        "acceptance_length": generation.acceptance_length,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "tokens_per_second": generation.tokens_per_second,
        **settings,
    }


def in_order(answers: Iterable[tuple[int, Generation]], turn: int) -> Iterator[tuple[int, Generation]]:
    """Hold back what comes of later answers until those before them, from number `turn` on, are done."""
    latest: dict[int, Generation] = {}
    for index, generation in answers:
        latest[index] = generation
        if index != turn:
            continue
        while turn in latest:
            generation = latest.pop(turn)  # noqa: PLW2901
            yield turn, generation
            if generation.finish_reason is None:
                break
            turn += 1


def print_line(result: dict[str, Any]) -> None:
    """Write a result to standard output."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def open_results(path: str, *, resume: bool) -> Iterator["ResultsFile"]:
    """Open a file of results, and keep other runs from it; `resume` allows one that is there already.

    A file that is new, and that nothing was written to, is removed in the end.

    Raises:
        UserError: it is there but need not be, cannot be written, or another run writes it.
    """
    new = not os.path.exists(path)
    check(new or os.path.isfile(path), f"--output {path}: no regular file; one, or a new name, is right")
    try:
        # Unbuffered: what could not be written must not be tried again when the file is closed.
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
    except OSError as error:
        raise UserError(
            f"--output {path}: cannot be written ({error.strerror or error}); a file that can be is right"
        ) from error
    with file:
        check(
            new or resume,
            f"--output {path}: there already; --resume goes on with it, another name starts anew",
        )
        lock(file, f"--output {path}: another run is writing it; waiting for that is right")
        try:
            yield ResultsFile(path, file, new=new)
        finally:
            if new and not os.path.getsize(path):
                os.unlink(path)


class ResultsFile:
    """A file of results. Each is there for good as soon as it is written, also if the run is killed after it."""

    def __init__(self, path: str, file: io.FileIO, *, new: bool) -> None:
        self._path, self._file, self._new = path, file, new

    def keep(self, asked: Sequence[str], settings: Settings) -> int:
        """Check the results that are there, cut off one that was not written whole, and return how many there are.

        Args:
            asked: what `digest` says of each prompt.
            settings: those that every result must have.

        Raises:
            UserError: what is no result, or one of other prompts or settings, named by line and field.
        """
        count = 0
        for where, line in self.lines("text"):
            check(count < len(asked), f"{where}: only {count} prompts here; the first run's are right")
            check(
                read_result(line, where, ("asked", "token_ids"), settings)["asked"] == asked[count],
                f"{where}: it answers another prompt or target, or has another --max-new-tokens or --stop; the first "
                "run's are right",
            )
            count += 1
        return count

    def lines(self, first: str) -> Iterator[tuple[str, bytes]]:
        """Yield the results that are there, each after its place; then cut off one that was not written whole.

        Nothing may be written before the last has been taken. `first` is the key that every result begins with.

        Raises:
            UserError: an end that is no beginning of a result: only what the command began to write may be cut off.
        """
        if self._new:
            return
        beginning = f'{{"{first}": '.encode()
        end = 0
        with open(self._path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"--output {self._path}, line {number}"
                if not line.endswith(b"\n"):
                    check(beginning.startswith(line[: len(beginning)]), f"{where}: {NO_RESULT}")
                    break
                yield where, line
                end += len(line)
        self._file.seek(end)
        self._file.truncate()

    def write(self, result: dict[str, Any]) -> None:
        """Add a result.

        Raises:
            UserError: no room for it.
        """
        try:
            rest = json.dumps(result).encode() + b"\n"
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise UserError(
                f"--output {self._path}: cannot be written ({error.strerror}); more room, then going on, is right"
            ) from error


def digest(prompt: Sequence[int], *others: object) -> str:
    """Return a short name of what an answer follows from: its prompt, and whatever else decides it."""
    content = np.asarray(prompt, np.int64).tobytes() + repr(others).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def read_result(line: bytes, where: str, fields: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Return those fields of a result, and its settings.

    Raises:
        UserError: what is no result, or has other settings, named.
    """
    try:
        result = json.loads(line)
        found = {name: result[name] for name in (*fields, *settings)}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: {NO_RESULT}") from error
    for name, value in settings.items():
        check(found[name] == value, f"{where}: {name} is {found[name]!r} there and {value!r} here; the same is right")
    return found
