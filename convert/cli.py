"""What every command shares: one-line errors, exit statuses, and no traceback for what is no fault of ours."""

import argparse
import contextlib
import difflib
import errno
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import shtab

import dflash_jax
from dflash_jax.errors import UserError, check

# How the commands are called where the package is installed; `python -m` calls them by their modules.
INSTALLED = "dflash-"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Parser(argparse.ArgumentParser):
    """An argument parser that shows an example below its help, and whose errors are one line."""

    def __init__(self, prog: str, **settings: Any) -> None:
        called = Path(sys.argv[0]).name
        is_command = re.fullmatch(r"python -m \S+", prog) is not None  # and no part of one
        is_installed = is_command and called.startswith(INSTALLED)
        if is_installed:
            named = {name: text.replace(prog, called) for name, text in settings.items() if isinstance(text, str)}
            prog, settings = called, settings | named
        super().__init__(prog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)
        if is_command:
            self.add_argument("--version", action="version", version=f"dflash-jax {dflash_jax.__version__}")
        if is_installed:
            shtab.add_argument_to(self, help="print what makes this shell complete the command, and end")

    def parse_known_args(self, *arguments: Any, **settings: Any) -> Any:
        """Parse, as `argparse` does; what a shell completes are names of files wherever words are free."""
        for action in self._actions:
            if action.type is None and action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        return super().parse_known_args(*arguments, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise the parser's complaint as a `UserError`, which `run` prints."""
        unknown = re.match(r"unrecognized arguments: (--[\w.-]+)", message)
        near = difflib.get_close_matches(unknown[1], self._flags() - {unknown[1]}, n=1) if unknown else []
        hint = f"did you mean {near[0]}?" if near else f"`{self.prog} --help` shows what is right"
        raise UserError(f"{message}; {hint}")

    def _flags(self) -> set[str]:
        commands = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [self, *(parser for choices in commands for parser in choices.values())]
        return {flag for parser in parsers for flag in parser._option_string_actions}


def run(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run a command's `main` with the process's arguments, and exit: 0 done, 2 the user's fault, in one line.

    A fault that may be gone when the same is tried again has status 75, `EX_TEMPFAIL` of sysexits.h.
    An interrupt, a termination and a closed pipe end the process with the status a shell gives them, 128 + signal.
    """
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _silence_libraries()
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process runs
    try:
        check(sys.stdout is not None, "standard output: closed; somewhere to write to is right")
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # A name that this console cannot show must not end the command.
            sys.stdout.reconfigure(errors="backslashreplace")
        main(sys.argv[1:])
        sys.stdout.flush()
        status = 0
    except UserError as error:
        tell_fault(error)
        status = error.status
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except SystemExit as ended:
        if ended.code == 128 + signal.SIGTERM:
            leave(128 + signal.SIGTERM)
        raise
    except BrokenPipeError:
        _discard_output()
        status = 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        _discard_output()
        print(f"error: standard output: cannot be written ({error.strerror}); room for it is right", file=sys.stderr)
        status = 2
    sys.exit(status)


def _silence_libraries() -> None:
    """Keep the advice of transformers and jax, meant for developers, off a user's terminal.

    It must run before transformers is imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("jax").setLevel(logging.ERROR)


def tell_fault(error: UserError) -> None:
    """Print the one line of a user's fault."""
    line = " ".join(str(error).split())
    print("error:", printable(line), file=sys.stderr)


def printable(text: str) -> str:
    """Return a text that does not steer a terminal: names and rows that are quoted may hold anything."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def leave(status: int) -> NoReturn:
    """End the process now: an interpreter that ends under threads that compile, read or wait can crash or hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _discard_output() -> None:
    # The interpreter flushes standard output once more as it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(number: int, frame: object) -> NoReturn:  # noqa: ARG001
    sys.exit(128 + number)
