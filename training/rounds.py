"""Answers to many conversations: chunk by chunk, and in a chunk turn by turn, each written when its turn comes."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from convert.progress import tell
from dflash_jax.errors import UserError, check
from inference import prompts, results
from inference.engine import Generation
from inference.results import ResultsFile
from inference.text import text_of
from training.conversations import Conversation

# Conversations that are in memory at a time. Another number would number another run's samples and lines differently.
CHUNK = 4096
FIELDS = ("line", "turn", "asked", "response_ids", "finish_reason")
# Takes prompts, a seed, and how many prompts, from the first on, are answered already; yields the answers to the rest.
Answer = Callable[[Sequence[Sequence[int]], int, int], Iterator[Generation]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What every answer follows from, beside its prompt. `settings` are those that stand in every line."""

    target: str
    tokenizer: Any
    settings: dict[str, Any]
    max_new_tokens: int
    max_length: int
    seed: int
    thinking: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """A turn of a conversation that waits for its answer."""

    conversation: Conversation
    ids: list[int]
    asked: str


@dataclasses.dataclass
class Tally:
    """What the answers of a file come to; blocks and seconds are those of this run."""

    answers: int = 0
    tokens: int = 0
    stopped: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    blocks: int = 0
    emitted: int = 0
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, answer: Generation) -> None:
        """Count an answer."""
        self.answers += 1
        self.tokens += len(answer.token_ids)
        self.stopped += answer.finish_reason == "stop"

    def add_new(self, answer: Generation) -> None:
        """Count an answer that this run gave."""
        self.add(answer)
        self.new_tokens += len(answer.token_ids)
        self.blocks += len(answer.emitted_per_block)
        self.emitted += sum(answer.emitted_per_block)


class Rounds:
    """Asks for the answers of conversations, and writes them into a file that is its own record of progress.

    Lines come by chunk, turn and row. Those that are there already are checked against what would be asked, and heard
    instead of asked for. A prompt that is too long, or that the chat template cannot render, ends its conversation;
    since that follows from the input alone, a later run skips the same ones.
    """

    def __init__(self, job: Job, answer: Answer, file: ResultsFile) -> None:
        self._job, self._answer, self._file = job, answer, file
        self._kept = file.lines(FIELDS[0])
        self.tally = Tally()

    def run(self, conversations: Iterable[Conversation]) -> Iterator[Generation]:
        """Answer them, yielding each new answer after it is written.

        Chunks differ in their seed: numbers that answers are sampled by count how often a prompt came, in its chunk.

        Raises:
            UserError: lines in the file that answer something else, or no room for more.
        """
        waiting = iter(conversations)
        for number in itertools.count():
            chunk = list(itertools.islice(waiting, CHUNK))
            if not chunk:
                break
            while requests := [it for it in map(self._request, chunk) if it]:
                yield from self._round(requests, (self._job.seed + number) % 2**32)
        for where, _ in self._kept:
            raise UserError(f"{where}: only {self.tally.answers} answers are asked for; the first run's are right")

    def _request(self, conversation: Conversation) -> Request | None:
        if not conversation.ahead:
            return None
        prompt, job = conversation.ask(), self._job
        try:
            ids = list(prompts.encode(prompt, job.tokenizer, thinking=job.thinking))
        except UserError as error:
            self._skip(conversation, "prompts that the chat template cannot render", str(error))
            return None
        room = job.max_length - job.max_new_tokens
        if len(ids) > room:
            why = f"{conversation.where}: {len(ids)} tokens; --max-length leaves room for {room}"
            self._skip(conversation, "prompts too long for --max-length", why)
            return None
        return Request(conversation, ids, results.digest(ids, job.target, conversation.line, conversation.turn))

    def _skip(self, conversation: Conversation, reason: str, why: str) -> None:
        if reason not in self.tally.skipped:
            tell(f"skipping {reason}, the first of them {why}")
        self.tally.skipped[reason] += 1 + len(conversation.ahead)
        conversation.ahead.clear()

    def _round(self, requests: list[Request], seed: int) -> Iterator[Generation]:
        done = 0
        for request, (where, line) in zip(requests, self._kept, strict=False):
            answer = self._read(request, line, where)
            self.tally.add(answer)
            self._settle(request, answer)
            done += 1
        if done == len(requests):
            return
        answers = self._answer([request.ids for request in requests], seed, done)
        began = time.perf_counter()
        for request, answer in zip(requests[done:], answers, strict=True):
            said = self._settle(request, answer)
            self._file.write(self._record(request, answer, said))
            self.tally.add_new(answer)
            yield answer
        self.tally.seconds += time.perf_counter() - began

    def _read(self, request: Request, line: bytes, where: str) -> Generation:
        found = results.read_result(line, where, FIELDS, self._job.settings)
        ids, finish_reason = found["response_ids"], found["finish_reason"]
        check(isinstance(ids, list) and all(type(i) is int for i in ids), f"{where}: {results.NO_RESULT}")
        place = {"line": request.conversation.line, "turn": request.conversation.turn}
        for name, value in place.items():
            check(found[name] == value, f"{where}: {name} is {found[name]!r} there and {value} here; the same is right")
        check(
            found["asked"] == request.asked,
            f"{where}: it answers another prompt than line {place['line']} of --data, or another target; the first "
            "run's are right",
        )
        return Generation(ids, [], [], finish_reason, 0.0, 0.0)

    def _settle(self, request: Request, answer: Generation) -> dict[str, Any]:
        """Let the conversation hear the answer, and return what was said, as a line has it."""
        tokenizer = self._job.tokenizer
        text = None if tokenizer is None else text_of(answer, tokenizer)
        if text is None or request.conversation.ids:
            return {"text": text}
        request.conversation.hear(text)
        return {"messages": request.conversation.history}

    def _record(self, request: Request, answer: Generation, said: dict[str, Any]) -> dict[str, Any]:
        conversation = request.conversation
        return {
            "line": conversation.line,
            "turn": conversation.turn,
            **said,
            "prompt_ids": request.ids,
            "response_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "asked": request.asked,
            **self._job.settings,
        }
