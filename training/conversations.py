"""Chats whose answers are to be given anew, from the rows of a JSONL file."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert import rows
from dflash_jax.errors import UserError, check
from inference import prompts
from inference.prompts import Prompt
from training.chats import from_sharegpt

ROW = '{"messages": […]}, {"conversations": […]}, {"prompt": "…"}, {"question": "…"} or {"prompt_ids": […]}'
Message = dict[str, Any]


@dataclasses.dataclass
class Conversation:
    """A row on its way through its turns.

    `ahead` holds what is said before each answer that is still to come. A prompt of token ids has one turn, and no
    messages. `history` ends with what the next answer answers, or with the last answer.
    """

    line: int
    where: str
    ahead: list[list[Message]]
    ids: list[int] | None = None
    turn: int = 0
    history: list[Message] = dataclasses.field(default_factory=list)

    def ask(self) -> Prompt:
        """Go on to the next turn, and return what is to be answered."""
        self.history += self.ahead.pop(0)
        self.turn += 1
        return Prompt(self.where, ids=self.ids) if self.ids else Prompt(self.where, messages=self.history)

    def hear(self, answer: str) -> None:
        """Take the turn's answer into the history of those that follow."""
        self.history.append({"role": "assistant", "content": answer})


def read(name: str, most: int | None = None) -> Iterator[Conversation]:
    """Read the rows of a file one at a time, the first `most` of them; blank lines are none.

    Raises:
        UserError: a file that cannot be read, or a row that is not right, named by its line.
    """
    check(Path(name).is_file(), f"--data {name}: no such file; a JSONL file is right")
    try:
        with open(name, "rb") as lines:
            filled = ((number, line) for number, line in enumerate(lines, 1) if line.removeprefix(rows.BOM).strip())
            for number, line in itertools.islice(filled, most):
                where = f"{name}, line {number}"
                yield _conversation(rows.utf8(line.removeprefix(rows.BOM), where), number, where)
    except OSError as error:
        raise UserError(f"--data {name}: cannot be read ({error.strerror}); a JSONL file is right") from error


def _conversation(line: str, number: int, where: str) -> Conversation:
    """Read a row. Of several forms, as data sets have them side by side, a chat comes before a text, and ids last."""
    row = rows.read_row(line, where, ROW)
    if "messages" in row:
        return Conversation(number, where, _turns(rows.check_messages(row["messages"], where)))
    if "conversations" in row:
        return Conversation(number, where, _turns(from_sharegpt(row["conversations"], where)))
    for name in ("prompt", "question"):
        if name in row:
            prompt = prompts.check_text(row[name], where, name)
            return Conversation(number, where, [[{"role": "user", "content": prompt.text}]])
    check("prompt_ids" in row, f"{where}: no prompt; a row {ROW} is right")
    return Conversation(number, where, [[]], prompts.check_ids(row["prompt_ids"], where))


def _turns(messages: list[Message]) -> list[list[Message]]:
    """Cut a chat into what is said before each answer, without the answers that it has.

    Calls of tools are kept, since what tools said cannot be had anew; so nothing is asked where one was called.
    """
    kept = [message for message in messages if message["role"] != "assistant" or message.get("tool_calls")]
    turns: list[list[Message]] = [[]]
    for message, following in itertools.zip_longest(kept, kept[1:]):
        turns[-1].append(message)
        if message["role"] in ("user", "tool") and (following is None or following["role"] in ("user", "system")):
            turns.append([])
    return turns[:-1]  # what follows the last user is not answered
