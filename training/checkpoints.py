"""A run's checkpoints: written beside the training, there whole or not at all, the newest and the best kept."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from dflash_jax.errors import UserError
from training.config import CheckpointConfig
from training.step import TrainState

CHECKPOINTS = "checkpoints"
SCORE = "acceptance_length"


class Checkpoints:
    """The checkpoints in a run's output. State and position in the data are committed together."""

    def __init__(self, output: Path, config: CheckpointConfig) -> None:
        self._path = output.absolute() / CHECKPOINTS
        best = policies.BestN(get_metric_fn=lambda metrics: metrics[SCORE], n=1, keep_checkpoints_without_metrics=False)
        kept = policies.AnyPreservationPolicy([policies.LatestN(config.keep), best])
        options = ocp.CheckpointManagerOptions(preservation_policy=kept, cleanup_tmp_directories=True)
        with _quiet():
            self._manager = ocp.CheckpointManager(self._path, options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint, None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, position: dict[str, Any], score: float | None) -> None:
        """Begin to write a checkpoint; training goes on meanwhile. `score` is what the best is told by.

        Raises:
            UserError: it cannot be written, or the one before could not.
        """
        if step == self.latest:
            return
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), data=ocp.args.JsonSave(position))
        with self._faults():
            self._manager.save(step, args=parts, metrics=None if score is None else {SCORE: score})

    def wait(self) -> None:
        """Wait until what was saved is there.

        Raises:
            UserError: it could not be written.
        """
        with self._faults():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Let go of the files and threads."""
        self._manager.close()

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Read the newest checkpoint, each array placed as in `like`.

        Raises:
            UserError: it cannot be read.
        """
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), data=ocp.args.JsonRestore())
        try:
            with _quiet():
                found = self._manager.restore(self.latest, args=parts)
        except Exception as error:  # orbax and tensorstore raise what their drivers do
            raise UserError(
                f"{self._path / str(self.latest)}: not readable as a checkpoint of this run ({_first_line(error)}); "
                "removing it, to go on from the one before, is right"
            ) from error
        return TrainState(**found.state), found.data

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            with _quiet():
                yield
        except Exception as error:  # whatever the writing threads ran into
            raise UserError(
                f"{self._path}: a checkpoint cannot be written ({_first_line(error)}); those that are there are whole, "
                "and the same command goes on from the newest"
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep orbax's notes on its own workings from the user; a fault of its threads is raised as well as noted."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
