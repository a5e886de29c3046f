"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")
# Takes what is iterated over, how many there will be, and what is being done to them.
Watch = Callable[[Iterable[Any], int, str], Iterable[Any]]
SECONDS_BETWEEN_LINES = 5.0


_hushed = False


def hush() -> None:
    """Keep this process's progress to itself: another one tells the same."""
    global _hushed  # noqa: PLW0603 - standard error is the process's, too
    _hushed = True


def tell(line: str) -> None:
    """Write a line of progress to standard error."""
    if not _hushed:
        print(line, file=sys.stderr, flush=True)


def show(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield the items, and tell standard error how far along they are."""
    if _hushed:
        yield from items
        return
    if sys.stderr.isatty():
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            for item in items:
                yield item
                del item  # the next one may be as large
                bar.advance(task)
        return
    tell(label)
    began = last = time.monotonic()
    done = 0
    for item in items:  # `enumerate` would hold it while the next one is made
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            tell(f"{label}: {done} of {total}")
            last = time.monotonic()
        yield item
        del item
        done += 1
    if last > began:
        tell(f"{label}: {done} of {total}")


def quiet(items: Iterable[T], total: int, label: str) -> Iterable[T]:  # noqa: ARG001
    """Return the items and say nothing."""
    return items
