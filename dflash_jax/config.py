"""Frozen configurations of targets and drafts, read from and written to Hugging Face dictionaries.

Messages of the errors raised here name the field; whoever opened the file puts its name in front.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.errors import check
from dflash_jax.rope import Rotary, is_number

QWEN3_MOE = "qwen3_moe"
FAMILIES = {"qwen3": "Qwen3ForCausalLM", QWEN3_MOE: "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}
DRAFT_ARCHITECTURE = "DFlashDraftModel"
FULL, SLIDING = "full_attention", "sliding_attention"
# Far over any model's, and small enough to find out its shapes: a broken config must not take the memory first.
MOST_LAYERS, MOST_EXPERTS, LARGEST_SIZE, LARGEST_INT32 = 512, 2**12, 2**24, 2**31 - 1


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A layer's experts: each token has the `chosen` likeliest of `count`, whose shares add up to 1 if `normalised`."""

    count: int
    chosen: int
    intermediate_size: int
    normalised: bool


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What one layer's attention sees, and how it turns positions; and its experts, None for a layer with one MLP.

    `window`: a query at q sees keys at k with q - k < window (and k - q < window where not causal); None for all.
    """

    rotary: Rotary
    window: int | None = None
    causal: bool = True
    experts: ExpertsConfig | None = None


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The sizes that a target and a draft share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    layers: tuple[LayerConfig, ...]
    qk_norm: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)


@dataclasses.dataclass(frozen=True)
class TargetConfig(TransformerConfig):
    """A Qwen3, Qwen3-MoE or Llama decoder. `stop_token_ids` are the config's own; others may add to them."""

    family: str = "qwen3"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    @property
    def has_experts(self) -> bool:
        """Whether some layer has experts."""
        return any(layer.experts for layer in self.layers)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "TargetConfig":
        """Read a target's `config.json`, in transformers 4 or 5 spelling.

        Raises:
            UserError: an architecture that is not supported, a draft, or a field that is absent or absurd.
        """
        check(
            not is_draft(config),
            f"architectures: {DRAFT_ARCHITECTURE} is a draft; a target ({', '.join(FAMILIES.values())}) belongs here",
        )
        family = config.get("model_type")
        architectures = config.get("architectures") or [FAMILIES.get(str(family))]
        check(
            family in FAMILIES and architectures == [FAMILIES[family]],
            f"architecture {', '.join(map(str, architectures))} (model_type {family!r}) is not supported as a target; "
            f"{', '.join(FAMILIES.values())} are",
        )
        common = _read_transformer(config, qk_norm=family != "llama", draft=False)
        if family == QWEN3_MOE:
            common["layers"] = _with_experts(config, common["layers"])
        bos = config.get("bos_token_id")
        check(bos is None or _is_int(bos), f"bos_token_id: {bos!r}; a token id or null is right")
        return cls(
            **common,
            family=str(family),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            bos_token_id=bos,
            stop_token_ids=token_ids(config.get("eos_token_id"), "eos_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """Spell the config as transformers 5 does; `from_hf` reads it back to an equal one."""
        stops = list(self.stop_token_ids)
        return (
            _write_transformer(self)
            | _write_experts(self.layers)
            | {
                "architectures": [FAMILIES[self.family]],
                "model_type": self.family,
                "tie_word_embeddings": self.tie_word_embeddings,
                "bos_token_id": self.bos_token_id,
                "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
            }
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig(TransformerConfig):
    """A DFlash draft. `target_layer_ids` are 0-based, and tap outputs of layers (law 1).

    `own_vocabulary`: how many tokens the draft's own head knows; None where the head is the target's. `own_embedding`:
    whether the draft brings an embedding.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    own_vocabulary: int | None = None
    own_embedding: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether embedding and head are the target's (law 4)."""
        return self.own_vocabulary is None and not self.own_embedding

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DraftConfig":
        """Read a draft's `config.json`; its own fields may stand at the top or in `dflash_config`.

        Raises:
            UserError: not a DFlash draft, no tap ids, or a field that is absent, absurd, or given twice differently.
        """
        check(
            is_draft(config),
            f"architectures: {config.get('architectures')} is not a draft; {DRAFT_ARCHITECTURE} belongs here",
        )
        architectures = config.get("architectures") or [DRAFT_ARCHITECTURE]
        check(
            architectures == [DRAFT_ARCHITECTURE],
            f"architecture {', '.join(architectures)} is not supported as a draft; {DRAFT_ARCHITECTURE} is",
        )
        own = config.get("dflash_config") or {}
        check(isinstance(own, Mapping), f"dflash_config: {own!r}; an object of the draft's own fields is right")
        for field in ("draft_vocab_size", "d2t"):
            check(
                _either(config, field) in (None, config.get("vocab_size")),
                f"{field}: a draft with a pruned vocabulary is supported in the layout of speculators alone",
            )
        for field in ("sample_from_anchor", "shift_label"):
            check(not _either(config, field), f"{field}: true is not supported; a draft whose slot 0 is its anchor is")
        projector = _either(config, "projector_type")
        check(projector in (None, "dflash"), f"projector_type: {projector!r} is not supported; 'dflash' is")
        ids = _either(config, "target_layer_ids")
        check(
            isinstance(ids, list | tuple) and len(ids) > 0 and all(_is_int(i) and i >= 0 for i in ids),
            f"target_layer_ids: {ids!r}; a list of the target's layers (0 and up) is needed, and never guessed",
        )
        check(len(set(ids)) == len(ids), f"target_layer_ids: {list(ids)}; no layer may be tapped twice")
        block_size = _either(config, "block_size")
        check(
            _is_int(block_size) and 2 <= block_size <= LARGEST_SIZE,
            f"block_size: {block_size!r}; a whole number from 2 to {LARGEST_SIZE} is right",
        )
        is_causal = _either(config, "is_causal", "causal")
        check(
            is_causal is None or isinstance(is_causal, bool), f"is_causal: {is_causal!r}; true, false or null is right"
        )
        softcap = _either(config, "final_logit_softcapping")
        check(
            softcap is None or (is_number(softcap) and softcap >= 0),
            f"final_logit_softcapping: {softcap!r}; a positive number, or 0 or null for none, is right",
        )
        layers = config.get("num_target_layers")
        check(layers is None or _is_int(layers), f"num_target_layers: {layers!r}; a whole number or null is right")
        if layers is not None:
            _check_taps(ids, layers)
        vocab_size = _positive(config, "vocab_size")
        own_vocabulary = config.get("own_vocabulary")
        check(
            own_vocabulary is None or (_is_int(own_vocabulary) and 0 < own_vocabulary <= vocab_size),
            f"own_vocabulary: {own_vocabulary!r}; a number from 1 to {vocab_size}, or null, is right",
        )
        return cls(
            **_read_transformer(config, qk_norm=True, draft=True, is_causal=is_causal),
            block_size=block_size,
            mask_token_id=_mask_token_id(config, vocab_size),
            target_layer_ids=tuple(ids),
            num_target_layers=layers,
            is_causal=is_causal,
            input_embedding_scale=_scale(config, "input_embedding_scale"),
            output_multiplier=_scale(config, "output_multiplier"),
            final_logit_softcapping=float(softcap) if softcap else None,
            own_vocabulary=own_vocabulary,
            own_embedding=_flag(config, "own_embedding"),
        )

    def to_hf(self) -> dict[str, Any]:
        """Spell the config in the published layout, with our word for what it lacks; `from_hf` reads it back."""
        own = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        optional = {
            "is_causal": (self.is_causal, None),
            "input_embedding_scale": (self.input_embedding_scale, 1.0),
            "output_multiplier": (self.output_multiplier, 1.0),
            "final_logit_softcapping": (self.final_logit_softcapping, None),
            "own_vocabulary": (self.own_vocabulary, None),
            "own_embedding": (self.own_embedding, False),
        }
        return (
            _write_transformer(self)
            | {
                "architectures": [DRAFT_ARCHITECTURE],
                "model_type": "qwen3",
                "block_size": self.block_size,
                "dflash_config": own,
                "num_target_layers": self.num_target_layers,
                "tie_word_embeddings": False,
            }
            | {name: value for name, (value, default) in optional.items() if value != default}
        )


def is_draft(config: Mapping[str, Any]) -> bool:
    """Say whether a Hugging Face config is a DFlash draft's."""
    named = any("DFlash" in name for name in config.get("architectures") or [])
    return named or "dflash_config" in config or "speculators_model_type" in config


def default_taps(num_target_layers: int, taps: int) -> tuple[int, ...]:
    """Return the layers that a new draft taps: from the second to the third-to-last, evenly (law 1)."""
    if taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (taps - 1)) for i in range(taps))


