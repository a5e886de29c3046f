import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config

from dflash_jax import presets
from dflash_jax.config import (
    DraftConfig,
    ExpertsConfig,
    LayerConfig,
    TargetConfig,
    check_pair,
    default_taps,
    is_draft,
    token_ids,
)
from dflash_jax.errors import UserError
from dflash_jax.rope import Rotary

FULL, SLIDING = "full_attention", "sliding_attention"

# Qwen3-8B's published config.json, in the spelling of transformers 4.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
DRAFT: dict[str, Any] = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": [FULL] * 5,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
}
SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in fields}


def v5(config: dict[str, Any]) -> dict[str, Any]:
    """Spell the rotary settings as transformers 5 does."""
    section = {"rope_type": "default", "rope_theta": config["rope_theta"]} | (config.get("rope_scaling") or {})
    return without(config, "rope_theta", "rope_scaling") | {"rope_parameters": section}


def test_published_targets_read_as_the_presets():
    assert TargetConfig.from_hf(QWEN3_8B) == presets.TARGETS["qwen3-8b"]
    assert TargetConfig.from_hf(LLAMA3_1_8B) == presets.TARGETS["llama3.1-8b"]


@pytest.mark.parametrize(("more", "full"), [({"max_window_layers": 30}, 30), ({}, 28)])
def test_layers_slide_from_max_window_layers_on(more, full):
    config = without(QWEN3_8B, "layer_types", "max_window_layers") | {"use_sliding_window": True, "sliding_window": 64}
    found = TargetConfig.from_hf(config | more).layers
    assert [layer.window for layer in found] == [None] * full + [64] * (36 - full)


@pytest.mark.parametrize("scaling", [None, SCALING, {"rope_type": "linear", "factor": 2.0}], ids=str)
def test_both_spellings_of_rotary_settings_are_equal(scaling):
    config = QWEN3_8B | {"rope_scaling": scaling}
    assert TargetConfig.from_hf(v5(config)) == TargetConfig.from_hf(config)
    draft = DRAFT | {"rope_scaling": scaling}
    assert DraftConfig.from_hf(v5(draft)) == DraftConfig.from_hf(draft)
    assert TargetConfig.from_hf(v5(LLAMA3_1_8B)) == TargetConfig.from_hf(LLAMA3_1_8B)


def test_rope_scaling_may_call_its_kind_type():
    old = without(SCALING, "rope_type") | {"type": "yarn"}
    assert TargetConfig.from_hf(QWEN3_8B | {"rope_scaling": old}) == TargetConfig.from_hf(
        QWEN3_8B | {"rope_scaling": SCALING}
    )


@pytest.mark.parametrize(("read", "config"), [(TargetConfig.from_hf, QWEN3_8B), (DraftConfig.from_hf, DRAFT)])
def test_a_config_without_a_rotary_base_is_refused(read, config):
    with pytest.raises(UserError, match="rope_theta"):
        read(without(config, "rope_theta"))


def test_each_layer_type_may_have_rotary_settings_of_its_own():
    sections = {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}
    kinds = {"layer_types": [SLIDING, FULL] * 18, "sliding_window": 512, "use_sliding_window": True}
    layers = TargetConfig.from_hf(without(QWEN3_8B, "rope_theta") | kinds | {"rope_parameters": sections}).layers
    assert layers[0] == LayerConfig(Rotary(1e4), 512)
    assert layers[1] == LayerConfig(Rotary(1e6), None)


@pytest.mark.parametrize(
    "hf",
    [
        Qwen3Config(eos_token_id=[1, 2]),
        Qwen3Config(
            use_sliding_window=True, sliding_window=256, max_window_layers=3, rope_parameters={"rope_theta": 7.0}
        ),
        LlamaConfig(attention_bias=True, mlp_bias=True, num_key_value_heads=8),
        LlamaConfig(rope_parameters=LLAMA3_1_8B["rope_scaling"] | {"rope_theta": 5e5}, tie_word_embeddings=True),
    ],
    ids=["qwen3", "qwen3-sliding", "llama", "llama3"],
)
def test_configs_of_transformers_are_read(hf):
    config = TargetConfig.from_hf(hf.to_dict())
    assert config.family == hf.model_type
    assert (config.vocab_size, config.hidden_size) == (hf.vocab_size, hf.hidden_size)
    assert (config.num_heads, config.num_kv_heads) == (hf.num_attention_heads, hf.num_key_value_heads)
    assert (config.head_dim, config.num_layers) == (hf.head_dim, hf.num_hidden_layers)
    assert (config.attention_bias, config.tie_word_embeddings) == (hf.attention_bias, hf.tie_word_embeddings)
    assert config.layers[0].rotary.theta == hf.rope_parameters["rope_theta"]
    windows = [256 if kind == SLIDING else None for kind in getattr(hf, "layer_types", [FULL] * hf.num_hidden_layers)]
    assert [layer.window for layer in config.layers] == windows
    # What we write, transformers reads to the same.
    again = type(hf)(**config.to_hf())
    assert TargetConfig.from_hf(again.to_dict()) == config


