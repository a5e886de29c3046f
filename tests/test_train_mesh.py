"""One run on several meshes and in several processes: the same losses, the same bits saved, and one end for all."""

import json
import shutil
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import sharding
from dflash_jax.anchors import candidates
from tests import processes, runs, train_mesh_worker
from tests.train_mesh_worker import MIDDLE
from training import data
from training.packing import hold_out
from training.prepared import open_prepared


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mesh")
    runs.write_target(directory / "target")
    runs.write_prepared(directory / "prepared", unsupervised=20)  # in some batches, all that one process has
    return directory


@pytest.fixture(scope="module")
def found(base):
    where = [str(base / "target"), str(base / "prepared"), str(base)]
    [status], _, [told] = processes.run(1, 8, "tests.train_mesh_worker", *where)
    assert status == 0, told
    return json.loads((base / "found.json").read_text())


def command(base, output, *more, **changes):
    config = runs.changed(train_mesh_worker.config_on("eight", str(base / "target")), **changes)
    return runs.command(base / "target", base / "prepared", output, *more, config=config)["args"][2:]


@pytest.fixture(scope="module")
def pair(base):
    """The run in two processes of four devices each."""
    statuses, out, told = processes.run(2, 4, *command(base, base / "pair"))
    assert statuses == [0, 0], told
    assert out == [f"{base / 'pair' / 'draft'}: a draft trained for 20 steps\n", ""]
    assert told[1] == ""
    return base / "pair"


def losses(output):
    return [line["loss"] for line in runs.metrics(output)]


def assert_close(output, other):
    ours, theirs = runs.metrics(output), runs.metrics(other)
    assert [line["step"] for line in ours] == list(range(1, runs.STEPS + 1))
    for name in ("loss", "grad_norm", "evaluation_loss"):
        pairs = [(one[name], two[name]) for one, two in zip(ours, theirs, strict=True) if one.get(name) is not None]
        one, other = np.array(pairs).T
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_eight_devices_train_as_one_does(base, found):
    assert_close(base / "eight", base / "one")


def test_two_processes_train_as_one_does(base, found, pair):
    assert_close(pair, base / "one")
    assert runs.checkpoints(pair) == [5, 10, 15, 20]
    halves = [(rows[:2].any(), rows[2:].any()) for rows in anchored(base)]
    assert (False, True) in halves  # the first process is without an anchor, and keeps step
    assert (True, False) in halves


def anchored(base):
    """Which rows of each batch have an anchor."""
    prepared, config = open_prepared(base / "prepared"), train_mesh_worker.CONFIG
    train_on, _ = hold_out(prepared.lines, config.evaluation.rows, config.seed)
    rows = data.packed(prepared, train_on, config.train.length, config.seed)
    batches = data.batches(rows, config.train.batch_size, config.seed, sharding.make_mesh())
    contents = [next(batches).contents for _ in range(runs.STEPS)]
    return [
        np.asarray(candidates(jnp.asarray(one["supervised"]), jnp.asarray(one["starts"]))).any(axis=1)
        for one in contents
    ]


def test_the_state_is_spread(found):
    """Every matrix over fsdp and tensor; moments as their parameters."""
    matrices = [(whole, part) for whole, part in found["parts"] if len(whole) == 2]
    assert len(matrices) == 3 * 8
    assert all(np.prod(whole) == 4 * np.prod(part) for whole, part in matrices)