def check_pair(target: TargetConfig, draft: DraftConfig) -> None:
    """Refuse a draft that was not made for this target.

    Raises:
        UserError: naming the field and both numbers.
    """
    layers = target.num_layers
    if draft.num_target_layers is not None:
        check(
            draft.num_target_layers == layers,
            f"num_target_layers: the draft was made for {draft.num_target_layers} layers, the target has {layers}",
        )
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(draft, field), getattr(target, field)
        check(ours == theirs, f"{field}: the draft has {ours}, the target {theirs}; they must be equal")
    _check_taps(draft.target_layer_ids, layers)


def _check_taps(ids: Sequence[int], layers: int) -> None:
    last = max(ids)
    check(
        last < layers - 1,
        f"target_layer_ids: {last} cannot be tapped in a target of {layers} layers, whose last output only exists "
        f"after the final norm; {layers - 2} is the highest",
    )


def token_ids(value: Any, field: str) -> tuple[int, ...]:
    """Read a field that holds no token id, one, or a list of them."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    check(
        all(_is_int(i) and 0 <= i <= LARGEST_INT32 for i in ids),
        f"{field}: {value!r}; a token id or a list of them is right",
    )
    return tuple(ids)


def _read_transformer(
    config: Mapping[str, Any], *, qk_norm: bool, draft: bool, is_causal: bool | None = None
) -> dict[str, Any]:
    activation = config.get("hidden_act", "silu")
    check(activation == "silu", f"hidden_act: {activation!r} is not supported; 'silu' is")
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    check(
        heads % kv_heads == 0,
        f"num_key_value_heads: {kv_heads} does not divide num_attention_heads, {heads}",
    )
    head_dim = _positive(config, "head_dim", hidden // heads)
    check(head_dim % 2 == 0, f"head_dim: {head_dim}; rotary positions need an even number")
    eps = config.get("rms_norm_eps")
    check(isinstance(eps, float) and 0 < eps < 1, f"rms_norm_eps: {eps!r}; a number between 0 and 1 is right")
    return {
        "vocab_size": _positive(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _positive(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": eps,
        "max_positions": _positive(config, "max_position_embeddings", most=LARGEST_INT32),
        "layers": tuple(_read_layer(config, kind, draft, is_causal) for kind in _layer_types(config)),
        "qk_norm": qk_norm,
        "attention_bias": _flag(config, "attention_bias"),
        "mlp_bias": _flag(config, "mlp_bias"),
    }


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    count = _positive(config, "num_hidden_layers", most=MOST_LAYERS)
    # Of a Qwen3-MoE all layers slide or none.
    first = 0 if config.get("model_type") == QWEN3_MOE else config.get("max_window_layers", 28)
    first_sliding = first if config.get("use_sliding_window") else count
    kinds = config.get("layer_types") or [SLIDING if i >= first_sliding else FULL for i in range(count)]
    check(len(kinds) == count, f"layer_types: {len(kinds)} entries for num_hidden_layers {count}")
    for i, kind in enumerate(kinds):
        check(kind in (FULL, SLIDING), f"layer_types[{i}]: {kind!r} is not supported; {FULL!r} and {SLIDING!r} are")
    return list(kinds)


def _read_layer(config: Mapping[str, Any], kind: str, draft: bool, is_causal: bool | None) -> LayerConfig:
    rotary = Rotary.from_hf(config, kind)
    if kind == FULL:
        return LayerConfig(rotary, None, causal=bool(is_causal) if draft else True)
    window: Any = config.get("sliding_window")
    check(
        _is_int(window) and 0 < window <= LARGEST_INT32 and config.get("use_sliding_window", True),
        f"layer_types has {SLIDING!r}, but sliding_window is {window!r} and use_sliding_window is "
        f"{config.get('use_sliding_window')!r}; a window of 1 or more, in use, is right",
    )
    return LayerConfig(rotary, window, causal=is_causal is not False)


def _with_experts(config: Mapping[str, Any], layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Give their experts to the layers that have some."""
    field = "num_local_experts" if "num_local_experts" in config else "num_experts"
    count = _positive(config, field, most=MOST_EXPERTS)
    step = _positive(config, "decoder_sparse_step", 1)
    chosen = _positive(config, "num_experts_per_tok", most=count)
    dense = config.get("mlp_only_layers") or []
    check(
        isinstance(dense, list | tuple) and all(_is_int(i) for i in dense),
        f"mlp_only_layers: {dense!r}; a list of layers is right",
    )
    experts = ExpertsConfig(count, chosen, _positive(config, "moe_intermediate_size"), _flag(config, "norm_topk_prob"))
    sparse = [i for i in range(len(layers)) if i not in dense and (i + 1) % step == 0]
    check(
        bool(sparse), f"mlp_only_layers: {dense!r}, decoder_sparse_step {step}; a layer or more with experts is right"
    )
    return tuple(
        dataclasses.replace(layer, experts=experts) if i in sparse else layer for i, layer in enumerate(layers)
    )


