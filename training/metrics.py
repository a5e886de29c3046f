"""What a run says of itself: numbers from sums, to a terminal, a JSONL file and TensorBoard."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from convert.files import about_values, new_file
from convert.progress import tell
from dflash_jax.errors import UserError
from dflash_jax.loss import Sums
from training.event_file import EventFile

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
# What a line on the terminal shows, and how.
SHOWN = {
    "loss": "loss {:.3f}",
    "acceptance_length": "acceptance length {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
}
SHOWN_TOO = {"evaluation_acceptance_length": "held out {:.3f}"}


def ratios(sums: Sequence[Sums]) -> dict[str, Any]:
    """Return loss, accuracy and acceptance length of steps, over all their blocks; None where there were none."""
    total: Any = Sums(
        *(np.sum([np.asarray(part, np.float64) for part in parts], axis=0) for parts in zip(*sums, strict=True))
    )

    def ratio(one: float, other: float) -> float | None:
        return float(one / other) if other else None

    return {
        "loss": ratio(total.loss, total.weight),
        "accuracy": ratio(total.right.sum(), total.counted.sum()),
        "accuracy_by_slot": [ratio(*pair) for pair in zip(total.right, total.counted, strict=True)],
        "acceptance_length": ratio(total.emitted, total.blocks),
    }


class Log:
    """Where a run's metrics go. A resumed run's lines follow those of the steps before it.

    Raises:
        UserError: metrics that are none, or no room for them.
    """

    def __init__(self, output: Path, first_step: int, steps: int) -> None:
        self._file, self._boards = output / METRICS, output / TENSORBOARD
        self._keep_until(first_step)
        with _writing(self._boards):
            self._board = EventFile(self._boards, first_step + 1)
        self._bar = _bar(steps) if sys.stderr.isatty() else None
        self._task = self._bar.add_task("", total=steps, completed=first_step) if self._bar else None
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def advance(self, step: int) -> None:
        """Move the bar to a step."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write a line.

        Raises:
            UserError: no room for it.
        """
        with _writing(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        with _writing(self._boards):
            self._board.write(step, dict(one for name, value in values.items() for one in _scalars(name, value)))
        text = ", ".join(
            form.format(values[name]) for name, form in (SHOWN | SHOWN_TOO).items() if values.get(name) is not None
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=step)
        else:
            tell(f"step {step} of {self._steps}: {text}{self._left(step)}")

    def _left(self, step: int) -> str:
        """Say how long the steps that are left should take, by those since the first line, which waited to compile."""
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        since, began = self._first
        if not since < step < self._steps:
            return ""
        minutes = (now - began) / (step - since) * (self._steps - step) / 60
        return f", about {math.ceil(minutes)} min left" if minutes < 120 else f", about {minutes / 60:.0f} h left"

    def _keep_until(self, step: int) -> None:
        """Drop lines of steps that will be taken again, and one that was not written whole."""
        if not self._file.exists():
            return
        with about_values(self._file):
            lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if kept != lines:
            with new_file(self._file) as partial:
                partial.write_text("".join(kept), encoding="utf-8")

    @contextlib.contextmanager
    def shown(self) -> Iterator["Log"]:
        """Show the bar for as long as the run lasts."""
        with self._bar or contextlib.nullcontext():
            yield self


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); more room, then again, is right") from error


def _bar(steps: int) -> Progress:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=Console(stderr=True), speed_estimate_period=max(60.0, steps / 100))


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list):
        yield from ((f"{name}/{slot}", one) for slot, one in enumerate(value, 1) if one is not None)
    elif value is not None:
        yield name, value