def test_the_part_of_a_head_that_a_loss_scores_is_spread_as_the_head_is(found):
    assert found["scored"] == [[True, [16 // 2, 40 // 2]]] * 2


@pytest.mark.parametrize("mesh", ["one", "two", "eight"])
def test_what_eight_devices_saved_is_restored_to_the_bit(found, mesh):
    assert found["same"][mesh] is True


@pytest.mark.parametrize("mesh", ["one", "two"])
def test_a_run_goes_on_on_other_devices(base, found, mesh):
    output = base / f"eight-then-{mesh}"
    assert_close(output, base / "eight")
    assert losses(output)[:MIDDLE] == losses(base / "eight")[:MIDDLE]


@pytest.mark.slow
def test_what_two_processes_saved_is_restored_by_one(base, pair):
    output = base / "pair-then-one"
    shutil.copytree(pair, output)
    shutil.rmtree(output / "draft")
    for step in runs.checkpoints(output):
        if step > MIDDLE:
            shutil.rmtree(output / "checkpoints" / str(step))
    [status], _, [told] = processes.run(1, 8, *command(base, output))
    assert status == 0, told
    assert f"going on after step {MIDDLE}" in told
    assert_close(output, pair)


@pytest.mark.slow
def test_two_processes_share_a_cache_a_part_of_the_vocabulary_and_a_first_draft_as_one_has_them(base, pair):
    """Features are computed once, by both, and read by each where it needs them."""
    changes = {"loss__vocabulary": 40, "optimizer__learning_rate": 1e-4}
    for name, count in (("cached-by-one", 1), ("cached-by-two", 2)):
        cache, first = str(base / f"features-{name}"), ("--init-from", str(pair / "draft"))
        arguments = command(base, base / name, *first, **changes, features__cache=cache)
        statuses, _, told = processes.run(count, 8 // count, *arguments)
        assert statuses == [0] * count, told
    assert_close(base / "cached-by-two", base / "cached-by-one")


def wait_for_lines(running, output, count):
    """Let a run go on until it has logged so many steps."""
    lines = output / "metrics.jsonl"
    while not lines.exists() or lines.read_text().count("\n") < count:
        assert all(process.poll() is None for process in running)
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_takes_the_other_with_it_and_the_run_goes_on_to_the_same_bits(base, pair, killed):
    output = base / f"killed-{killed}"
    running = processes.start(2, 4, *command(base, output))
    wait_for_lines(running, output, 5)  # a checkpoint is being written
    before = time.monotonic()
    running[killed].kill()
    statuses, _, _ = processes.end(running)
    assert statuses[killed] == -signal.SIGKILL
    assert statuses[1 - killed] not in (0, 2)
    assert time.monotonic() - before < processes.PATIENCE / 2
    statuses, _, told = processes.run(2, 4, *command(base, output))
    assert statuses == [0, 0], told
    assert runs.metrics(output) == runs.metrics(pair)
    assert runs.bits(output, runs.STEPS) == runs.bits(pair, runs.STEPS)


@pytest.mark.slow
def test_a_signal_to_one_process_ends_both_after_the_same_step_and_the_run_goes_on_to_the_same_bits(base, pair):
    output = base / "stopped"
    running = processes.start(2, 4, *command(base, output))
    wait_for_lines(running, output, 2)
    running[1].send_signal(signal.SIGTERM)
    statuses, _, told = processes.end(running)
    assert statuses == [0, 0], told
    last = len(losses(output))
    assert last < runs.STEPS
    assert f"stopped after step {last}, which is saved" in told[0]
    assert runs.checkpoints(output)[-1] == last
    statuses, _, told = processes.run(2, 4, *command(base, output))
    assert statuses == [0, 0], told
    assert f"going on after step {last}" in told[0]
    assert runs.metrics(output) == runs.metrics(pair)
    for step in (*range((last + 4) // 5 * 5, runs.STEPS + 1, 5),):
        assert runs.bits(output, step) == runs.bits(pair, step)


def test_what_the_first_process_finds_wrong_ends_all(base, pair):
    output = base / "other"
    shutil.copytree(pair, output)
    wrong = runs.changed(train_mesh_worker.config_on("eight", str(base / "target")), seed=7)
    arguments = runs.command(base / "target", base / "prepared", output, "--seed", "7", config=wrong)["args"][2:]
    statuses, _, told = processes.run(2, 4, *arguments)
    assert statuses == [2, 2]
    assert "seed is 0 there and 7 here" in told[0]
    assert told[1] == "error: the first process of the run failed, and says why\n"


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (["--data", "nowhere"], "nowhere: "),
        (["--optimizer.learning-rate", "0.5"], "this process has other settings, another target or other data than"),
        (
            ["--mesh.data", "1", "--mesh.fsdp", "4"],
            "this process has other settings, another target or other data than",
        ),
    ],
    ids=["data", "settings", "mesh"],
)
def test_what_one_process_alone_finds_wrong_ends_all(base, last, told):
    before = time.monotonic()
    statuses, _, errors = processes.run(2, 4, *command(base, base / "alone"), last=last)
    assert statuses[1] == 2
    assert statuses[0] != 0
    assert errors[1].startswith("error: ")
    assert told in errors[1]
    assert time.monotonic() - before < processes.PATIENCE / 2
