"""Short runs of every loss, from the target's own layers, with either optimizer."""

import dataclasses

import jax
import numpy as np
import pytest

from dflash_jax import sharding
from tests import runs, tiny
from training.checkpoints import Checkpoints
from training.config import CheckpointConfig, OptimizerConfig
from training.step import Task
from training.trainer import train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kinds")
    runs.write_target(directory / "target")
    runs.write_prepared(directory / "prepared")
    return directory


@pytest.mark.parametrize(
    ("loss", "optimizer"), [("decay", "adamw"), ("dpace", "muon"), ("kl", "muon"), ("lk", "adamw")]
)
def test_a_run_learns_and_goes_on_to_the_bit(place, loss, optimizer):
    """The draft begins with layers of the target, which a step must not give away with its own parameters."""
    changes = {
        "target": str(place / "target"),
        "init_from": "target",
        "loss__name": loss,
        "optimizer__name": optimizer,
        "train__steps": 7,
        "checkpoint__every": 3,
        "evaluation__every": 3,
        "draft__layers": 1,
    }
    config, whole = runs.changed(runs.CONFIG, **changes), place / loss
    train(config, place / "prepared", whole)
    assert runs.checkpoints(whole) == [3, 6, 7]  # the last state is saved and judged, wherever it falls
    assert "evaluation_acceptance_length" in runs.metrics(whole)[-1]
    losses = [line["loss"] for line in runs.metrics(whole)]
    assert losses[-1] < losses[0]
    again = place / f"{loss}-again"
    (again / "checkpoints").mkdir(parents=True)
    (again / "config.json").write_bytes((whole / "config.json").read_bytes())
    (whole / "checkpoints" / "3").rename(again / "checkpoints" / "3")
    train(config, place / "prepared", again)
    assert runs.bits(again, 7) == runs.bits(whole, 7)


def test_every_setting_reaches_the_step():
    config = runs.changed(runs.CONFIG, loss__gamma=3.25, loss__name="lk", train__remat=True, train__anchors=5)
    task = Task.of(config, tiny.TARGET, tiny.DRAFT, sharding.make_mesh(), 9)
    found = (task.gamma, task.loss, task.remat, task.anchors, task.steps, task.dtype, task.optimizer)
    assert found == (3.25, "lk", True, 5, 9, "float32", config.optimizer)


def test_what_other_processes_ran_into_is_not_a_fault_of_files(tmp_path, monkeypatch):
    fault = jax.errors.JaxRuntimeError("UNAVAILABLE: the other one is gone")

    def wrapped(*_, **__):
        raise TimeoutError("waited for async_write_complete") from fault

    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", wrapped)
        with pytest.raises(jax.errors.JaxRuntimeError, match="gone"):
            checkpoints.wait()
        monkeypatch.undo()


def test_the_default_gamma_is_the_blocks(place):
    config = dataclasses.replace(runs.CONFIG, optimizer=OptimizerConfig())
    assert Task.of(config, tiny.TARGET, tiny.DRAFT, sharding.make_mesh(), 1).gamma == np.float32(4.0)
