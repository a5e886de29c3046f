"""A run's checkpoints: written beside the training, there whole or not at all, the newest and the best kept."""

import contextlib
import errno
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from convert import processes
from convert.files import read_json
from dflash_jax.errors import UserError, check
from training.config import CheckpointConfig
from training.initial import fingerprint
from training.step import TrainState

CHECKPOINTS = "checkpoints"
COMMITTED = "commit_success.txt"  # orbax's, written last
FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
SCORE = "acceptance_length"
SCORES = Path("metrics", "metrics")  # in a checkpoint


class Checkpoints:
    """The checkpoints in a run's output. State and position in the data are committed together.

    As a context it ends when what is being saved is there, whatever else went wrong; but not where it is interrupted.

    Raises:
        UserError: they cannot be written.
    """

    def __init__(self, output: Path, config: CheckpointConfig) -> None:
        self._path = output.absolute() / CHECKPOINTS
        best = policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
        kept = policies.AnyPreservationPolicy([policies.LatestN(config.keep), best])
        # Without `best_fn` scores are not written, and the best is forgotten when the run goes on.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=kept,
            best_fn=_score,
            cleanup_tmp_directories=True,
            single_host_load_and_broadcast=True,  # a host may not yet see what another has written
        )
        _hush()
        processes.by_first(self._prepare)
        with self._faults():
            self._manager = ocp.CheckpointManager(self._path, options=options)

    def _prepare(self) -> None:
        """Make room for checkpoints, and see that those that are there can be told apart."""
        with self._faults():
            self._path.mkdir(parents=True, exist_ok=True)
            steps = [path for path in self._path.glob("[0-9]*") if path.name.isdecimal()]
        whole = [step for step in steps if (step / COMMITTED).exists()]
        check(
            bool(whole) or len(steps) < 2,  # one may be half a copy, or a save that was killed
            f"{self._path}: none of {len(steps)} checkpoints has a {COMMITTED}, orbax's mark of a whole one; a copy "
            "with that file, or another output, is right",
        )
        with self._faults():
            _sweep(steps)
        for step in whole:
            if (step / SCORES).exists():
                with _damage(step):
                    read_json(step / SCORES)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
                self.close()

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
        beside = {"position": position, "fingerprint": _fingerprint(state)}
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), data=ocp.args.JsonSave(beside))
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
        """Wait likewise, and let go of files and threads."""
        with self._faults():
            self._manager.close()

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Read the newest checkpoint, each array placed as in `like`, on whatever devices it was saved.

        Raises:
            UserError: it cannot be read.
        """
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), data=ocp.args.JsonRestore())
        with _damage(self._path / str(self.latest)):
            found = self._manager.restore(self.latest, args=parts)
            state, position = TrainState(**found.state), found.data["position"]
            # Orbax's arrays have no checksum.
            check(_fingerprint(state) == found.data["fingerprint"], "not the bits that were saved")
        return state, position

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the writing threads ran into
            _pass_on(error)
            raise UserError(
                f"{self._path}: a checkpoint cannot be written ({_reason(error)}); those that are there are whole, "
                "and the same command goes on from the newest"
            ) from error


@contextlib.contextmanager
def _damage(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # orbax and tensorstore raise what their drivers do
        _pass_on(error)
        raise UserError(
            f"{checkpoint}: not readable as a checkpoint of this run ({_reason(error)}); removing it, to go on from "
            "the one before, is right"
        ) from error


def _pass_on(error: BaseException) -> None:
    """Raise what devices or other processes ran into, which orbax may have wrapped: it says nothing of files."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, jax.errors.JaxRuntimeError):
            raise at
        at = at.__cause__


def _score(metrics: dict[str, float]) -> float:
    return metrics[SCORE]


def _sweep(steps: list[Path]) -> None:
    """Remove what lacks the mark of a whole checkpoint: a copy of a part, say. Orbax would take it for one."""
    for step in steps:
        if not (step / COMMITTED).exists():
            shutil.rmtree(step)


def _fingerprint(state: TrainState) -> str:
    return fingerprint({str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))})


def _reason(error: Exception) -> str:
    """Return what is wrong in a few words; tensorstore says it at the end of many."""
    text = str(error).strip() or type(error).__name__
    known = [os.strerror(code) for code in FAULTS if os.strerror(code) in text]
    return known[0] if known else text.splitlines()[0][:200]


def _hush() -> None:
    """Keep what orbax's threads note of their workings from the user, until the process ends: it may come late.

    What they run into is raised, too.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if not isinstance(sys.unraisablehook, _Heed):
        sys.unraisablehook = _Heed(sys.unraisablehook)


class _Heed:
    """Heeds faults that nobody could catch, but those of an event loop of orbax's that another fault had ended."""

    def __init__(self, others: Callable[[Any], Any]) -> None:
        self._others = others

    def __call__(self, fault: Any) -> None:
        trace = fault.exc_traceback  # by hand: while the interpreter ends there are no modules
        while trace is not None:
            if any(part in trace.tb_frame.f_code.co_filename for part in ("orbax", "asyncio")):
                return
            trace = trace.tb_next
        self._others(fault)