def test_head_dim_and_key_heads_follow_from_the_query_heads_where_absent():
    config = TargetConfig.from_hf(without(LLAMA3_1_8B, "num_key_value_heads"))
    assert (config.head_dim, config.num_kv_heads) == (128, 32)


def test_a_published_draft_is_read():
    config = DraftConfig.from_hf(DRAFT)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 151669, (1, 9, 17, 25, 33))
    assert (config.num_target_layers, config.is_causal, config.qk_norm) == (36, None, True)
    assert config.layers == (LayerConfig(Rotary(1e6), None, causal=False),) * 5


@pytest.mark.parametrize(
    ("is_causal", "full", "sliding"), [(None, False, True), (True, True, True), (False, False, False)]
)
@pytest.mark.parametrize("place", ["top", "dflash_config.is_causal", "dflash_config.causal"])
def test_is_causal_holds_for_every_layer_and_its_absence_only_for_sliding_ones(is_causal, full, sliding, place):
    config = DRAFT | {
        "layer_types": [FULL, SLIDING] * 2 + [FULL],
        "sliding_window": 2048,
        "use_sliding_window": True,
    }
    if place == "top":
        config |= {"is_causal": is_causal}
    else:
        config |= {"dflash_config": DRAFT["dflash_config"] | {place.split(".")[1]: is_causal}}
    layers = DraftConfig.from_hf(config).layers
    assert [(layer.window, layer.causal) for layer in layers[:2]] == [(None, full), (2048, sliding)]


@pytest.mark.parametrize("field", ["block_size", "mask_token_id", "target_layer_ids"])
def test_a_draft_s_own_fields_may_stand_at_the_top_or_in_dflash_config(field):
    values = DRAFT["dflash_config"] | {"block_size": 16}
    top = without(DRAFT, "block_size") | {"dflash_config": without(values, field), field: values[field]}
    assert DraftConfig.from_hf(top) == DraftConfig.from_hf(DRAFT)


def test_the_mask_token_needs_a_row_of_the_embedding_not_a_word_of_the_tokenizer():
    assert DraftConfig.from_hf(DRAFT).mask_token_id == 151669  # Qwen3's tokenizer has 151669 words: 0…151668
    with pytest.raises(UserError, match=r"mask_token_id: 151669 is outside the embedding, whose rows are 0 to 151668"):
        DraftConfig.from_hf(DRAFT | {"vocab_size": 151669})


def test_what_a_draft_does_not_say_changes_nothing():
    config = DraftConfig.from_hf(without(DRAFT, "num_target_layers") | {"input_embedding_scale": None})
    assert (config.input_embedding_scale, config.output_multiplier) == (1.0, 1.0)
    assert (config.final_logit_softcapping, config.num_target_layers) == (None, None)
    scaled = DRAFT | {"input_embedding_scale": 2, "output_multiplier": 0.5, "final_logit_softcapping": 30}
    config = DraftConfig.from_hf(scaled)
    assert (config.input_embedding_scale, config.output_multiplier) == (2.0, 0.5)
    assert config.final_logit_softcapping == 30.0


