"""The engine: token ids in, token ids out, over one set of weights and one device state."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import reprlib
import time
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from convert import LoadedDraft, LoadedTarget, load_draft, load_target
from dflash_jax import sharding
from dflash_jax.attention import PIECE
from dflash_jax.config import DraftConfig, TargetConfig, check_pair
from dflash_jax.errors import UserError, check
from dflash_jax.sampling import Policy
from inference import decode
from inference.block_sizes import candidates

# A chunk's cost should be near that of reading the weights once: more rows than that only pad short prompts.
PREFILL_CHUNK = {"cpu": 64}
PREFILL_CHUNK_ELSEWHERE = 256
# Beyond these, logits over the temperature leave what float32 tells apart.
COLDEST, HOTTEST = 1e-4, 1e4
BLOCKS_A_LOOK = 64
BLOCKS_A_LOOK_STREAMING = 4
# What sizes of blocks cost is measured with so much text before them, so many blocks at a time.
MEASURED_AT, BLOCKS_MEASURED, ROUNDS = 256, 4, 7
FINISH_REASONS = {decode.STOPPED: "stop", decode.FULL: "length"}


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """What is asked of an answer. Temperature 0 is greedy; `stop_token_ids` add to the checkpoint's own.

    Raises:
        UserError: a number out of its range, named.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, field)
            check(isinstance(value, Integral), f"{field}: {value!r}; a whole number is right")
        check(self.max_new_tokens >= 1, f"max_new_tokens: {self.max_new_tokens}; 1 or more is right")
        check(
            self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST,
            f"temperature: {self.temperature}; 0 (greedy), or a number from {COLDEST} to {HOTTEST}, is right",
        )
        check(0 < self.top_p <= 1, f"top_p: {self.top_p}; a number over 0 and up to 1 (no filter) is right")
        check(0 <= self.top_k < 2**31, f"top_k: {self.top_k}; 0 (no filter) or more is right")
        check(0 <= self.seed < 2**32, f"seed: {self.seed}; a whole number from 0 to {2**32 - 1} is right")


@dataclasses.dataclass(frozen=True)
class Generation:
    """An answer, or as much of it as there is: `finish_reason` is None until it ends.

    `token_ids` holds the stop token, too. `drafted` says of each token whether it was an accepted draft.
    `emitted_per_block` sums to one less than the tokens, since the first comes from the prefill; `block_sizes` are the
    slots of those blocks.
    """

    token_ids: list[int]
    drafted: list[bool]
    emitted_per_block: list[int]
    finish_reason: str | None
    prefill_seconds: float
    decode_seconds: float
    block_sizes: list[int] = dataclasses.field(default_factory=list)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a block; None where the first token ended the answer."""
        blocks = self.emitted_per_block
        return sum(blocks) / len(blocks) if blocks else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first over the seconds of decoding; None where there are none."""
        after_first = len(self.token_ids) - 1
        return after_first / self.decode_seconds if after_first else None


@dataclasses.dataclass(frozen=True)
class WaitingPrompt:
    """A prompt that waits for a row: its place among the answers, and the number that its random keys are made of."""

    index: int
    number: int
    tokens: Sequence[int]


def numbered(prompts: Iterable[Sequence[int]]) -> Iterator[WaitingPrompt]:
    """Give prompts numbers by what they say, not by where they stand, so that neighbours change no sample (law 10).

    The same prompt gets another number each time it comes.
    """
    told: collections.Counter[bytes] = collections.Counter()
    for index, prompt in enumerate(prompts):
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8).digest()
        number = hashlib.blake2b(digest + told[digest].to_bytes(8, "little"), digest_size=4).digest()
        told[digest] += 1
        yield WaitingPrompt(index, int.from_bytes(number, "little"), prompt)


@dataclasses.dataclass
class _Row:
    """A request in its place in the batch."""

    index: int
    prompt_length: int
    prefill_seconds: float
    began: float


