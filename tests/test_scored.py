"""Which tokens a loss scores where it does not score all, and a run that does so."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import sharding
from dflash_jax.errors import UserError
from tests import pair, runs, tiny
from training import loop, prepared, scored
from training.config import OptimizerConfig
from training.data import PackedRows
from training.packing import hold_out
from training.prepared import open_prepared
from training.scored import choose, count, part_of_head
from training.step import Task, compile_step
from training.trainer import train

MESH = sharding.make_mesh()
TASK = Task(tiny.TARGET, tiny.DRAFT, 6, "decay", 4.0, "float32", False, OptimizerConfig(), 10, MESH)
# Line, token ids, supervised. Of the first, a row of 4 tokens has no 5; the last is not trained on.
DOCUMENTS = [
    (1, [7, 3, 3, 7, 5], [False, True, True, True, True]),
    (2, [3, 1, 0], [True, True, False]),
    (3, [9, 9], [True, True]),
]
HEADS = {"embedding": (11, 16), "head": (16, 11)}
COUNTS = [0, 1, 0, 3, 0, 0, 0, 1, 0, 0, 0]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rows")
    prepared.write_shard(directory, 0, "x", DOCUMENTS)
    prepared.finish(directory, 1, {"tokenizer_hash": "t", "target": "T"})
    return PackedRows(open_prepared(directory), [[1], [0]], 4)


@pytest.mark.parametrize("documents", [1, 1024])
def test_supervised_tokens_that_are_trained_on_are_counted(rows, monkeypatch, documents):
    monkeypatch.setattr(scored, "COUNTED", documents)
    assert count(rows, 11).tolist() == COUNTS


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        (2, [1, 3]),  # of 1 and 7, which are alike frequent, the first
        (3, [1, 3, 7]),
        (4, [0, 1, 3, 7]),
        (7, [0, 1, 3, 4, 6, 7, 9]),  # every second of 0, 2, 4, 5, 6, 8, 9, 10
        (11, list(range(11))),
    ],
)
def test_the_most_frequent_are_scored_and_others_evenly_fill_up(size, tokens):
    assert choose(np.array(COUNTS), size).tolist() == tokens


def test_frequency_decides_and_not_the_number():
    assert choose(np.array([1, 2, 9, 2, 5]), 3).tolist() == [1, 2, 4]


@pytest.mark.parametrize("tied", [False, True])
def test_the_part_is_columns_of_the_head_and_says_where_each_token_is(rows, capsys, tied):
    task = dataclasses.replace(TASK, target=dataclasses.replace(tiny.TARGET, tie_word_embeddings=tied))
    params = {name: jax.random.normal(jax.random.key(0), shape) for name, shape in HEADS.items()}
    part = part_of_head(4, task, params, rows)
    whole = params["embedding"].T if tied else params["head"]
    assert (part["head"] == whole[:, np.array([0, 1, 3, 7])]).all()
    assert part["rows"].tolist() == [0, 1, 4, 2, 4, 4, 4, 3, 4, 4, 4]
    assert "the loss scores 4 of 11 tokens, which are 100.00% of what answers say\n" in capsys.readouterr().err
    part_of_head(2, task, params, rows)
    assert "the loss scores 2 of 11 tokens, which are 80.00% of what answers say\n" in capsys.readouterr().err


def test_a_run_scores_a_part_goes_on_with_it_and_with_no_other(tmp_path, monkeypatch, capsys):
    weights: list[Any] = []
    compiled: list[Any] = []

    def compile_once(task, target, *arguments):
        weights.append(target)
        compiled[:] = compiled or [compile_step(task, target, *arguments)]
        return compiled[0]

    monkeypatch.setattr(loop, "compile_step", compile_once)
    target, data = runs.write_target(tmp_path / "target"), runs.write_prepared(tmp_path / "prepared")
    monkeypatch.setattr(loop.Loop, "_evaluate", lambda self, params: {"acceptance_length": 1.0})
    fewer = {"train__steps": 8, "checkpoint__every": 4, "evaluation__every": 8, "draft__layers": 1}
    config = runs.changed(runs.CONFIG, target=str(target), loss__vocabulary=200, **fewer)
    train(config, data, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settings"]["loss"]["vocabulary"] == 200
    lines = runs.metrics(tmp_path / "run")
    assert abs(lines[0]["loss"] - np.log(200)) < 0.1  # a draft that knows nothing finds 200 tokens alike likely
    assert "the loss scores 200 of 264 tokens" in capsys.readouterr().err
    # Held-out documents are not counted.
    read = open_prepared(data)
    said = [read[int(i)] for i in hold_out(read.lines, runs.CONFIG.evaluation.rows, 0)[0]]
    tokens = np.concatenate([row.tokens[: runs.LENGTH][row.supervised[: runs.LENGTH]] for row in said])
    frequent = choose(np.bincount(tokens, minlength=pair.VOCABULARY), 200)
    assert (np.flatnonzero(weights[0]["scored"]["rows"] < 200) == frequent).all()

    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "draft")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "8")
    for vocabulary in (None, 100):
        with pytest.raises(UserError, match=rf": loss\.vocabulary is 200 there and {vocabulary} here; "):
            train(runs.changed(config, loss__vocabulary=vocabulary), data, tmp_path / "again")
    train(config, data, tmp_path / "again")
    assert "going on after step 4" in capsys.readouterr().err
    assert runs.metrics(tmp_path / "again") == lines
    assert runs.bits(tmp_path / "again", 8) == runs.bits(tmp_path / "run", 8)
    with pytest.raises(
        UserError, match=r"^--loss\.vocabulary: 265, and the target has 264 tokens; 264 or fewer is right$"
    ):
        train(runs.changed(config, loss__vocabulary=265), data, tmp_path / "other")
