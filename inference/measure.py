"""The same prompts answered with and without the draft, in turns, and timed."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from convert.progress import Watch, quiet, tell
from dflash_jax.errors import UserError
from inference import prompts
from inference.engine import Engine, Generation, SamplingConfig
from inference.flags import flags_named
from inference.prompts import Prompt
from inference.questions import Question
from inference.text import text_of

# Prompts that the batch answers before the other way has its turn: of several rows, some idle at the end of a turn, so
# that more than one answer a row is right.
ANSWERS_A_ROW = 4


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt answered without the draft and with it.

    `turn` counts the user's messages of a row from 1; `said` is that message, None where a row gives token ids.
    """

    where: str
    turn: int
    said: str | None
    prompt: list[int]
    plain: Generation
    drafted: Generation


@dataclasses.dataclass(frozen=True)
class Measured:
    """All answers of one combination, and the seconds that decoding took in each way.

    Those are wall-clock seconds around `Engine.generate` less the seconds of every row's prefill. With several rows
    this is the time of the whole batch: the sum of `Generation.decode_seconds` would count it once for each row, and
    each row's own holds the prefills of those admitted meanwhile.
    """

    pairs: list[Pair]
    plain_seconds: float
    drafted_seconds: float


@dataclasses.dataclass
class _Dialogue:
    """A question on its way through its turns."""

    question: Question
    prompt: list[int]
    turn: int = 1
    answers: list[str] = dataclasses.field(default_factory=list)

    def pair(self, plain: Generation, drafted: Generation) -> Pair:
        """Return the turn, answered both ways."""
        first = self.question.first
        said = first.messages[-1].get("content") if first.messages else first.text
        if self.turn > 1:
            said = self.question.later[self.turn - 2]
        return Pair(first.where, self.turn, said, self.prompt, plain, drafted)


@dataclasses.dataclass(frozen=True)
class Asking:
    """How questions become token ids and answers, the same for every combination of a command but for the sampling."""

    tokenizer: Any
    thinking: bool
    sampling: SamplingConfig

    def first(self, question: Question) -> list[int]:
        """Return the token ids of a question's first turn."""
        return prompts.encode(question.first, self.tokenizer, thinking=self.thinking)

    def next(self, dialogue: _Dialogue, answer: Generation) -> list[int]:
        """Return the token ids of a dialogue's next turn, asked after the model's own answers."""
        dialogue.answers.append(text_of(answer, self.tokenizer))
        asked = dialogue.question.first
        messages = list(asked.messages or [{"role": "user", "content": asked.text}])
        for said, follows in zip(dialogue.answers, dialogue.question.later, strict=False):
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": follows}]
        return prompts.encode(Prompt(asked.where, messages=messages), self.tokenizer, thinking=self.thinking)


def measure(
    engines: Sequence[Engine], questions: Sequence[Question], asking: Asking, rows: int, watch: Watch = quiet
) -> list[Measured]:
    """Answer the questions without the draft and with each engine's, by turns, so that a busy machine slows all alike.

    Args:
        engines: one a block size, each with the same pair and `rows` rows; the first decodes without the draft, too.
        questions: what is asked. A later turn is asked after the answer given without the draft; one that has no room
            is left out, and told.
        asking: how.
        rows: answers at a time.
        watch: follows the groups of prompts as they are answered, for a display of progress.

    Returns:
        What was measured of each engine, in their order; all share the measurement without the draft.
    """
    for engine, speculate in _ways(engines):
        engine.warm_up(speculate)
    dialogues = [_Dialogue(question, asking.first(question)) for question in questions]
    size = rows if rows == 1 else rows * ANSWERS_A_ROW
    seconds = [0.0] * (1 + len(engines))
    pairs: list[list[Pair]] = [[] for _ in engines]
    while dialogues:
        groups = [dialogues[start : start + size] for start in range(0, len(dialogues), size)]
        dialogues = []
        for group in watch(groups, len(groups), "answering"):
            answers, taken = _all_ways(engines, [dialogue.prompt for dialogue in group], asking.sampling)
            seconds = [one + more for one, more in zip(seconds, taken, strict=True)]
            for dialogue, plain, *drafted in zip(group, *answers, strict=True):
                for kept, answer in zip(pairs, drafted, strict=True):
                    kept.append(dialogue.pair(plain, answer))
                dialogues += _following(dialogue, plain, engines[0], asking)
    return [Measured(kept, seconds[0], its) for kept, its in zip(pairs, seconds[1:], strict=True)]


def check_questions(engine: Engine, questions: Sequence[Question], asking: Asking) -> None:
    """Refuse questions that cannot be asked, before any is.

    Raises:
        UserError: one whose first turn has no room, or cannot be rendered, named by where it was given.
    """
    for question in questions:
        _check(engine, asking.first(question), asking, question.first.where)


def _check(engine: Engine, prompt: list[int], asking: Asking, where: str) -> None:
    with flags_named(where):
        engine.check_prompt(prompt, asking.sampling, where)


def decoding(
    engine: Engine, asked: Sequence[Sequence[int]], sampling: SamplingConfig, speculate: bool
) -> tuple[list[Generation], float]:
    """Answer prompts, and return the answers and the wall-clock seconds that they took, all prefills left out."""
    began = time.perf_counter()
    answers = engine.generate(asked, sampling, speculate)
    seconds = time.perf_counter() - began
    return answers, seconds - sum(answer.prefill_seconds for answer in answers)


def _ways(engines: Sequence[Engine]) -> list[tuple[Engine, bool]]:
    """Return who answers, and whether with the draft: first the way without it, then each engine's with it."""
    return [(engines[0], False), *((engine, True) for engine in engines)]


def _all_ways(
    engines: Sequence[Engine], asked: Sequence[Sequence[int]], sampling: SamplingConfig
) -> tuple[list[list[Generation]], list[float]]:
    timed = [decoding(engine, asked, sampling, speculate) for engine, speculate in _ways(engines)]
    return [answers for answers, _ in timed], [seconds for _, seconds in timed]


def _following(dialogue: _Dialogue, answer: Generation, engine: Engine, asking: Asking) -> list[_Dialogue]:
    """Return the dialogue with its next turn, or nothing where there is none, or no room for it."""
    if dialogue.turn > len(dialogue.question.later):
        return []
    turn = dialogue.turn + 1
    prompt = asking.next(dialogue, answer)
    try:
        _check(engine, prompt, asking, f"{dialogue.question.first.where}, turn {turn}")
    except UserError as error:
        tell(f"left out: {error}")
        return []
    return [dataclasses.replace(dialogue, prompt=prompt, turn=turn)]