class Engine:
    """Decodes with a target, and with a draft where there is one; the draft changes the speed and nothing else.

    One thread at a time: requests share the decoding state.
    """

    def __init__(
        self,
        target: LoadedTarget,
        draft: LoadedDraft | None = None,
        *,
        max_length: int = 2048,
        batch_size: int = 1,
        block_size: int | Literal["auto"] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Pair loaded models, and make room for `batch_size` rows of `max_length` tokens, prompt and answer together.

        `block_size` is that of the draft, unless another is asked for; with "auto" each block has the size that should
        bring most tokens a second, up to the draft's (`block_sizes.py`); what the sizes cost is measured by `warm_up`.
        `mesh` spreads them over devices, of this process or of several that all do the same; `sharding.make_mesh` makes
        one. Without it, everything lies on the default device.

        Raises:
            UserError: models that do not pair, or a size that is absurd or that the mesh does not divide.
        """
        check(max_length >= 2, f"max_length: {max_length}; room for a prompt and an answer, 2 or more, is right")
        check(batch_size >= 1, f"batch_size: {batch_size}; 1 or more is right")
        if draft is not None:
            with _pair_named(target, draft):
                check_pair(target.config, draft.config)
        self.config = target.config
        self.block_size: int | Literal["auto"] = _block_size(draft, block_size)
        self.max_length = min(max_length, target.config.max_positions)
        self.stop_token_ids = target.stop_token_ids
        self._mesh = mesh or sharding.make_mesh(devices=jax.local_devices())
        for model in (target, draft) if draft else (target,):
            sharding.check_mesh(self._mesh, model.config)
        shards = self._mesh.shape["data"]
        check(
            batch_size % shards == 0,
            f"batch_size: {batch_size} rows do not divide over data={shards} of the mesh; a multiple of it is right",
        )
        self._speculative = _speculative(target.config, draft.config if draft else None, self.block_size, self._mesh)
        self._plain = decode.Models(target.config, None, 1, self._mesh)
        self._weights = decode.Weights(
            sharding.put_params(self._mesh, target.params),
            sharding.put_params(self._mesh, draft.params if draft else {}),
        )
        self._batch_size = batch_size
        self._chunk = PREFILL_CHUNK.get(jax.default_backend(), PREFILL_CHUNK_ELSEWHERE)
        self._state: decode.DecodeState | None = None
        self._costs: jax.Array | None = None
        self._warm: set[decode.Models] = set()

    @classmethod
    def load(
        cls,
        ckpt: str,
        draft: str | None = None,
        *,
        dtype: str = "float32",
        max_length: int = 2048,
        batch_size: int = 1,
        block_size: int | Literal["auto"] | None = None,
        mesh: Mesh | None = None,
    ) -> "Engine":
        """Load a target, and a draft where one is named, from any checkpoint that `convert` reads.

        Raises:
            UserError: a checkpoint that cannot be read, or the faults that `Engine` names.
        """
        mesh = mesh or sharding.make_mesh(devices=jax.local_devices())
        place = functools.partial(sharding.place, mesh)
        return cls(
            load_target(ckpt, dtype, place=place),
            load_draft(draft, dtype, place=place) if draft else None,
            max_length=max_length,
            batch_size=batch_size,
            block_size=block_size,
            mesh=mesh,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, speculate: bool = True
    ) -> list[Generation]:
        """Answer every prompt; those beyond the batch wait for a row.

        Args:
            prompts: token ids, one list a prompt.
            sampling: what is asked of every answer.
            speculate: False decodes autoregressively, through the same programs with a block of one token.

        Raises:
            UserError: a prompt that is empty, too long for its answer, or not of this vocabulary; it is named by index.
        """
        latest = dict(self.serve(prompts, sampling, speculate))
        return [latest[i] for i in range(len(prompts))]

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        speculate: bool = True,
        *,
        live: bool = False,
        skip: int = 0,
    ) -> Iterator[tuple[int, Generation]]:
        """Answer every prompt, yielding (index, answer so far) at every look at the device.

        An answer's last one has a finish reason. Answers of a batch mix; those beyond the batch wait for a row, and
        the first that waits takes the place of the first that ends.

        Args:
            prompts: token ids, one list a prompt.
            sampling: what is asked of every answer.
            speculate: as in `generate`.
            live: look every few blocks, for someone who reads along.
            skip: how many prompts, from the first on, have their answers already.

        Raises:
            UserError: as `generate`.
        """
        for i, prompt in enumerate(prompts):
            self.check_prompt(prompt, sampling, f"prompt {i}")
        self.warm_up(speculate)
        waiting = itertools.islice(numbered(prompts), skip, None)
        yield from self._serve(waiting, sampling, speculate, BLOCKS_A_LOOK_STREAMING if live else BLOCKS_A_LOOK)

    def stream(self, prompt: Sequence[int], sampling: SamplingConfig, speculate: bool = True) -> Iterator[list[int]]:
        """Answer one prompt, yielding lists of new token ids every few accepted blocks.

        Raises:
            UserError: as `generate`.
        """
        told = 0
        for _, answer in self.serve([prompt], sampling, speculate, live=True):
            yield answer.token_ids[told:]
            told = len(answer.token_ids)

    def check_prompt(self, prompt: Sequence[int], sampling: SamplingConfig, name: str = "prompt") -> None:
        """Refuse a prompt that is empty, too long for its answer, or not of this vocabulary.

        Raises:
            UserError: naming the prompt by `name`.
        """
        rows = self.config.vocab_size
        listed = isinstance(prompt, Sequence) and all(isinstance(i, Integral) for i in prompt)
        check(listed, f"{name}: {reprlib.repr(prompt)}; a list of token ids is right")
        check(len(prompt) > 0, f"{name}: empty; at least one token is needed")
        for field, ids in ((name, prompt), ("stop_token_ids", sampling.stop_token_ids)):
            for i in ids:
                check(0 <= i < rows, f"{field}: token id {i} is outside the vocabulary; 0 to {rows - 1} are in it")
        check(
            len(self._stops(sampling)) <= decode.MAX_STOPS,
            f"stop_token_ids: {len(self._stops(sampling))} with the checkpoint's own; at most {decode.MAX_STOPS} fit",
        )
        asked = len(prompt) + sampling.max_new_tokens
        check(
            asked <= self.max_length,
            f"{name}: {len(prompt)} tokens and max_new_tokens {sampling.max_new_tokens} make {asked}; "
            f"max_length {self.max_length} is the limit (the target itself ends at {self.config.max_positions})",
        )

    def warm_up(self, speculate: bool = True) -> None:
        """Compile the programs, if they are not compiled yet, so that answers are timed without it."""
        models = self._models(speculate)
        if models in self._warm:
            return
        once = SamplingConfig(max_new_tokens=2)
        if models.sizes:
            self._costs = self._device(np.ones(len(models.sizes)), np.float32)
        for _ in self._serve(numbered([[0]]), once, speculate, BLOCKS_A_LOOK):
            pass
        if models.sizes:
            self._costs = self._device(self._measured(models), np.float32)
        self._warm.add(models)

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes that weights and decoding state take, by their sizes."""
        state = jax.eval_shape(self._empty_state)
        return _bytes(self._weights), _bytes(state)

    def _models(self, speculate: bool) -> decode.Models:
        return self._speculative if speculate else self._plain

    def _serve(
        self, waiting: Iterator[WaitingPrompt], sampling: SamplingConfig, speculate: bool, blocks: int
    ) -> Iterator[tuple[int, Generation]]:
        """Decode prompts through the batch, yielding (index, answer so far) at every look at the device."""
        models = self._models(speculate)
        rows: dict[int, _Row] = {}
        state, self._state = self._state or self._empty_state(), None  # an abandoned answer leaves no state behind
        while True:
            for place in range(self._batch_size):
                if place not in rows and (prompt := next(waiting, None)) is not None:
                    state, rows[place] = self._admit(models, state, place, prompt, sampling)
            if not rows:
                break
            state = self._decode(models, state, blocks, self._costs)
            for place, generation in self._look(decode.look(models, state), rows):
                yield rows[place].index, generation
                if generation.finish_reason:
                    del rows[place]
        self._state = state

    def _decode(
        self, models: decode.Models, state: decode.DecodeState, blocks: int, costs: jax.Array | None
    ) -> decode.DecodeState:
        chosen_by = costs if models.sizes else None
        return decode.decode(models, self._weights, state, self._device(blocks, np.int32), chosen_by)

    def _measured(self, models: decode.Models) -> npt.NDArray[np.float32]:
        """Measure the seconds of a block of each size, in turns, in a row that nothing ends."""
        length = max(1, min(MEASURED_AT, self.max_length // 2))
        seconds = np.zeros((ROUNDS, len(models.sizes)), np.float32)
        never = self._asked(length, 0, SamplingConfig(max_new_tokens=max(2, self.max_length - length)))
        never = never._replace(stops=self._device(np.full(decode.MAX_STOPS, -1), np.int32))
        state, self._state = self._state or self._empty_state(), None  # a row of it runs on: it is not kept
        row = self._device(0, np.int32)
        state, hidden = self._read(models, state, row, [0] * length)
        for turn, place in itertools.product(range(ROUNDS), range(len(models.sizes))):
            only = np.where(np.arange(len(models.sizes)) == place, 1, np.inf)
            costs = self._device(only, np.float32)
            state = decode.admit(models, self._weights, state, row, hidden, never)
            decode.look(models, state).blocks.block_until_ready()
            began = time.perf_counter()
            state = self._decode(models, state, BLOCKS_MEASURED, costs)
            done = int(decode.look(models, state).blocks[0])
            seconds[turn, place] = (time.perf_counter() - began) / done
        return multihost_utils.broadcast_one_to_all(np.median(seconds, axis=0))

    def _admit(
        self,
        models: decode.Models,
        state: decode.DecodeState,
        place: int,
        prompt: WaitingPrompt,
        sampling: SamplingConfig,
    ) -> tuple[decode.DecodeState, _Row]:
        began = time.perf_counter()
        asked = self._asked(len(prompt.tokens), prompt.number, sampling)
        row = self._device(place, np.int32)
        state, hidden = self._read(models, state, row, prompt.tokens)
        state = decode.admit(models, self._weights, state, row, hidden, asked)
        state.finish.block_until_ready()
        now = time.perf_counter()
        return state, _Row(prompt.index, len(prompt.tokens), now - began, now)

    def _read(
        self, models: decode.Models, state: decode.DecodeState, row: jax.Array, tokens: Sequence[int]
    ) -> tuple[decode.DecodeState, jax.Array]:
        """Read a prompt into a row; what `admit` starts its answer from comes back, too."""
        length = len(tokens)
        padded = np.zeros((1, -(-length // self._chunk) * self._chunk), np.int32)
        padded[0, :length] = tokens
        end = self._device(length - 1, np.int32)
        for start in range(0, length, self._chunk):
            chunk = self._device(padded[:, start : start + self._chunk], np.int32)
            at = self._device(start, np.int32)
            state, hidden = decode.prefill(models, self._weights, state, row, chunk, at, end)
        return state, hidden

    def _asked(self, prompt_length: int, number: int, sampling: SamplingConfig) -> decode.Request:
        stops = np.full(decode.MAX_STOPS, -1, np.int32)
        union = self._stops(sampling)
        stops[: len(union)] = union
        return decode.Request(
            prompt_length=self._device(prompt_length, np.int32),
            last=self._device(prompt_length + sampling.max_new_tokens - 1, np.int32),
            stops=self._device(stops, np.int32),
            policy=Policy(
                temperature=self._device([sampling.temperature], np.float32),
                top_k=self._device([sampling.top_k], np.int32),
                top_p=self._device([sampling.top_p], np.float32),
                seed=self._device([sampling.seed], np.uint32),
                request=self._device([number], np.uint32),
            ),
        )

    def _look(self, view: decode.DecodeState, rows: dict[int, _Row]) -> list[tuple[int, Generation]]:
        seen: decode.DecodeState = jax.device_get(view)
        now = time.perf_counter()
        found = []
        for place, row in rows.items():
            answer = slice(row.prompt_length, seen.lengths[place] + 1)
            generation = Generation(
                token_ids=seen.tokens[place, answer].tolist(),
                drafted=seen.drafted[place, answer].tolist(),
                emitted_per_block=seen.emitted[place, : seen.blocks[place]].tolist(),
                finish_reason=FINISH_REASONS.get(int(seen.finish[place])),
                prefill_seconds=row.prefill_seconds,
                decode_seconds=now - row.began,
                block_sizes=seen.sizes[place, : seen.blocks[place]].tolist(),
            )
            found.append((place, generation))
        return found

    def _device(self, value: npt.ArrayLike, dtype: type[np.generic]) -> jax.Array:
        """Put host values on all devices as they are: nothing is compiled for it."""
        return sharding.put(self._mesh, sharding.WHOLE, np.asarray(value, dtype))

    def _empty_state(self) -> decode.DecodeState:
        # A block, or a whole chunk, may be written at the last position (law 9).
        rows = self.max_length + max(self._speculative.block_size, self._chunk)
        rows = -(-rows // PIECE) * PIECE  # attention reads whole pieces
        dtype = jax.tree.leaves(self._weights.target)[0].dtype
        return decode.empty_state(self._speculative, self._batch_size, rows, jnp.dtype(dtype))

    def _stops(self, sampling: SamplingConfig) -> list[int]:
        return sorted({*self.stop_token_ids, *sampling.stop_token_ids})


@contextlib.contextmanager
def _pair_named(target: LoadedTarget, draft: LoadedDraft) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{draft.source} is no draft for {target.source}: {error}") from error


def _bytes(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _speculative(
    target: TargetConfig, draft: DraftConfig | None, block_size: int | Literal["auto"], mesh: Mesh
) -> decode.Models:
    if block_size == "auto" and draft is not None:
        return decode.Models(target, draft, draft.block_size, mesh, candidates(draft.block_size))
    return decode.Models(target, draft, int(block_size), mesh)


def _block_size(draft: LoadedDraft | None, asked: int | Literal["auto"] | None) -> int | Literal["auto"]:
    if draft is None:
        check(asked in (None, 1), f"block_size: {asked} needs a draft; without one a block is one token")
        return 1
    if asked == "auto":
        return asked
    size = draft.config.block_size if asked is None else asked
    if size < 2:
        raise UserError(f"block_size: {size}; 2 or more is right with a draft")
    return size