QWEN3_5 = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": {}}
COMMON_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": None}, "vocab_size"),
    ({"vocab_size": "151936"}, "vocab_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"intermediate_size": None}, "intermediate_size"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_attention_heads": 1.5}, "num_attention_heads"),
    ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide num_attention_heads, 32"),
    ({"head_dim": 127}, "head_dim"),
    ({"rms_norm_eps": None}, "rms_norm_eps"),
    ({"rms_norm_eps": 2.0}, "rms_norm_eps"),
    ({"max_position_embeddings": None}, "max_position_embeddings"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ({"attention_bias": "no"}, "attention_bias"),
    ({"mlp_bias": 1}, "mlp_bias"),
    ({"layer_types": [FULL]}, "layer_types: 1 entries for num_hidden_layers"),
    ({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, r"layer_types\[0\]: 'linear_attention'"),
    ({"num_hidden_layers": 1, "layer_types": [SLIDING], "use_sliding_window": True}, "sliding_window is None"),
    ({"num_hidden_layers": 1, "layer_types": [SLIDING], "sliding_window": 8}, "use_sliding_window is False"),
    ({"rope_theta": None}, "rope_theta"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers: 1000000000; a whole number from 1 to 512"),
    ({"hidden_size": 2**63}, "hidden_size"),
    ({"head_dim": 2**31}, "head_dim"),
    ({"vocab_size": 2**40}, "vocab_size"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
    (
        {"num_hidden_layers": 1, "layer_types": [SLIDING], "use_sliding_window": True, "sliding_window": 2**31},
        "sliding_window",
    ),
]
TARGET_FAULTS: list[tuple[dict[str, Any], str]] = [
    (QWEN3_5, "Qwen3_5ForConditionalGeneration"),
    (QWEN3_5 | {"architectures": None}, "qwen3_5"),
    ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "MistralForCausalLM"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
    ({"model_type": None}, "model_type"),
    ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel is a draft"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"eos_token_id": [1, -2]}, "eos_token_id"),
    ({"eos_token_id": 2**31}, "eos_token_id"),
    ({"bos_token_id": [1]}, "bos_token_id"),
]
OWN = DRAFT["dflash_config"]
DRAFT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ({"dflash_config": without(OWN, "target_layer_ids")}, "target_layer_ids: None.*never guessed"),
    ({"dflash_config": OWN | {"target_layer_ids": []}}, "target_layer_ids"),
    ({"dflash_config": OWN | {"target_layer_ids": [1, 35]}}, "target_layer_ids: 35 cannot be tapped.*36 layers"),
    ({"sample_from_anchor": True}, "sample_from_anchor: true is not supported"),
    ({"dflash_config": OWN | {"shift_label": True}}, "shift_label: true is not supported"),
    ({"dflash_config": OWN | {"projector_type": "other"}}, "projector_type: 'other' is not supported; 'dflash' is"),
    ({"dflash_config": OWN | {"target_layer_ids": 3}}, "target_layer_ids"),
    ({"dflash_config": OWN | {"target_layer_ids": [-1, 3]}}, "target_layer_ids"),
    ({"dflash_config": OWN | {"target_layer_ids": [3, 3]}}, "target_layer_ids.*twice"),
    ({"target_layer_ids": [1]}, "target_layer_ids.*must be equal"),
    ({"dflash_config": without(OWN, "mask_token_id")}, "mask_token_id: None.*never guessed"),
    ({"dflash_config": OWN | {"mask_token_id": -1}}, "mask_token_id: -1"),
    ({"block_size": None}, "block_size"),
    ({"block_size": 1}, "block_size: 1"),
    ({"block_size": 2**31}, "block_size"),
    ({"is_causal": "no"}, "is_causal"),
    ({"is_causal": 0}, "is_causal: 0; true, false or null"),
    ({"is_causal": True, "dflash_config": OWN | {"causal": False}}, "is_causal.*must be equal"),
    ({"draft_vocab_size": 32000}, "draft_vocab_size"),
    ({"d2t": [0, 1]}, "d2t"),
    ({"num_target_layers": "36"}, "num_target_layers"),
    ({"input_embedding_scale": "2"}, "input_embedding_scale"),
    ({"output_multiplier": [1]}, "output_multiplier"),
    ({"output_multiplier": 0}, "output_multiplier"),
    ({"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
    ({"dflash_config": [1]}, "dflash_config"),
]


@pytest.mark.parametrize(("changes", "message"), COMMON_FAULTS + TARGET_FAULTS)
def test_a_target_s_fault_is_named_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as error:
        TargetConfig.from_hf(QWEN3_8B | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("changes", "message"), COMMON_FAULTS + DRAFT_FAULTS)
def test_a_draft_s_fault_is_named_in_one_line(changes, message):
    config = DRAFT | changes
    if "architectures" in changes and "DFlash" not in changes["architectures"][0]:
        config = without(config, "dflash_config")
    with pytest.raises(UserError, match=message) as error:
        DraftConfig.from_hf(config)
    assert "\n" not in str(error.value)


def test_drafts_are_told_from_targets():
    assert is_draft(DRAFT)
    assert is_draft(without(DRAFT, "dflash_config"))
    assert is_draft(without(DRAFT, "architectures"))
    assert not is_draft(QWEN3_8B)
    assert not is_draft(without(QWEN3_8B, "architectures"))


def test_token_ids():
    assert token_ids(None, "eos_token_id") == ()
    assert token_ids(7, "eos_token_id") == (7,)
    assert token_ids([7, 9], "eos_token_id") == (7, 9)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (36, (1, 9, 17, 25, 33)),
        (30, (1, 8, 14, 20, 27)),
        (28, (1, 7, 13, 19, 25)),
        (24, (1, 6, 11, 16, 21)),
        (32, (1, 8, 15, 22, 29)),
        (40, (1, 10, 19, 28, 37)),
        (64, (1, 16, 31, 46, 61)),
        (36, (18,)),
        (9, (4,)),
        (36, (1, 33)),
    ],
)
def test_default_taps(layers, taps):
    assert default_taps(layers, len(taps)) == taps


def test_a_draft_and_its_target_are_accepted():
    check_pair(TargetConfig.from_hf(QWEN3_8B), DraftConfig.from_hf(DRAFT))
    check_pair(TargetConfig.from_hf(QWEN3_8B), DraftConfig.from_hf(without(DRAFT, "num_target_layers")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2560}, "hidden_size: the draft has 2560, the target 4096"),
        ({"vocab_size": 151937}, "vocab_size: the draft has 151937, the target 151936"),
        ({"num_target_layers": 40}, "num_target_layers: the draft was made for 40 layers, the target has 36"),
        (
            {"dflash_config": OWN | {"target_layer_ids": [1, 35]}},
            "target_layer_ids: 35.*36 layers.*final norm.*34",
        ),
        (
            {"dflash_config": OWN | {"target_layer_ids": [99, 1]}},
            "target_layer_ids: 99.*36 layers",
        ),
    ],
)
def test_a_draft_of_another_target_is_refused_with_both_numbers(changes, message):
    with pytest.raises(UserError, match=message):
        check_pair(TargetConfig.from_hf(QWEN3_8B), DraftConfig.from_hf(DRAFT | {"num_target_layers": None} | changes))


