"""What a run is: frozen settings in sections, checked where they are made.

Each field's `help` is what `python -m training.run --help` says of it. A field `learning_rate` of the section
`optimizer` is `--optimizer.learning-rate` on the command line, and so in the errors raised here.
"""

import dataclasses
from typing import Any

from dflash_jax.config import LARGEST_INT32, MOST_LAYERS
from dflash_jax.errors import UserError, check
from dflash_jax.loss import LOSSES, default_gamma

DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "muon")
HIGHEST_SEED = 2**32 - 1


def option(default: Any, text: str) -> Any:
    """Declare a field with what `--help` says of it."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, on how much at a time."""

    steps: int | None = option(None, "steps in all; none: as many as the epochs have")
    epochs: int = option(6, "times that every row is seen, where no steps are given")
    batch_size: int = option(8, "rows a step, over all devices")
    length: int = option(3072, "tokens a row; documents are packed into rows, and cut at a row's end")
    anchors: int = option(512, "blocks a row, at random anchors, drawn anew at each step")
    dtype: str = option(
        "bfloat16", "float32 or bfloat16, in which target and draft compute; master weights are float32"
    )
    log_every: int = option(10, "steps between lines of metrics")
    remat: bool = option(False, "compute the draft's layers again in the backward pass rather than keep them")


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """The draft's own sizes; all others are the target's."""

    layers: int = option(5, "decoder layers")
    taps: int = option(5, "layers of the target that are tapped, evenly from the second to the third-to-last")
    block_size: int = option(16, "slots a block, the anchor's included")
    mask_token_id: int | None = option(None, "the token that stands for unknown ones; no token of any text")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The objective."""

    name: str = option("decay", f"one of {', '.join(LOSSES)}")
    gamma: float | None = option(None, "slot k counts exp(-(k-1)/gamma); none: 4, 5, 7 for blocks of 8, 10, 16")
    vocabulary: int | None = option(None, "tokens that it scores, those that answers have most often; none: all")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule: linear to the peak, and a cosine down to zero."""

    name: str = option("adamw", f"one of {', '.join(OPTIMIZERS)}; muon is for matrices, with AdamW for the rest")
    learning_rate: float = option(6e-4, "at its peak")
    warmup: float = option(0.04, "share of the steps that lead up to the peak")
    clip: float = option(1.0, "largest norm of all gradients together")
    weight_decay: float = option(0.0, "of matrices, times the learning rate")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run on its way."""

    every: int = option(500, "steps between checkpoints")
    keep: int = option(2, "newest checkpoints that are kept, beside the best")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """What is measured on rows that are never trained on."""

    every: int = option(500, "steps between evaluations")
    rows: int = option(64, "input rows held out for it, at most a tenth of all; 0 for none")


@dataclasses.dataclass(frozen=True)
class FeaturesConfig:
    """Where the target's features come from."""

    cache: str | None = option(None, "directory to keep them in, made where it is not there; none: anew at each step")


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """The draft that a run ends with."""

    dtype: str = option("bfloat16", "float32 or bfloat16, of its tensors")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are laid out."""

    data: int = option(1, "groups of devices that each hold all parameters, and rows of their own")
    fsdp: int | None = option(
        None, "devices that parameters and rows are spread over; none: as many as there are for each group"
    )
    tensor: int = option(1, "devices that heads, MLP widths and the vocabulary are spread over")

    def on(self, devices: int) -> "MeshConfig":
        """Return the mesh with the size of `fsdp` that takes in all devices, where none is set."""
        rest = max(devices // (self.data * self.tensor), 1)
        return dataclasses.replace(self, fsdp=self.fsdp or rest)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All settings of a run but where its data and its output lie.

    Raises:
        UserError: a value that cannot be, named as the flag that sets it.
    """

    preset: str
    target: str | None = option(
        None, "a Flax checkpoint, a Hugging Face directory, a .gguf file or a hub id; none: the demo's"
    )
    init_from: str | None = option(None, "a draft to begin with, or `target` for the target's own layers; none: random")
    seed: int = option(0, "of initial weights, order of rows and anchors")
    train: TrainConfig = TrainConfig()
    draft: DraftShape = DraftShape()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    features: FeaturesConfig = FeaturesConfig()
    export: ExportConfig = ExportConfig()
    mesh: MeshConfig = MeshConfig()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Undo `dataclasses.asdict`."""
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        return cls(**{name: kinds[name](**one) if isinstance(one, dict) else one for name, one in values.items()})  # type: ignore[operator]

    def __post_init__(self) -> None:
        for flag, name in (("--target", self.target), ("--features.cache", self.features.cache)):
            check(name != "", f"{flag}: empty; a name, or leaving out {flag}, is right")
        check(0 <= self.seed <= HIGHEST_SEED, f"--seed: {self.seed}; 0 to {HIGHEST_SEED} is right")
        _at_least(1, self.train, "train", "steps", "epochs", "batch_size", "anchors", "log_every")
        _at_least(2, self.train, "train", "length")
        _at_least(1, self.draft, "draft", "layers", "taps")
        _at_least(2, self.draft, "draft", "block_size")
        check(
            self.draft.layers <= MOST_LAYERS,
            f"--draft.layers: {self.draft.layers}; {MOST_LAYERS} or fewer is right",
        )
        _at_least(0, self.draft, "draft", "mask_token_id")
        _at_least(2, self.loss, "loss", "vocabulary")
        _at_least(1, self.checkpoint, "checkpoint", "every", "keep")
        _at_least(1, self.evaluation, "evaluation", "every")
        _at_least(0, self.evaluation, "evaluation", "rows")
        _at_least(1, self.mesh, "mesh", "data", "fsdp", "tensor")
        check(
            self.train.anchors <= self.train.length,
            f"--train.anchors: {self.train.anchors} in rows of {self.train.length} tokens; no more than those is right",
        )
        _one_of(self.loss.name, "--loss.name", tuple(LOSSES))
        _one_of(self.optimizer.name, "--optimizer.name", OPTIMIZERS)
        _one_of(self.train.dtype, "--train.dtype", DTYPES)
        _one_of(self.export.dtype, "--export.dtype", DTYPES)
        _positive(self.loss.gamma, "--loss.gamma")
        _positive(self.optimizer.learning_rate, "--optimizer.learning-rate")
        _positive(self.optimizer.clip, "--optimizer.clip")
        for name in ("warmup", "weight_decay"):
            value = getattr(self.optimizer, name)
            check(0 <= value < 1, f"--optimizer.{dashed(name)}: {value}; a number from 0 up to 1 is right")

    @property
    def gamma(self) -> float:
        """The decay γ of the loss."""
        return default_gamma(self.draft.block_size) if self.loss.gamma is None else self.loss.gamma


def dashed(name: str) -> str:
    """Spell a field as the command line does."""
    return name.replace("_", "-")


def flag_of(section: str, field: str) -> str:
    """Return the flag that sets a field; a field of the run itself has the section ''."""
    return f"--{section + '.' if section else ''}{dashed(field)}"


def _at_least(least: int, section: Any, name: str, *fields: str) -> None:
    for field in fields:
        value = getattr(section, field)
        flag = flag_of(name, field)
        check(value is None or value >= least, f"{flag}: {value}; {least} or more is right")
        check(value is None or value <= LARGEST_INT32, f"{flag}: {value}; up to {LARGEST_INT32} is right")


def _positive(value: float | None, flag: str) -> None:
    check(value is None or 0 < value < float("inf"), f"{flag}: {value}; a finite number over 0 is right")


def _one_of(value: str, flag: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{flag}: {value!r} is not known; one of {', '.join(known)} is right")
