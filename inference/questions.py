"""What a benchmark asks: the rows of a file, or of a public data set in the reference's words."""

import dataclasses
import gzip
import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from convert import rows
from dflash_jax.errors import UserError, check
from inference import prompts
from inference.prompts import Prompt

ROW = '{"prompt": "…"}, {"messages": […]}, {"prompt_ids": […]}, {"question": "…"} or {"turns": ["…", …]}'
GZIP = b"\x1f\x8b"
# The reference asks the first N of a set in this order; the same N are asked here.
ORDER = 42
MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n%s\n```"
CONTEST = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n%s\n\n### Format: %s\n```python\n%s\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)
CONTEST_FILES = [
    f"hf://datasets/livecodebench/code_generation_lite/test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)
]


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and what is said after each of the model's own answers but the last."""

    first: Prompt
    later: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NamedSet:
    """A data set of the hub: what `datasets.load_dataset` is called with, and how a row becomes the user's turns."""

    place: tuple[str, ...]
    options: dict[str, Any]
    turns: Callable[[dict[str, Any]], list[str]]


def _problem(row: dict[str, Any]) -> list[str]:
    return [row["problem"] + MATH]


def _instruction(row: dict[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _contest(row: dict[str, Any]) -> list[str]:
    starter = row["starter_code"]
    form = "Use the following code structure:" if starter else "Write your code in the following format:"
    return [CONTEST % (row["question_content"], form, starter or "# YOUR CODE HERE")]


TEST, TRAIN = {"split": "test"}, {"split": "train"}
NAMED = {
    "gsm8k": NamedSet(("openai/gsm8k", "main"), TEST, lambda row: [row["question"] + MATH]),
    "math500": NamedSet(("HuggingFaceH4/MATH-500",), TEST, _problem),
    "aime24": NamedSet(("HuggingFaceH4/aime_2024",), TRAIN, _problem),
    "aime25": NamedSet(("MathArena/aime_2025",), TRAIN, _problem),
    "humaneval": NamedSet(("openai/openai_humaneval",), TEST, lambda row: [CODE % row["prompt"]]),
    "mbpp": NamedSet(("google-research-datasets/mbpp", "sanitized"), TEST, lambda row: [row["prompt"]]),
    "livecodebench": NamedSet(("json",), {"data_files": CONTEST_FILES, **TRAIN}, _contest),
    "mt-bench": NamedSet(("HuggingFaceH4/mt_bench_prompts",), TRAIN, lambda row: row["prompt"]),
    "alpaca": NamedSet(("tatsu-lab/alpaca",), TRAIN, _instruction),
}


def check_name(data: str) -> Path | None:
    """Refuse what `read` would not find, before anything is fetched; return the file, where it is one.

    Raises:
        UserError: no named set and no file.
    """
    name, _, file = data.partition("=")
    if name in NAMED and not file:
        return None
    path = Path(file if name in NAMED else data)
    check(
        path.is_file(),
        f"--data {data}: no such file or set; a JSONL file, or one of {', '.join(NAMED)}, is right",
    )
    return path


def read(data: str, most: int | None = None) -> list[Question]:
    """Read what `--data` names: FILE, NAME, or NAME=FILE, a file of a named set's own rows.

    Rows of a FILE are asked as they are, in their order; those of a named set in the reference's words and order. Files
    may be gzipped.

    Args:
        data: what was named.
        most: how many to take, from the first on.

    Raises:
        UserError: `datasets` is not installed, the hub cannot be reached, a file that cannot be read or is empty, or a
            row that is not right.
    """
    check_name(data)
    name, _, file = data.partition("=")
    if name in NAMED:
        rows = list(_file_rows(file) if file else _hub_rows(name))
        random.Random(ORDER).shuffle(rows)
        questions = [_named(name, row, where) for where, row in rows[:most]]
    else:
        questions = [_given(row, where) for where, row in itertools.islice(_file_rows(data), most)]
    check(bool(questions), f"--data {data}: empty; a row {ROW} for each prompt is right")
    return questions


def _file_rows(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a JSONL file, each after its place; blank lines are none."""
    try:
        content = Path(file).read_bytes()
        content = gzip.decompress(content) if content.startswith(GZIP) else content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--data {file}: cannot be read ({reason}); a JSONL file is right") from error
    lines = rows.lines(content, file)
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, rows.read_row(line, where, ROW)


def _hub_rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a named set, each after its place."""
    instead = f"or --data {name}=FILE.jsonl, its rows in a file, is right"
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"--data {name}: needs a library; `pip install datasets`, {instead}") from error
    chosen = NAMED[name]
    try:
        rows = datasets.load_dataset(*chosen.place, **chosen.options)
    except Exception as error:  # of its own, of the hub's client, or of the network's
        raise UserError(
            f"--data {name}: cannot be fetched from the hub ({error or type(error).__name__}); a network that reaches "
            f"huggingface.co, {instead}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{name}, row {number}", row


def _named(name: str, row: dict[str, Any], where: str) -> Question:
    try:
        turns = NAMED[name].turns(row)
    except (KeyError, TypeError) as error:
        raise UserError(f"{where}: no row of {name} ({error!r}); the fields of the set on the hub are right") from error
    return _turns(turns, where)


def _given(row: dict[str, Any], where: str) -> Question:
    forms = [form for form in (*prompts.FORMS, "question", "turns") if form in row]
    check(len(forms) == 1, f"{where}: {' and '.join(forms) or 'no prompt'}; a row {ROW} is right")
    if forms == ["turns"]:
        return _turns(row["turns"], where)
    if forms == ["question"]:
        return Question(prompts.check_text(row["question"], where, "question"))
    return Question(prompts.from_row(row, where))


def _turns(turns: Any, where: str) -> Question:
    listed = isinstance(turns, list) and bool(turns)
    check(listed, f"{where}: turns is no list of texts; one or more, each a text, are right")
    first, *later = (prompts.check_text(turn, where, f"turns[{i}]") for i, turn in enumerate(turns))
    return Question(first, tuple(str(prompt.text) for prompt in later))
