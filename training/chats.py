"""Chats to documents: token ids, and which of them the target would have emitted."""

import dataclasses
from typing import Any, NamedTuple

from convert.rows import check_messages, each, spoken
from dflash_jax.errors import UserError, check

CHATS = ("messages", "conversations")
IDS = ("prompt_ids", "response_ids")
ROW = '{"messages": […]}, {"conversations": […]} or {"prompt_ids": […], "response_ids": […]}'
# What ShareGPT's rows call them.
SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
}
Messages = list[dict[str, Any]]


class Document(NamedTuple):
    """Token ids, and for each whether it is one that the target answers with."""

    tokens: list[int]
    supervised: list[bool]


@dataclasses.dataclass(frozen=True)
class Language:
    """How a target reads and writes: a transformers tokenizer, its stops, its vocabulary, and whether it thinks."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    thinking: bool


def documents(row: dict[str, Any], where: str, language: Language) -> list[Document]:
    """Return the documents of a row: one, or more where the template renders earlier answers otherwise than later ones.

    Ids are taken as they are. In a chat each answer follows exactly the ids that decoding would be given to answer, and
    is supervised up to the token that closes it. What stands after the last answer is left out.

    Args:
        row: one row of a file of chats.
        where: its file and line, which errors name.
        language: the target's.

    Raises:
        UserError: a row that is not right, or one that the chat template cannot render as a prompt and its answer.
    """
    forms = [form for form in CHATS if form in row]
    if any(name in row for name in IDS):
        prompt, response = (_ids(row, name, where, language.vocab_size) for name in IDS)
        check(bool(response), f"{where}: response_ids is an empty list; one id or more is right")
        check(
            row.get("thinking", language.thinking) == language.thinking,
            f"{where}: answered with thinking {str(row.get('thinking')).lower()}, and prepared otherwise; "
            f"{'--no-thinking' if language.thinking else '--thinking'} is right",
        )
        return [_document(prompt, response)]
    check(len(forms) == 1, f"{where}: {' and '.join(forms) or 'no chat'}; a row {ROW} is right")
    read = check_messages if "messages" in row else from_sharegpt
    messages = read(row[forms[0]], where)
    made: list[Document] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        document = _document(*_turn(messages[: i + 1], f"{where}: {forms[0]}[{i}]", language))
        before = made[-1] if made else None
        if before and document.tokens[: len(before.tokens)] == before.tokens:
            document.supervised[: len(before.tokens)] = before.supervised
            made.pop()
        made.append(document)
    check(bool(made), f"{where}: no answer in it; a chat with an assistant's message is right")
    return made


def _document(prompt: list[int], response: list[int]) -> Document:
    return Document(prompt + response, [False] * len(prompt) + [True] * len(response))


def _turn(messages: Messages, where: str, language: Language) -> tuple[list[int], list[int]]:
    """Return the prompt of the last message, as decoding is given it, and the answer that it is."""
    check(len(messages) > 1, f"{where}: an answer to nothing; a message before it is right")
    prompt = _render(messages[:-1], where, language, to_be_answered=True)
    whole = _render(messages, where, language, to_be_answered=False)
    check(whole.startswith(prompt), f"{where}: {_why_no_continuation(messages, language)}")
    response = _tokenize(whole[len(prompt) :], where, language)
    closing = next((i for i, token in enumerate(response) if token in language.stop_token_ids), None)
    if closing is None:
        stops = ", ".join(map(str, language.tokenizer.convert_ids_to_tokens(list(language.stop_token_ids))))
        raise UserError(
            f"{where}: the chat template does not close the answer with a stop token of the target "
            f"({stops or 'it has none'}); a template that does is right"
        )
    return _tokenize(prompt, where, language), response[: closing + 1]


def _why_no_continuation(messages: Messages, language: Language) -> str:
    answer = messages[-1]
    if not language.thinking and (answer.get("reasoning_content") or "</think>" in (answer.get("content") or "")):
        return "an answer with reasoning, and --no-thinking; --thinking, or the answer alone, is right"
    if messages[-2]["role"] == "assistant":
        return "an answer after an answer, which the chat template does not continue; one message of both is right"
    return (
        "the chat template does not render the answer as a continuation of its prompt; a template that does, or "
        "prompt_ids and response_ids, is right"
    )


def _render(messages: Messages, where: str, language: Language, *, to_be_answered: bool) -> str:
    check(
        bool(language.tokenizer.chat_template),
        f"{where}: the target's tokenizer has no chat template; prompt_ids and response_ids need none",
    )
    try:
        # transformers takes misspelt arguments without a word, as variables of the template.
        text: str = language.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=to_be_answered, enable_thinking=language.thinking
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not valid UTF-8 text (half a surrogate pair); whole characters are right") from error
    except Exception as error:  # a template is a program, and may raise anything
        raise UserError(f"{where}: the chat template cannot render it ({error})") from error
    return text


def _tokenize(text: str, where: str, language: Language) -> list[int]:
    ids: list[int] = language.tokenizer(text, add_special_tokens=False)["input_ids"]
    check(
        max(ids, default=0) < language.vocab_size,
        f"{where}: token {max(ids, default=0)} of the tokenizer is not in the target's vocabulary of "
        f"{language.vocab_size}; the target's own tokenizer is right",
    )
    return ids


def _ids(row: dict[str, Any], name: str, where: str, vocab_size: int) -> list[int]:
    value = row.get(name)
    if not isinstance(value, list):
        raise UserError(f"{where}: {name} is {spoken(value)}; a list of token ids is right")
    for i, token in enumerate(value):
        check(
            type(token) is int and 0 <= token < vocab_size,
            f"{where}: {name}[{i}] is {spoken(token)}; a token id of the target, 0 to {vocab_size - 1}, is right",
        )
    return value


def from_sharegpt(value: Any, where: str) -> Messages:
    """Take a chat in ShareGPT's words; of those it has some without a message.

    Raises:
        UserError: what is no such chat.
    """
    messages: Messages = []
    if value == []:
        return messages
    for name, message in each(value, where, "conversations", '{"from": …, "value": …}'):
        speaker, text = message.get("from"), message.get("value")
        role = SPEAKERS.get(str(speaker))
        check(role is not None, f"{name}: from is {spoken(speaker)}; {', '.join(SPEAKERS)} are known")
        check(isinstance(text, str), f"{name}: value is {spoken(text)}; a text is right")
        messages.append({"role": role, "content": text})
    return messages
