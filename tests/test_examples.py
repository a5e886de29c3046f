"""Every example runs, and prints what it promises."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.demo_target import WHEEL
from dflash_jax.errors import UserError
from tests import pair
from tests.test_chats import PLAIN

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "colab.ipynb").read_text())
# The tiny pair's draft taps one layer, and its mask is no token of its tokenizer.
TINY = ["--train.steps", "2", "--draft.layers", "1", "--draft.taps", "1", "--draft.mask-token-id", str(pair.MASK)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(pair.write_target(tmp_path_factory.mktemp("pair") / "target", PLAIN))


@functools.cache
def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_sampling_answers_alike_with_and_without_the_draft(target, draft, capsys):
    # The answer's tokens have a probability of 0.17, all others of 0.003.
    load("own_sampling").main(["--ckpt", target, "--draft", draft, "--prompt", "?", "--min-p", "0.1"])
    assert capsys.readouterr().out == (
        f"> ?\n{pair.ANSWER}\n\n"
        "With the draft: 12 tokens in 10 blocks, acceptance length 1.10.\n"
        "Without it: the same tokens, in 11 passes of the target.\n"
    )


def test_own_sampling_is_the_same_where_every_token_may_come(target, draft, capsys):
    example, told = load("own_sampling"), []
    for seed in ("3", "4"):
        asked = ["--min-p", "0.01", "--seed", seed, "--max-new-tokens", "24"]
        example.main(["--ckpt", target, "--draft", draft, "--prompt", "?", *asked])
        told.append(capsys.readouterr().out)
    assert all("Without it: the same tokens, in 23 passes" in out for out in told)
    assert told[0] != told[1]


def test_own_sampling_ends_with_its_first_token_where_one_is_asked_for(target, draft, capsys):
    asked = ["--ckpt", target, "--draft", draft, "--prompt", "?", "--max-new-tokens", "1"]
    load("own_sampling").main(asked)
    assert capsys.readouterr().out == (
        "> ?\nZ\n\nWith the draft: 1 tokens in 0 blocks.\nWithout it: the same tokens, in 0 passes of the target.\n"
    )


def test_min_p_keeps_what_is_likely_enough_and_its_law():
    example = load("own_sampling")
    rule = example.MinP(jnp.float32(2.0), jnp.float32(0.1), jax.random.key(0))
    # At temperature 2: 1, 0.5, 0.09 of the likeliest.
    logits = jnp.broadcast_to(2 * jnp.log(jnp.asarray([1.0, 0.5, 0.09])), (1, 4000, 3))
    chosen = np.asarray(example.choose(rule, logits, jnp.arange(4000)[None]))
    np.testing.assert_allclose(np.bincount(chosen[0], minlength=3) / 4000, [2 / 3, 1 / 3, 0], atol=0.03)


def test_tapped_features_are_those_of_the_layers(target, capsys):
    # No layer of this target adds anything: each shows the embedding, a 1 in one of 16 places.
    load("tap_features").main(["--ckpt", target, "--text", "Zwö", "--taps", "0", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 tokens, hidden size 16, 2 taps: features (1, 4, 32)"
    assert lines[3:5] == [
        "    0    0.25        0.00    100%  'l'",
        "    2    0.25        0.00    100%  'l'",
    ]


def test_a_layer_that_is_not_there_is_refused(target):
    with pytest.raises(UserError, match=r"^--taps: 4; the target's layers are 0 to 3$"):
        load("tap_features").main(["--ckpt", target, "--taps", "1", "4"])


def test_training_on_chats_ends_with_an_answer(target, tmp_path, capsys):
    chats = tmp_path / "chats.jsonl"
    example = load("train_on_chats")
    chats.write_text("".join(json.dumps(chat) + "\n" for chat in example.chats(20)))
    example.main([str(chats), "--target", target, "--output", str(tmp_path / "kept"), *TINY])
    out = capsys.readouterr().out
    assert "20 rows, 20 documents" in out
    assert "a draft trained for 2 steps" in out
    assert "acceptance length" in out
    assert out.splitlines()[-1] == pair.ANSWER
    assert (tmp_path / "kept" / "run" / "draft" / "model.safetensors").is_file()


def test_training_on_no_chats_of_ones_own_takes_sums():
    [first, *rest] = load("train_on_chats").chats(60)
    assert [message["content"] for message in first["messages"]] == [
        "What is 10 plus 3?",
        "We add 3 to 10: 10 + 3 = 13. The answer is 13.",
    ]
    assert len(rest) == 59


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("own_sampling", ["--min-p", "2"], "--min-p: 2.0; a number over 0 and up to 1 is right"),
        ("tap_features", ["--taps", "x"], "argument --taps: 'x'; a whole number of 0 or more is right"),
        ("train_on_chats", ["none.jsonl", "--target", "T"], "--data none.jsonl: no such file"),
    ],
)
def test_faults_end_in_one_line(name, arguments, fault):
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {fault}")


def cells():
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_one_without_outputs():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert set(NOTEBOOK) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    code = {"cell_type", "id", "metadata", "source", "execution_count", "outputs"}
    keys = {"markdown": {"cell_type", "id", "metadata", "source"}, "code": code}
    for cell in NOTEBOOK["cells"]:
        assert set(cell) == keys[cell["cell_type"]]
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)


def test_the_notebook_installs_the_demos_target():
    assert f"%pip install -q --no-deps {WHEEL}\n" in cells()[0] + "\n"


def test_the_notebooks_cells_run_in_order(target, draft, capsys):
    _, *rest = cells()
    script = "\n".join(rest)
    shorter = {
        "str(find_demo_target()), str(DEMO_DRAFT)": f"{target!r}, {draft!r}",
        "range(60)": "range(20)",
        '"--train.steps", "40"': ", ".join(f'"{word}"' for word in TINY),
    }
    for printed, changed in shorter.items():
        assert printed in script
        script = script.replace(printed, changed)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "colab.ipynb", "exec"), names)
    out = capsys.readouterr().out
    assert f"{pair.ANSWER}\n" in out
    assert "The tokens are the same." in out
    assert "acceptance length 1.10" in out
    assert "a draft trained for 2 steps" in out
    assert names["answer"].token_ids == pair.ANSWER_IDS
    drawn = names["drawing"]._repr_html_()
    assert drawn.count("border: 1px") == 1 + len(pair.EMITTED)
    assert re.findall(rf"background: {names['KEPT']}\">(.)<", drawn) == ["l"]
    assert drawn.count(names["OWN"]) == len(pair.ANSWER_IDS) - 1


def test_the_readme_shows_every_example():
    there = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".ipynb")}
    readme = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"\]\(([\w.]+)\)", readme)) == there
    assert WHEEL in readme
