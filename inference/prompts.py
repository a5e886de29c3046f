"""Prompts as users give them: text, chats or token ids, from the command line, a JSONL file or standard input."""

import dataclasses
from pathlib import Path
from typing import Any, BinaryIO

from convert import rows
from convert.rows import spoken, utf8
from dflash_jax.errors import UserError, check

FORMS = ("prompt", "messages", "prompt_ids")
ROW = '{"prompt": "…"}, {"messages": […]} or {"prompt_ids": […]}'


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt in one of its three forms, and the place where it was given, which errors name.

    `text` becomes the only message of a chat, unless it is taken raw; `messages` are a chat up to the answer; `ids` are
    used as they are.
    """

    where: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None


def from_text(text: str, where: str) -> Prompt:
    """Take a prompt's text.

    Raises:
        UserError: nothing but white space, or what is no text in UTF-8.
    """
    check(bool(text.strip()), f"{where}: empty; some text is needed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not valid UTF-8 text (character {error.start + 1})") from error
    return Prompt(where, text=text)


def from_stream(stream: BinaryIO, *, raw: bool) -> Prompt:
    """Read one prompt from standard input. Unless it is taken raw, the newline at its end is not part of it.

    Raises:
        UserError: as `from_text`.
    """
    where = "standard input"
    text = utf8(stream.read(), where)
    return from_text(text if raw else text.removesuffix("\n").removesuffix("\r"), where)


def from_file(name: str) -> list[Prompt]:
    """Read a JSONL file, a prompt a row; blank lines are skipped, and keys that are no form of prompt ignored.

    Raises:
        UserError: a file that cannot be read or has no rows, or a row that is not right, named by its line.
    """
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror}); a JSONL file of prompts is right") from error
    lines = rows.lines(content, name)
    numbered = ((f"{name}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
    prompts = [from_row(rows.read_row(line, where, ROW), where) for where, line in numbered]
    check(bool(prompts), f"{name}: empty; a row {ROW} for each prompt is right")
    return prompts


def encode(prompt: Prompt, tokenizer: Any, *, raw: bool = False, thinking: bool = False) -> list[int]:
    """Return a prompt's token ids.

    Args:
        prompt: what was given; ids are returned as they are, and need no tokenizer.
        tokenizer: a transformers tokenizer.
        raw: tokenize text as it is, with the special tokens that the tokenizer itself adds; no chat template.
        thinking: what the chat template is told of it; templates without such a switch do not look.

    Raises:
        UserError: no chat template, one that refuses the messages, or messages taken raw.
    """
    if prompt.ids is not None:
        return prompt.ids
    if not raw:
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        return _render(messages, tokenizer, thinking, prompt.where)
    if prompt.text is None:
        raise UserError(f"{prompt.where}: messages need the chat template; leave out --raw, or give text")
    ids: list[int] = tokenizer(prompt.text)["input_ids"]
    return ids


def has_thinking_switch(tokenizer: Any) -> bool:
    """Say whether the chat template looks at what it is told of thinking."""
    return "enable_thinking" in str(tokenizer.chat_template)


def _render(messages: list[dict[str, Any]], tokenizer: Any, thinking: bool, where: str) -> list[int]:
    check(
        bool(tokenizer.chat_template),
        f"{where}: the checkpoint's tokenizer has no chat template; --raw takes text as it is",
    )
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, add_generation_prompt=True, enable_thinking=thinking
        )
    except Exception as error:  # a template is a program, and may raise anything
        raise UserError(f"{where}: the chat template cannot render it ({error})") from error
    return ids


def from_row(row: dict[str, Any], where: str) -> Prompt:
    """Take the prompt of a JSONL file's row.

    Raises:
        UserError: none of the forms, more than one, or one that is not right.
    """
    forms = [form for form in FORMS if form in row]
    check(len(forms) == 1, f"{where}: {' and '.join(forms) or 'no prompt'}; one of {', '.join(FORMS)} is right")
    form, value = forms[0], row[forms[0]]
    if form == "prompt":
        return check_text(value, where)
    if form == "messages":
        messages = rows.check_messages(value, where)
        last = messages[-1]["role"]
        check(last != "assistant", f"{where}: the last message is an answer; one to be answered is right")
        return Prompt(where, messages=messages)
    return Prompt(where, ids=check_ids(value, where))


def check_ids(value: Any, where: str) -> list[int]:
    """Return what a row has for `prompt_ids`, if that is what it is.

    Raises:
        UserError: it is no list of token ids.
    """
    check(
        isinstance(value, list) and bool(value) and all(type(i) is int and abs(i) < 2**31 for i in value),
        f"{where}: prompt_ids is {spoken(value)}; a list of token ids, one or more, is right",
    )
    return list(value)


def check_text(value: Any, where: str, name: str = "prompt") -> Prompt:
    """Return the prompt that a row gives as a text, under the key `name`.

    Raises:
        UserError: it is no text, or as `from_text`.
    """
    check(isinstance(value, str), f"{where}: {name} is {spoken(value)}; a text is right")
    return from_text(value, where)