def _write_experts(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    some = next((layer.experts for layer in layers if layer.experts), None)
    if some is None:
        return {}
    return {
        "num_experts": some.count,
        "num_experts_per_tok": some.chosen,
        "moe_intermediate_size": some.intermediate_size,
        "norm_topk_prob": some.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(layers) if layer.experts is None],
    }


def _write_transformer(config: TransformerConfig) -> dict[str, Any]:
    kinds = [FULL if layer.window is None else SLIDING for layer in config.layers]
    rotary = {kind: layer.rotary.to_hf() for kind, layer in zip(kinds, config.layers, strict=True)}
    sections = list(rotary.values())
    same = all(section == sections[0] for section in sections)
    windows = [layer.window for layer in config.layers if layer.window is not None]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": config.layers[0].rotary.theta,
        "rope_parameters": sections[0] if same else rotary,
        "layer_types": kinds,
        "sliding_window": windows[0] if windows else None,
        "use_sliding_window": bool(windows),
    }


def _mask_token_id(config: Mapping[str, Any], vocab_size: int) -> int:
    mask = _either(config, "mask_token_id")
    check(_is_int(mask), f"mask_token_id: {mask!r}; the id of the mask token is needed, and never guessed")
    check(
        0 <= mask < vocab_size, f"mask_token_id: {mask} is outside the embedding, whose rows are 0 to {vocab_size - 1}"
    )
    return int(mask)


def _either(config: Mapping[str, Any], field: str, short: str | None = None) -> Any:
    """Read a draft's field from the top of its config or from `dflash_config`, where `short` may name it too."""
    nested = config.get("dflash_config") or {}
    values = [config.get(field), nested.get(field), nested.get(short) if short else None]
    found = [value for value in values if value is not None]
    if not found:
        return None
    check(
        all(value == found[0] for value in found),
        f"{field}: {found[0]!r} and {found[-1]!r}, at the top and in dflash_config; they must be equal",
    )
    return found[0]


def _scale(config: Mapping[str, Any], field: str) -> float:
    value = _either(config, field)
    value = 1.0 if value is None else value
    check(is_number(value) and value > 0, f"{field}: {value!r}; a positive number is right")
    return float(value)


def _positive(config: Mapping[str, Any], field: str, default: int | None = None, *, most: int = LARGEST_SIZE) -> int:
    value: Any = config.get(field)
    value = default if value is None else value
    check(_is_int(value) and 0 < value <= most, f"{field}: {value!r}; a whole number from 1 to {most} is right")
    return int(value)


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field) or False
    check(isinstance(value, bool), f"{field}: {value!r}; true or false is right")
    return bool(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
