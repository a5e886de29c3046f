"""The one table of tensor names: ours, Hugging Face's for targets and for drafts, and GGUF's."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from convert.trees import flatten
from dflash_jax import parameters
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import check

Layout = Literal["flax", "target", "draft", "gguf"]
Shape = tuple[int, ...]
MOST_TOLD = 8  # names in a line


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor, or one a layer (`{}`), by its name in each layout; None where a layout has no such tensor.

    A second `{}` is for the experts, whose tensors we hold as one. `transposed`: other layouts store it [out, in] and
    we [in, out].
    """

    flax: str
    target: str | None
    draft: str | None
    gguf: str | None
    transposed: bool = False


def _layer(flax: str, hugging_face: str, gguf: str, *, transposed: bool = False) -> Row:
    layer = f"layers.{{}}.{hugging_face}"
    return Row(f"layers_{{}}/{flax}", f"model.{layer}", layer, f"blk.{{}}.{gguf}", transposed)


def _each_expert(name: str) -> Row:
    there = f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight"
    return Row(f"layers_{{}}/experts/{name}", there, None, None, transposed=True)


TABLE = (
    Row("embedding", "model.embed_tokens.weight", "embed_tokens.weight", "token_embd.weight"),
    Row("head", "lm_head.weight", "lm_head.weight", "output.weight", transposed=True),
    Row("vocabulary", None, "d2t", None),
    Row("fc/kernel", None, "fc.weight", None, transposed=True),
    Row("context_norm/scale", None, "hidden_norm.weight", None),
    Row("final_norm/scale", "model.norm.weight", "norm.weight", "output_norm.weight"),
    _layer("input_norm/scale", "input_layernorm.weight", "attn_norm.weight"),
    _layer("attention/q_proj/kernel", "self_attn.q_proj.weight", "attn_q.weight", transposed=True),
    _layer("attention/q_proj/bias", "self_attn.q_proj.bias", "attn_q.bias"),
    _layer("attention/k_proj/kernel", "self_attn.k_proj.weight", "attn_k.weight", transposed=True),
    _layer("attention/k_proj/bias", "self_attn.k_proj.bias", "attn_k.bias"),
    _layer("attention/v_proj/kernel", "self_attn.v_proj.weight", "attn_v.weight", transposed=True),
    _layer("attention/v_proj/bias", "self_attn.v_proj.bias", "attn_v.bias"),
    _layer("attention/o_proj/kernel", "self_attn.o_proj.weight", "attn_output.weight", transposed=True),
    _layer("attention/o_proj/bias", "self_attn.o_proj.bias", "attn_output.bias"),
    _layer("attention/q_norm/scale", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    _layer("attention/k_norm/scale", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    _layer("mlp_norm/scale", "post_attention_layernorm.weight", "ffn_norm.weight"),
    _layer("mlp/gate_proj/kernel", "mlp.gate_proj.weight", "ffn_gate.weight", transposed=True),
    _layer("mlp/gate_proj/bias", "mlp.gate_proj.bias", "ffn_gate.bias"),
    _layer("mlp/up_proj/kernel", "mlp.up_proj.weight", "ffn_up.weight", transposed=True),
    _layer("mlp/up_proj/bias", "mlp.up_proj.bias", "ffn_up.bias"),
    _layer("mlp/down_proj/kernel", "mlp.down_proj.weight", "ffn_down.weight", transposed=True),
    _layer("mlp/down_proj/bias", "mlp.down_proj.bias", "ffn_down.bias"),
    Row("layers_{}/experts/router/kernel", "model.layers.{}.mlp.gate.weight", None, None, transposed=True),
    *(_each_expert(name) for name in ("gate_proj", "up_proj", "down_proj")),
)
# A draft's own tokens, which no dtype that is asked for changes.
VOCABULARY = "vocabulary"
_ROWS = {row.flax: row for row in TABLE}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that a config asks for: where it goes, and the shape in which the layout stores it.

    `expert` says which row of a parameter it is that is one tensor for each expert, None where it is all of one.
    """

    path: str
    shape: Shape
    transposed: bool
    expert: int | None = None


@functools.lru_cache(maxsize=8)
def shapes(config: TargetConfig | DraftConfig) -> Mapping[str, Shape]:
    """Return the shape of every parameter by its path; kept, since finding out traces the model."""
    return MappingProxyType({path: leaf.shape for path, leaf in flatten(parameters.shapes(config)).items()})


def published_layout(config: TargetConfig | DraftConfig) -> Layout:
    """Return the layout in which models of this kind are published."""
    return "target" if isinstance(config, TargetConfig) else "draft"


def expected(config: TargetConfig | DraftConfig, layout: Layout) -> dict[str, Tensor]:
    """Return every tensor that a checkpoint of this config has, by its name in the layout.

    Those that are parts of one parameter follow one another.
    """
    tensors = {}
    for path, shape in shapes(config).items():
        index = re.match(r"layers_(\d+)/", path)
        row = _ROWS[re.sub(r"^layers_\d+/", "layers_{}/", path)]
        name, transposed = getattr(row, layout), row.transposed and layout != "flax"
        experts = range(shape[0]) if name.count("{}") > 1 else [None]
        for expert in experts:
            part = shape if expert is None else shape[1:]
            spelt = name.format(index[1] if index else None, expert)
            tensors[spelt] = Tensor(path, part[::-1] if transposed else part, transposed, expert)
    return tensors


def spelled(path: str, layout: Layout) -> str:
    """Return the name that a parameter outside the layers has in a layout."""
    return str(getattr(_ROWS[path], layout))


def count(config: TargetConfig | DraftConfig) -> int:
    """Return how many numbers there are to learn."""
    return sum(math.prod(shape) for path, shape in shapes(config).items() if path != VOCABULARY)


def check_shapes(found: Mapping[str, Shape], wanted: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors are not exactly those that its config asks for.

    Raises:
        UserError: naming those that are missing, unexpected or mis-shaped, a few of each kind.
    """
    missing = sorted(wanted.keys() - found.keys())
    unexpected = sorted(found.keys() - wanted.keys())
    wrong = [name for name in wanted if name in found and found[name] != wanted[name].shape]
    sizes = [f"{name} is {list(found[name])}, and {list(wanted[name].shape)} is right" for name in wrong]
    faults = [f"missing {few(missing)}"] if missing else []
    faults += [f"unexpected {few(unexpected)}"] if unexpected else []
    faults += [few(sizes, "; ")] if sizes else []
    check(not faults, f"the tensors are not those of its config: {'; '.join(faults)}")


def few(told: Sequence[str], between: str = ", ") -> str:
    """Join the first of what may be thousands."""
    more = len(told) - MOST_TOLD
    return between.join(told[:MOST_TOLD]) + (f" and {more:,} more" if more > 0 else "")