# Which item of a sequence beartype checks, it chooses with Python's random module; hypothesis would rather it did not.
BEARTYPE_SAMPLES = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high)


@st.composite
def rotaries(draw: st.DrawFn) -> Rotary:
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    fields: dict[str, Any] = {"theta": draw(floats(1, 1e8)), "partial": draw(st.sampled_from([1.0, 0.5, 0.25]))}
    if kind != "default":
        fields["factor"] = draw(floats(0.1, 64))
    if kind in ("llama3", "yarn"):
        fields["original_max_positions"] = draw(st.integers(1, 10**6))
    if kind == "llama3":
        fields["low_freq_factor"] = draw(floats(0.1, 2))
        fields["high_freq_factor"] = fields["low_freq_factor"] + draw(floats(0.1, 8))
    if kind == "yarn":
        fields |= {name: draw(floats(0.1, 64)) for name in ("beta_fast", "beta_slow", "attention_factor")}
        fields["truncate"] = draw(st.booleans())
    return Rotary(kind=kind, **fields)


@st.composite
def sizes(draw: st.DrawFn, full_causal: bool, sliding_causal: bool) -> dict[str, Any]:
    key_heads = draw(st.integers(1, 8))
    full = LayerConfig(draw(rotaries()), None, full_causal)
    sliding = LayerConfig(draw(rotaries()), draw(st.integers(1, 4096)), sliding_causal)
    return {
        "vocab_size": draw(st.integers(1, 2**18)),
        "hidden_size": draw(st.integers(1, 8192)),
        "intermediate_size": draw(st.integers(1, 8192)),
        "num_heads": key_heads * draw(st.integers(1, 8)),
        "num_kv_heads": key_heads,
        "head_dim": 2 * draw(st.integers(1, 128)),
        "rms_norm_eps": draw(floats(1e-12, 0.5)),
        "max_positions": draw(st.integers(1, 10**7)),
        "layers": tuple(draw(st.lists(st.sampled_from([full, sliding]), min_size=1, max_size=6))),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }


