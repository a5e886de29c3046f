"""Answers as JSON, an object a line: to standard output, or to a file that a later run goes on with."""

import contextlib
import fcntl
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_jax.errors import UserError, check
from inference.engine import Generation
from inference.text import text_of

Settings = Mapping[str, Any]


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
        file = open(path, "xb" if new else "r+b", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(
            f"--output {path}: cannot be written ({error.strerror or error}); a file that can be is right"
        ) from error
    with file:
        check(
            new or resume,
            f"--output {path}: there already; --resume goes on with it, another name starts anew",
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--output {path}: another run is writing it; waiting for that is right") from error
        try:
            yield ResultsFile(path, file, new=new)
        finally:
            if new and not os.path.getsize(path):
                os.unlink(path)


class ResultsFile:
    """A file of results. Each is there for good as soon as it is written, also if the run is killed after it."""

    def __init__(self, path: str, file: io.FileIO, *, new: bool) -> None:
        self._path, self._file, self._new = path, file, new

    def keep(self, prompt_lengths: Sequence[int], max_new_tokens: int, settings: Settings) -> int:
        """Check the results that are there, cut off one that was not written whole, and return how many there are.

        Raises:
            UserError: results of other prompts or settings, named by line and field.
        """
        if self._new:
            return 0
        count = end = 0
        with open(self._path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                where = f"--output {self._path}, line {count + 1}"
                check(count < len(prompt_lengths), f"{where}: only {count} prompts here; the first run's are right")
                same = {"prompt_tokens": prompt_lengths[count], **settings}
                _check_same(line, where, same, max_new_tokens)
                count += 1
                end += len(line)
        self._file.seek(end)
        self._file.truncate()
        return count

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
                f"--output {self._path}: cannot be written ({error.strerror}); more room, then --resume, is right"
            ) from error


def _check_same(line: bytes, where: str, expected: Settings, max_new_tokens: int) -> None:
    try:
        result = json.loads(line)
        found = {name: result[name] for name in expected}
        tokens, finish_reason = result["new_tokens"], result["finish_reason"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: no result of this command; a file that --output wrote is right") from error
    for name, value in expected.items():
        check(found[name] == value, f"{where}: {name} is {found[name]!r} there and {value!r} here; the same is right")
    check(
        tokens == max_new_tokens or (finish_reason == "stop" and tokens < max_new_tokens),
        f"{where}: {tokens} new tokens are not what --max-new-tokens {max_new_tokens} gives; the first run's is right",
    )
