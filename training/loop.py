"""The loop over a run's steps: batches in, metrics and checkpoints out, and an end at any moment."""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from convert import compile_cache, processes
from convert.progress import tell
from dflash_jax import sharding
from dflash_jax.anchors import Anchors, candidates, draw
from dflash_jax.errors import UserError
from dflash_jax.parameters import Params
from training import data
from training.checkpoints import Checkpoints
from training.config import RunConfig
from training.data import Drawn, PackedRows
from training.evaluation import Judged, judge
from training.metrics import Log, ratios
from training.step import Batch, Report, Task, TrainState, compile_step

SHOW_CURSOR = b"\x1b[?25h"


@dataclasses.dataclass(frozen=True)
class Grounds:
    """What a run stands on and does not change."""

    config: RunConfig
    task: Task
    target: Params
    rows: PackedRows
    held_out: PackedRows


class Loop:
    """Takes steps until the last one, or until a process gets SIGTERM or Ctrl-C, after which all save and end.

    A step's numbers are looked at while the next one runs. Which step is the last one follows from them alone, so that
    all processes of a run end at the same.
    """

    def __init__(self, grounds: Grounds, checkpoints: Checkpoints, output: Path) -> None:
        self._grounds, self._checkpoints, self._output = grounds, checkpoints, output
        self._signal = 0  # that this process was given
        self._stop = 0  # the one that all processes know of
        self._waiting: tuple[int, Drawn, Report] | None = None
        self._reports: list[Report] = []  # since the last line of metrics
        self._tokens = 0
        self._since = 0.0
        self._judge: Callable[..., Judged]

    def run(self, state: TrainState, position: dict[str, Any] | None) -> TrainState:
        """Take the steps that are left from a state and a position in the data; return the last state, which is saved.

        Raises:
            UserError: a loss that is not finite, or no room for what is written.
            SystemExit: Ctrl-C, with the status a shell gives it.
        """
        config, task, target = self._grounds.config, self._grounds.task, self._grounds.target
        first = int(state.step)
        batches = data.batches(self._grounds.rows, config.train.batch_size, config.seed, task.mesh)
        if position is not None:
            batches.set_state(position)
            tell(f"going on after step {first}")
        compile_cache.tell_compiling()
        seed = sharding.put(task.mesh, sharding.WHOLE, np.uint32(config.seed))
        example = data.in_order(self._grounds.rows, 0, config.train.batch_size, task.mesh)
        take = compile_step(task, target, state, *self._inputs(example, seed))
        if len(self._grounds.held_out):  # now, and not between a step and its checkpoint
            self._judge = judge.lower(task, target, state.params, *self._held_out(0)).compile()
        self._since = time.perf_counter()
        with self._logging(first) as log, self._noticing_signals():
            for step in range(first + 1, task.steps + 1):
                batch = next(batches)
                state, report = take(target, state, *self._inputs(batch, seed))
                self._look()
                self._waiting = step, batch, report
                self._leave_behind(log, step, state, batches.get_state())
                if self._stop:
                    break
            self._checkpoints.wait()
        if self._stop:
            tell(f"stopped after step {step}, which is saved; the same command goes on from it")
            raise SystemExit(0 if self._stop == signal.SIGTERM else 128 + self._stop)
        return state

    def _inputs(self, batch: Drawn, seed: jax.Array) -> tuple[Batch, jax.Array, jax.Array]:
        """Put on the devices what a step takes beside the state."""
        mesh = self._grounds.task.mesh
        where = NamedSharding(mesh, sharding.EVERY_DEVICE)
        mine = np.full(1, self._signal, np.int32)
        signals = jax.make_array_from_callback((mesh.size,), where, lambda _: mine)
        return data.on_devices(batch, mesh), seed, signals

    @contextlib.contextmanager
    def _logging(self, first: int) -> Iterator[Log | None]:
        """Open the log, in the process that has one."""
        if not processes.first():
            yield None
            return
        with Log(self._output, first, self._grounds.task.steps).shown() as log:
            yield log

    def _leave_behind(self, log: Log | None, step: int, state: TrainState, position: dict[str, Any]) -> None:
        """Write metrics, evaluate and save, each where it is due; all but evaluating after the last step."""
        config, steps = self._grounds.config, self._grounds.task.steps
        evaluate = step % config.evaluation.every == 0 or step == steps
        score = None
        if evaluate or self._stop or step % config.train.log_every == 0:
            self._look()
            values = self._metrics(step)
            if self._stop:  # a machine that is taken away may not wait for an evaluation
                self._checkpoints.save(step, state, position, None)
            if evaluate and len(self._grounds.held_out):
                held = self._evaluate(state.params)
                score = held["acceptance_length"]
                values |= {f"evaluation_{name}": value for name, value in held.items()}
            if log:
                log.write(step, values)
            self._reports, self._tokens, self._since = [], 0, time.perf_counter()
        if evaluate or self._stop or step % config.checkpoint.every == 0:
            self._look()
            self._checkpoints.save(step, state, position, score)
        if log:
            log.advance(step)

    def _look(self) -> None:
        """Wait for the last step, and look at what it did.

        Raises:
            UserError: its loss or gradients were not finite.
        """
        if self._waiting is None:
            return
        step, batch, report = self._waiting
        self._waiting = None
        report = jax.device_get(report)
        if not (np.isfinite(report.sums.loss) and np.isfinite(report.grad_norm)):
            self._checkpoints.wait()  # several processes end at once, and would take it with them
            lines = sorted({line for row in batch.indices for line in self._grounds.rows.lines(int(row))})
            raise UserError(
                f"step {step}: its loss is {report.sums.loss / max(report.sums.weight, 1)} and the norm of its "
                f"gradients {report.grad_norm}, so it was not taken; its rows came from lines "
                f"{', '.join(map(str, lines))} of the input. A lower --optimizer.learning-rate, or leaving out what is "
                "wrong with them, is right"
            )
        self._reports.append(report)
        self._tokens += sum(self._grounds.rows.size(int(row)) for row in batch.indices)
        self._stop = int(report.signal)

    def _metrics(self, step: int) -> dict[str, Any]:
        """Return the numbers of the steps since the last line."""
        config = self._grounds.config
        room = len(self._reports) * config.train.batch_size * config.train.length
        return ratios([report.sums for report in self._reports]) | {
            "grad_norm": float(np.mean([report.grad_norm for report in self._reports])),
            "learning_rate": float(self._reports[-1].learning_rate),
            "tokens_per_second": self._tokens / (time.perf_counter() - self._since),
            "padding": 1 - self._tokens / room,
            "skipped_steps": sum(not report.applied for report in self._reports),
            "epoch": step * config.train.batch_size / len(self._grounds.rows),
        }

    def _evaluate(self, params: Params) -> dict[str, Any]:
        """Judge the draft on the held-out rows, at the same anchors each time."""
        rows, size = self._grounds.held_out, self._grounds.config.train.batch_size
        found = []
        for first in range(0, len(rows), size):
            found.append(jax.device_get(self._judge(self._grounds.target, params, *self._held_out(first)).sums))
        return ratios(found)

    def _held_out(self, first: int) -> tuple[Batch, Anchors]:
        """Return a batch of held-out rows, and anchors in them."""
        rows, task, size = self._grounds.held_out, self._grounds.task, self._grounds.config.train.batch_size
        batch = data.on_devices(data.in_order(rows, first, size, task.mesh), task.mesh)
        return batch, draw(jax.random.key(first), candidates(batch.supervised, batch.starts), task.anchors)

    @contextlib.contextmanager
    def _noticing_signals(self) -> Iterator[None]:
        """Note a signal for the end of the step; a Ctrl-C that comes after it ends the process at once.

        Launchers may send SIGTERM more than once, and always mean the same by it.
        """

        def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            self._signal = number
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if sys.stderr.isatty():  # the bar hides the cursor, and would not be asked
                os.write(sys.stderr.fileno(), SHOW_CURSOR)

        before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            for one in before:
                signal.signal(one, note)
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
