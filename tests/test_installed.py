"""The package as `pip install` leaves it: its commands, and the wheel outside the checkout."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dflash_jax
from convert import cli
from convert.__main__ import main as convert_main
from dflash_jax.errors import UserError

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "dflash-generate": "inference.generate",
    "dflash-benchmark": "inference.benchmark",
    "dflash-demo": "inference.demo",
    "dflash-train": "training.run",
    "dflash-convert": "convert.__main__",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_its_module(name):
    [entry] = importlib.metadata.entry_points(group="console_scripts", name=name)
    assert entry.value == f"{COMMANDS[name]}:command"
    assert entry.load().__module__ == COMMANDS[name]


@pytest.mark.parametrize(
    ("called", "prog"), [("/bin/dflash-train", "dflash-train"), ("run.py", "python -m training.run")]
)
def test_help_and_faults_name_the_command_as_it_was_called(monkeypatch, capsys, called, prog):
    monkeypatch.setattr(sys, "argv", [called])
    parser = cli.Parser(prog="python -m training.run")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dflash-jax {dflash_jax.__version__}\n"
    with pytest.raises(UserError, match=f"`{prog} --help` shows what is right"):
        parser.parse_args(["--nothing-like-it"])


@pytest.mark.parametrize(
    ("called", "shown", "not_shown"),
    [
        ("/bin/dflash-convert", "dflash-convert to-hf my-draft-flax", "python -m convert"),
        ("__main__.py", "python -m convert to-hf my-draft-flax", "dflash-convert"),
    ],
)
def test_help_of_a_part_of_a_command_names_it_as_it_was_called(monkeypatch, capsys, called, shown, not_shown):
    monkeypatch.setattr(sys, "argv", [called])
    with pytest.raises(SystemExit):
        convert_main(["to-hf", "--help"])
    help_text = capsys.readouterr().out
    assert shown in help_text
    assert not_shown not in help_text
    assert "--version" not in help_text


def test_an_installed_command_completes_itself(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dflash-generate"])
    parser = cli.Parser(prog="python -m inference.generate")
    parser.add_argument("--temperature")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--print-completion", "bash"])
    assert ended.value.code == 0
    assert "--temperature" in capsys.readouterr().out


def test_the_changelog_knows_this_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == dflash_jax.__version__


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path):
    def pip(*arguments):
        subprocess.run([sys.executable, "-m", "pip", "-q", *map(str, arguments)], check=True)

    source = tmp_path / "source"  # a build leaves things behind
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("dflash_jax", "inference", "training", "convert", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "-w", tmp_path, source)
    [wheel] = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert {f"{name}/py.typed" for name in ("dflash_jax", "inference", "training", "convert")} <= set(files)
    assert not [file for file in files if file.startswith(("tests/", "benchmarks/", "docs/"))]
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", site, wheel)
    environment = os.environ | {"PYTHONPATH": str(site)}
    place = subprocess.run(
        [sys.executable, "-c", "import inference; print(inference.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(place.stdout.strip()).is_relative_to(site)
    for name in COMMANDS:
        run = [sys.executable, site / "bin" / name, "--help"]
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"usage: {name}")