@st.composite
def with_experts(draw: st.DrawFn, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Give experts to some layers, at least one."""
    count = draw(st.integers(1, 256))
    experts = ExpertsConfig(count, draw(st.integers(1, count)), draw(st.integers(1, 2048)), draw(st.booleans()))
    sparse = draw(st.sets(st.integers(0, len(layers) - 1), min_size=1))
    return tuple(dataclasses.replace(layer, experts=experts if i in sparse else None) for i, layer in enumerate(layers))


@st.composite
def targets(draw: st.DrawFn) -> TargetConfig:
    family = draw(st.sampled_from(["qwen3", "qwen3_moe", "llama"]))
    shared = draw(sizes(full_causal=True, sliding_causal=True))
    if family == "qwen3_moe":
        shared["layers"] = draw(with_experts(shared["layers"]))
    return TargetConfig(
        **shared,
        qk_norm=family != "llama",
        family=family,
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=draw(st.none() | st.integers(0, 99)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
    )


@st.composite
def drafts(draw: st.DrawFn) -> DraftConfig:
    is_causal = draw(st.sampled_from([None, True, False]))
    shared = draw(sizes(full_causal=is_causal is True, sliding_causal=is_causal is not False))
    taps = draw(st.lists(st.integers(0, 80), min_size=1, max_size=6, unique=True))
    return DraftConfig(
        **shared,
        block_size=draw(st.integers(2, 64)),
        mask_token_id=draw(st.integers(0, shared["vocab_size"] - 1)),
        target_layer_ids=tuple(taps),
        num_target_layers=draw(st.none() | st.integers(max(taps) + 2, 100)),
        is_causal=is_causal,
        input_embedding_scale=draw(floats(0.1, 100)),
        output_multiplier=draw(floats(0.1, 100)),
        final_logit_softcapping=draw(st.none() | floats(0.1, 100)),
        own_vocabulary=draw(st.none() | st.integers(1, shared["vocab_size"])),
        own_embedding=draw(st.booleans()),
    )


@BEARTYPE_SAMPLES
@given(targets())
def test_a_target_written_and_read_again_is_equal(config):
    assert TargetConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@BEARTYPE_SAMPLES
@given(drafts())
def test_a_draft_written_and_read_again_is_equal(config):
    assert DraftConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


QWEN3_MOE = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"mlp_only_layers": [0, 4]}, [1, 2, 3, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
        ({"num_experts": None, "num_local_experts": 128}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_have_experts_where_the_config_says_so(changes, sparse):
    config = TargetConfig.from_hf(QWEN3_MOE | changes)
    experts = ExpertsConfig(count=128, chosen=8, intermediate_size=768, normalised=True)
    assert [layer.experts for layer in config.layers] == [experts if i in sparse else None for i in range(6)]


def test_of_a_qwen3_moe_all_layers_slide_or_none():
    config = TargetConfig.from_hf(QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 64})
    assert {layer.window for layer in config.layers} == {64}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts": None}, "num_experts: None"),
        ({"num_experts": 2**24}, "num_experts: 16777216; a whole number from 1 to 4096 is right"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: 129; a whole number from 1 to 128 is right"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: 0"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob: 'yes'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers: 'all'; a list of layers is right"),
        ({"mlp_only_layers": list(range(6))}, "a layer or more with experts is right"),
        ({"decoder_sparse_step": 7}, "decoder_sparse_step 7; "),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, told):
    with pytest.raises(UserError) as caught:
        TargetConfig.from_hf(QWEN3_MOE | changes)
    assert told in str(caught.value)


def test_a_draft_is_written_in_the_published_layout():
    written = DraftConfig.from_hf(DRAFT | {"is_causal": False}).to_hf()
    for field in set(DRAFT) & set(written):
        assert written[field] == DRAFT[field], field
    assert written["dflash_config"] == {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    assert written["is_causal"] is False
    assert "is_causal" not in DraftConfig.from_hf(DRAFT).to_hf()


def test_configs_are_hashable_and_frozen():
    config = TargetConfig.from_hf(QWEN3_8B)
    assert hash(config) == hash(presets.TARGETS["qwen3-8b"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]
