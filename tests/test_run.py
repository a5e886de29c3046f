"""Whole runs on the tiny pair, most of them in this process, with one program between them."""

import contextlib
import dataclasses
import json
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from dflash_jax import sharding
from dflash_jax.errors import UserError
from tests import runs
from tests.test_convert_to_hf import reference_model
from tests.torch_models import params_of
from training import data, loop, run, trainer
from training.checkpoints import Checkpoints
from training.metrics import Log
from training.packing import hold_out
from training.prepared import open_prepared
from training.step import compile_step
from training.trainer import train

MADE: dict[Any, Any] = {}


def compile_once(task, *arguments):
    """The step, compiled once for all runs of the module."""
    if task not in MADE:
        MADE[task] = compile_step(task, *arguments)
    [made] = MADE.values()
    return made


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    monkeypatch.setattr(loop, "compile_step", compile_once)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def target(place):
    return runs.write_target(place / "target")


@pytest.fixture(scope="module")
def prepared(place):
    return runs.write_prepared(place / "prepared")


@pytest.fixture(scope="module")
def begin(target, prepared):
    def begin(output, data=prepared, **fields):
        train(runs.changed(runs.CONFIG, **{"target": str(target)} | fields), data, output)

    return begin


@pytest.fixture(scope="module")
def whole(place, begin):
    """A run that nothing happened to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compile_step", compile_once)
        begin(place / "whole")
    return place / "whole"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "run"


def refusal(action, *arguments, **options):
    with pytest.raises(UserError) as caught:
        action(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_data_without_an_answer_is_refused(begin, output, tmp_path):
    none = runs.write_prepared(tmp_path / "none", rows=20, unsupervised=20)
    assert refusal(begin, output, none).startswith(f"--data {none}: no answer of two tokens or more to learn from")


def test_a_run_that_learnt_from_nothing_leaves_no_draft(begin, output, monkeypatch):
    idle = SimpleNamespace(run=lambda state, position: state)
    monkeypatch.setattr(trainer, "Loop", lambda *_: idle)
    assert "there was no answer within --train.length 48 to learn from" in refusal(begin, output)
    assert not (output / "draft").exists()


def test_gradients_that_are_not_finite_end_a_run_though_the_loss_is(whole):
    report: Any = SimpleNamespace(sums=SimpleNamespace(loss=1.0, weight=1.0), grad_norm=np.inf)
    grounds = Mock()
    grounds.rows.lines.return_value = [1]
    stuck = loop.Loop(grounds, Mock(), whole)
    stuck._waiting = 3, data.Drawn(np.array([0]), {}), report
    assert "step 3: its loss is 1.0 and the norm of its gradients inf, so it was not taken" in refusal(stuck._look)


def assert_same_run(output, whole):
    for step in runs.checkpoints(whole):
        if step in runs.checkpoints(output):
            assert runs.bits(output, step) == runs.bits(whole, step)
    assert max(runs.checkpoints(output)) == runs.STEPS
    assert runs.metrics(output) == runs.metrics(whole)
    assert (output / "draft" / "model.safetensors").read_bytes() == (whole / "draft" / "model.safetensors").read_bytes()


def signalled_at(monkeypatch, where, name, step, number):
    """Let a signal come in a method of a class, when it is called for a step."""
    before = getattr(where, name)

    def method(self, at, *arguments):
        before(self, at, *arguments)
        if at == step:
            signal.raise_signal(number)

    monkeypatch.setattr(where, name, method)


def test_a_run_leaves_what_is_promised(whole):
    assert {file.name for file in whole.iterdir()} == {
        ".lock", "config.json", "metrics.jsonl", "checkpoints", "tensorboard", "draft",
    }  # fmt: skip
    assert runs.checkpoints(whole) == [5, 10, 15, 20]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    promised = {"loss", "accuracy", "acceptance_length", "grad_norm", "tokens_per_second"}
    assert all(promised <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "evaluation_acceptance_length" in line] == [10, 20]
    assert lines[-1]["loss"] < lines[0]["loss"]
    written = json.loads((whole / "config.json").read_text())
    assert written["data"] == json.loads((whole.parent / "prepared" / "manifest.json").read_text())["data_hash"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_stopped_and_gone_on_with_it_is_the_same_run_to_the_bit(
    begin, whole, output, monkeypatch, capsys, number, status
):
    with monkeypatch.context() as patch:
        signalled_at(patch, Log, "write", 9, number)
        with pytest.raises(SystemExit) as ended:
            begin(output)
    assert ended.value.code == status
    assert "stopped after step 10, which is saved; the same command goes on from it" in capsys.readouterr().err
    assert runs.checkpoints(output) == [5, 10]
    assert not (output / "draft").exists()
    begin(output)
    assert "going on after step 10" in capsys.readouterr().err
    assert_same_run(output, whole)


def test_a_signal_while_a_step_is_saved_stops_after_the_next_which_is_saved(begin, whole, output, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        signalled_at(patch, Checkpoints, "save", 5, signal.SIGTERM)
        with pytest.raises(SystemExit):
            begin(output)
    assert "stopped after step 6, which is saved" in capsys.readouterr().err
    assert runs.checkpoints(output) == [5, 6]
    begin(output)
    assert_same_run(output, whole)


def test_a_signal_at_the_last_step_costs_only_the_draft(begin, whole, output, monkeypatch):
    with monkeypatch.context() as patch:
        signalled_at(patch, Log, "write", 19, signal.SIGTERM)
        with pytest.raises(SystemExit):
            begin(output)
    assert not (output / "draft").exists()
    begin(output)
    assert_same_run(output, whole)


def test_a_finished_run_says_so_and_writes_a_draft_that_is_missing(begin, whole, output, capsys):
    shutil.copytree(whole, output)
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*") if file.is_file() and file.name != ".lock"}
    begin(output)
    told = capsys.readouterr()
    assert f"--output {output}: all 20 steps are taken already" in told.err
    assert told.out == f"{output}/draft: a draft trained for 20 steps\n"
    assert before == {file: file.stat().st_mtime_ns for file in before}
    shutil.rmtree(output / "draft")
    begin(output, export__dtype="float32")
    kinds = {array.dtype.name for array in load_file(output / "draft" / "model.safetensors").values()}
    assert kinds == {"float32"}


def test_a_damaged_newest_checkpoint_is_told_and_without_it_the_run_goes_on(begin, whole, output):
    shutil.copytree(whole, output)
    shutil.rmtree(output / "draft")
    largest = max((output / "checkpoints" / "20").rglob("*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    told = refusal(begin, output)
    assert told.startswith(f"{output}/checkpoints/20: not readable as a checkpoint of this run (")
    assert told.endswith("; removing it, to go on from the one before, is right")
    shutil.rmtree(output / "checkpoints" / "20")
    begin(output)
    assert_same_run(output, whole)


def test_each_epoch_has_every_row_once_and_no_interrupt_changes_that(prepared):
    documents = open_prepared(prepared)
    choices = (data.packed(documents, np.arange(n), runs.LENGTH, 0) for n in range(60, 50, -1))
    rows = next(rows for rows in choices if len(rows) % 2)  # epochs end within batches
    count = len(rows)

    def take(batches, steps):
        return [row for _ in range(steps) for row in next(batches).indices.tolist()]

    order = take(data.batches(rows, 2, 0, sharding.make_mesh()), 2 * count)
    for epoch in range(4):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert order[:count] != order[count : 2 * count]
    for step in (0, 1, 5, count // 2, count // 2 + 1, count):
        before = data.batches(rows, 2, 0, sharding.make_mesh())
        taken = take(before, step)
        state = json.loads(json.dumps(before.get_state()))
        after = data.batches(rows, 2, 0, sharding.make_mesh())
        after.set_state(state)
        assert taken + take(after, 2 * count - step) == order


def test_a_loss_that_is_not_finite_is_told_with_its_lines_and_nothing_before_is_lost(
    tmp_path, target, prepared, begin, whole, output
):
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    arrays = load_file(broken / "model.safetensors")
    documents = open_prepared(prepared)
    train_on, _ = hold_out(documents.lines, runs.CONFIG.evaluation.rows, runs.CONFIG.seed)
    rows = data.packed(documents, train_on, runs.LENGTH, runs.CONFIG.seed)
    step, element, token = first_marked(rows)
    arrays["model.embed_tokens.weight"][token] = np.nan
    save_file(arrays, broken / "model.safetensors")
    lines = sorted({line for row in element.indices.tolist() for line in rows.lines(row)})
    for _ in range(2):  # gone on with, it says the same
        told = refusal(begin, output, target=str(broken), evaluation__every=100)
        assert re.match(rf"step {step}: its loss is nan and the norm of its gradients nan, so it was not taken; ", told)
        assert f"its rows came from lines {', '.join(map(str, lines))} of the input. A lower" in told
        last = (step - 1) // 5 * 5
        assert runs.checkpoints(output) == list(range(5, step, 5))
        assert [line["step"] for line in runs.metrics(output)] == list(range(1, step))
    assert runs.bits(output, last) == runs.bits(whole, last)


def first_marked(rows):
    """A step after the fifth at which a token is first read, what it reads, and the token."""
    left = set(runs.MARKED.values())
    for step, element in enumerate(data.batches(rows, 2, runs.CONFIG.seed, sharding.make_mesh()), 1):
        found = left & set(element.contents["tokens"].flat)
        if found and step > 5:
            assert step <= runs.STEPS
            return step, element, found.pop()
        left -= found
    raise AssertionError


def test_a_batch_without_an_anchor_is_counted_and_passed_over(tmp_path, begin, output):
    data = runs.write_prepared(tmp_path / "prepared", rows=60, unsupervised=40)
    begin(output, data)
    lines = runs.metrics(output)
    assert [line["step"] for line in lines] == list(range(1, 21))
    skipped = [line for line in lines if line["skipped_steps"]]
    assert 0 < len(skipped) < 20
    assert all((line["loss"], line["acceptance_length"]) == (None, None) for line in skipped)
    assert all(np.isfinite(line["loss"]) for line in lines if not line["skipped_steps"])
    assert json.loads((output / "draft" / "config.json").read_text())["block_size"] == 8


def test_other_data_or_weights_are_refused(tmp_path, target, begin, whole):
    other = runs.write_prepared(tmp_path / "prepared", rows=61)
    assert re.search(r"config\.json tells of: data is '\w+' there and '\w+' here", refusal(begin, whole, other))
    changed = tmp_path / "changed"
    shutil.copytree(target, changed)
    arrays = load_file(changed / "model.safetensors")
    arrays["lm_head.weight"][3, 3] += 1e-6
    save_file(arrays, changed / "model.safetensors")
    told = refusal(begin, whole, target=str(changed))
    assert re.search(r"config\.json tells of: target_weights is '\w+' there and '\w+' here", told)


def test_data_of_another_tokenizer_is_refused_before_anything_is_loaded(tmp_path, begin, output):
    data = runs.write_prepared(tmp_path / "prepared", tokenizer_hash="0", target="some/other")
    assert refusal(begin, output, data).startswith(f"--data {data}: prepared with the tokenizer of some/other, which")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_draft_is_loaded_by_us_and_by_the_published_reference(begin, whole, output, dtype):
    shutil.copytree(whole, output)
    if dtype == "float32":
        shutil.rmtree(output / "draft")
        begin(output, export__dtype=dtype)
    written = json.loads((output / "draft" / "config.json").read_text())
    assert {array.dtype.name for array in load_file(output / "draft" / "model.safetensors").values()} == {dtype}
    assert (written["dtype"], written["torch_dtype"]) == (dtype, dtype)
    assert written["block_size"] == 8
    assert written["num_target_layers"] == 4
    assert written["dflash_config"] == {"mask_token_id": 262, "target_layer_ids": [2]}
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 10_000
    ours = convert.load_draft(str(output / "draft"), "float32")
    theirs = params_of(reference_model(output / "draft", dtype="float32"))
    same = jax.tree.map(lambda one, other: bool((np.asarray(one) == np.asarray(other)).all()), ours.params, theirs)
    assert jax.tree.all(same)
    if dtype == "float32":
        kernel = np.asarray(ours.params["fc"]["kernel"])
        assert kernel.tobytes() in runs.bits(output, 20).values()


FAULTS = {
    "preset": (["tinny"], "preset 'tinny' is not known; did you mean tiny?"),
    "far preset": (["?"], "preset '?' is not known; one of tiny, smollm2-demo, qwen3-0.6b"),
    "no preset": ([], "the following arguments are required: PRESET"),
    "data": (["tiny"], "--data: not given; a directory that `python -m training.prepare` wrote is right"),
    "no data": (["tiny", "--data", "absent"], "absent: no such directory; one that `python -m training.prepare`"),
    "field": (["tiny", "--optimizer.learnin-rate", "1"], "did you mean --optimizer.learning-rate?"),
    "section": (["tiny", "--optimiser.clip", "1"], "did you mean --optimizer.clip?"),
    "integer": (["tiny", "--train.steps", "ten"], "argument --train.steps: 'ten'; a whole number or none is right"),
    "fraction": (["tiny", "--train.batch-size", "1.5"], "argument --train.batch-size: '1.5'; a whole number is right"),
    "number": (
        ["tiny", "--optimizer.learning-rate", "fast"],
        "argument --optimizer.learning-rate: 'fast'; a number is right",
    ),
    "too few": (["tiny", "--train.batch-size", "0"], "--train.batch-size: 0; 1 or more is right"),
    "loss": (["tiny", "--loss.name", "mse"], "--loss.name: 'mse' is not known; one of"),
    "dtype": (["tiny", "--train.dtype", "float16"], "--train.dtype: 'float16' is not known; one of float32, bfloat16"),
    "left out": (["tiny", "--train.steps"], "argument --train.steps: expected one argument"),
    "shortened": (["tiny", "--train.step", "3"], "did you mean --train.steps?"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_wrong_with_a_command_is_one_line(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = FAULTS[case]
    assert message in refusal(run.main, arguments)
    assert list(tmp_path.iterdir()) == []


def test_flags_reach_the_run_and_its_output_has_the_presets_name(monkeypatch, tmp_path):
    seen: dict[str, Any] = {}
    monkeypatch.setattr(run, "train", lambda config, data, output: seen.update(config=config, at=(data, output)))
    run.main(["tiny", "--data", "d", *runs.flags(runs.CONFIG)])
    assert dataclasses.replace(seen["config"], target=None) == runs.CONFIG
    assert [str(path) for path in seen["at"]] == ["d", "runs/tiny"]


def test_taps_that_do_not_fit_and_rows_that_are_too_long_are_refused(begin, output):
    assert refusal(begin, output, draft__taps=5).startswith("--draft.taps: 5 do not fit a target of 4 layers")
    assert refusal(begin, output, train__length=513) == "--train.length: 513; the target ends at 512 tokens"
    assert refusal(begin, output, draft__mask_token_id=257).startswith("--draft.mask-token-id: 257; a row of")
    assert refusal(begin, output, train__steps=None, train__batch_size=1_000).startswith("--train.batch-size: 1000")


def test_on_a_terminal_it_shows_a_bar_with_the_time_left(begin, output, whole, monkeypatch):
    ours, theirs = pty.openpty()
    sent = []

    def listen():
        with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # the other end is closed
            while piece := terminal.read(4096):
                sent.append(piece)

    listener = threading.Thread(target=listen)
    listener.start()
    for name, value in {"TERM": "xterm", "COLUMNS": "140", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        begin(output)
    listener.join()
    text = b"".join(sent).decode()
    assert re.search(r"20/20 \S*\d:\d\d:\d\d.* left: .*\d:\d\d:\d\d", text)
    assert "acceptance length 1." in text
    assert "step 20 of 20" not in text
    assert_same_run(output, whole)


def test_ctrl_c_after_another_signal_ends_the_process_at_once():
    code = (
        "import time; from convert import cli; from training.loop import Loop\n"
        "def main(_):\n    with Loop(None, None, None)._noticing_signals():\n        print(1, flush=True)\n"
        "        time.sleep(60)\n"
        "cli.run(main)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    for _ in range(2):  # launchers that send it to all, and to one that passes it on
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == -signal.SIGINT


def test_held_out_rows_without_an_answer_have_no_numbers_and_end_no_run(tmp_path, begin, output, monkeypatch):
    """Elsewhere an evaluation without an anchor hung, or divided by nothing."""

    def apart(lines, asked, seed):
        return np.flatnonzero(lines > 4), np.flatnonzero(lines <= 4)

    monkeypatch.setattr(trainer, "hold_out", apart)
    begin(output, runs.write_prepared(tmp_path / "prepared", unsupervised=4))
    judged = [line for line in runs.metrics(output) if "evaluation_loss" in line]
    assert [line["step"] for line in judged] == [10, 20]
    assert all(line["evaluation_loss"] is line["evaluation_acceptance_length"] is None for line in judged)
    assert runs.checkpoints(output) == [5, 10, 15, 20]
    assert (output / "draft" / "model.safetensors").exists()
