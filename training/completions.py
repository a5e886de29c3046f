"""What is asked of a server for an answer, and what its replies mean in token ids."""

import collections
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

from convert.progress import tell
from dflash_jax.errors import UserError, check
from inference.engine import Generation, SamplingConfig, numbered
from training.endpoint import Endpoint

# Answers, for each that is asked for at a time, that may wait for a longer one before them.
AHEAD = 8


class Completions:
    """Answers of a server that serves the target, in the order of the prompts."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        sampling: SamplingConfig,
        stops: Sequence[int],
        tokenizer: Any,
        concurrency: int,
    ) -> None:
        self._endpoint, self._tokenizer, self._concurrency = endpoint, tokenizer, concurrency
        self._stops, self._closing = stops, closing_stop(stops, tokenizer)
        self._tokenized = False
        # All of what vLLM and SGLang would else take from the checkpoint's generation config is told.
        self._body = {
            "model": model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(stops),
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    def answer(self, prompts: Sequence[Sequence[int]], seed: int, skip: int) -> Iterator[Generation]:
        """Answer the prompts after the first `skip`, several at a time.

        Raises:
            UserError: a server that does not answer, or whose answers are none of the target.
        """
        # Its threads are daemons: leaving does not wait for answers that nobody will read.
        with ThreadPool(self._concurrency) as pool:
            waiting: collections.deque[AsyncResult[Generation]] = collections.deque()
            for prompt in itertools.islice(numbered(prompts), skip, None):
                waiting.append(pool.apply_async(self._complete, (prompt.tokens, prompt.number, seed)))
                if len(waiting) == AHEAD * self._concurrency:
                    yield waiting.popleft().get()
            while waiting:
                yield waiting.popleft().get()

    def _complete(self, prompt: Sequence[int], number: int, seed: int) -> Generation:
        name = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=4).digest()
        own = {"prompt": list(prompt), "seed": int.from_bytes(name, "little") >> 1}
        choice = self._endpoint.complete(self._body | own)
        reason = choice.get("finish_reason")
        check(
            reason in ("stop", "length"),
            f"--endpoint: an answer whose finish_reason is {reason!r}; a server that ends answers by stop or length "
            "is right",
        )
        ids = self._ids(choice)
        if reason == "stop" and (not ids or ids[-1] not in self._stops):
            ids = [*ids, self._closing]
        check(bool(ids), "--endpoint: an answer of nothing; a token or more is right")
        return Generation(ids, [], [], reason, 0.0, 0.0)

    def _ids(self, choice: dict[str, Any]) -> list[int]:
        ids = choice.get("token_ids")
        if isinstance(ids, list) and all(type(i) is int for i in ids):
            return ids
        text = choice.get("text")
        if not isinstance(text, str) or self._tokenizer is None:
            raise UserError(
                "--endpoint: a reply without token_ids; a server that knows return_token_ids, or a --target with a "
                "tokenizer, is right"
            )
        if not self._tokenized:
            self._tokenized = True
            tell("the server gives no token ids: its texts are tokenized again, which is not always what was emitted")
        tokenized: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenized


def closing_stop(stops: Sequence[int], tokenizer: Any) -> int:
    """Return the stop that ends answers: the last in a chat as the template renders it.

    Without a template, or where that has none, it is the tokenizer's own end, or else the first of the stops.
    """
    check(bool(stops), "--target: it has no stop tokens; a checkpoint that names eos_token_id is right")
    if tokenizer is None:
        return stops[0]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    rendered: Iterable[int] = ()
    if tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    found = [i for i in (tokenizer.eos_token_id, *rendered) if i in stops]
    return found[-1] if found else stops[0]
