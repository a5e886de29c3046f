import argparse
import dataclasses

import numpy as np
import pytest

from convert import cli
from dflash_jax.config import DraftConfig, LayerConfig, TransformerConfig
from dflash_jax.errors import UserError
from dflash_jax.presets import TARGETS
from dflash_jax.rope import Rotary
from training import flags, optimizer
from training.config import DraftShape, LossConfig, OptimizerConfig, RunConfig, TrainConfig, option
from training.initial import draft_config
from training.presets import PRESETS

# Contracts: flags that every preset has, with a value other than any preset's.
PROMISED = {
    "--train.steps": 7,
    "--train.epochs": 9,
    "--train.batch-size": 3,
    "--train.length": 600,
    "--train.anchors": 11,
    "--draft.layers": 3,
    "--draft.block-size": 12,
    "--loss.name": "lk",
    "--loss.gamma": 2.5,
    "--optimizer.learning-rate": 1e-5,
    "--checkpoint.every": 6,
    "--mesh.data": 2,
    "--mesh.fsdp": 4,
    "--mesh.tensor": 8,
    "--init-from": "target",
    "--seed": 5,
}
# SmolLM2-135M, the demo's target.
SMOLLM2 = dataclasses.replace(
    TARGETS["llama3.2-1b"],
    vocab_size=49152,
    layers=TARGETS["llama3.2-1b"].layers[:1] * 30,
    stop_token_ids=(2,),
)
TARGET_OF = {"tiny": SMOLLM2, "smollm2-demo": SMOLLM2} | {name: TARGETS[name] for name in PRESETS if name in TARGETS}


def parser():
    made = cli.Parser(prog="train", description="")
    flags.add_flags(made)
    return made


def given(*arguments, preset="qwen3-8b"):
    return flags.override(PRESETS[preset], parser().parse_args([str(argument) for argument in arguments]))


def refusal(*arguments, preset="qwen3-8b"):
    with pytest.raises(UserError) as caught:
        given(*arguments, preset=preset)
    message = str(caught.value)
    assert "\n" not in message
    return message


def field_of(config, flag):
    value = config
    for name in flag.removeprefix("--").replace("-", "_").split("."):
        value = getattr(value, name)
    return value


def leaves(value, prefix=""):
    """Every setting by its flag."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from leaves(inner, f"{prefix}{field.name}.")
        else:
            yield f"--{prefix}{field.name}".replace("_", "-"), inner


def test_every_setting_has_a_flag_with_help_and_no_flag_is_without_a_setting():
    actions = {action.option_strings[0]: action for action in parser()._actions if action.dest != "help"}
    assert set(actions) == {flag for flag, _ in leaves(RunConfig("x"))} - {"--preset"}
    assert all(action.help for action in actions.values())
    assert set(actions) >= set(PROMISED)


def test_help_renders_at_any_width(monkeypatch):
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        text = parser().format_help()
        assert "--train.batch-size N" in text
        assert "--loss.gamma X|none" in text
        assert "--no-train.remat" in text
        assert "SUPPRESS" not in text


def test_a_percent_sign_in_a_setting_is_no_format(monkeypatch):
    made = dataclasses.make_dataclass("Odd", [("odd", int, option(1, "100 % (s) of them, %d"))])
    [field] = dataclasses.fields(made)
    monkeypatch.setattr(flags, "_fields", lambda: iter([("train", field)]))
    assert "100 % (s) of them, %d" in parser().format_help()


def test_given_nothing_the_preset_is_what_it_is():
    for name, preset in PRESETS.items():
        assert given(preset=name) == preset


@pytest.mark.parametrize(("flag", "value"), PROMISED.items())
def test_a_flag_sets_its_setting_and_leaves_the_others(flag, value):
    for name in PRESETS:
        before, after = dict(leaves(PRESETS[name])), dict(leaves(given(flag, value, preset=name)))
        assert after == before | {flag: value}
        assert type(after[flag]) is type(value)


def test_flags_are_typed_and_none_and_no_are_understood():
    config = given("--train.steps", "5", "--optimizer.clip", "2", "--no-train.remat", "--target", "a b")
    assert (config.train.steps, config.optimizer.clip, config.train.remat, config.target) == (5, 2.0, False, "a b")
    assert isinstance(config.optimizer.clip, float)
    assert given("--train.remat", preset="tiny").train.remat
    for flag in (
        "--train.steps",
        "--target",
        "--init-from",
        "--loss.gamma",
        "--loss.vocabulary",
        "--draft.mask-token-id",
    ):
        assert field_of(given(flag, "none", preset="tiny"), flag) is None
    assert given("--features.cache", "x").features.cache == "x"


@pytest.mark.parametrize(
    ("flag", "value", "right"),
    [
        ("--train.steps", 0, "1 or more"),
        ("--train.epochs", 0, "1 or more"),
        ("--train.batch-size", -1, "1 or more"),
        ("--train.length", 1, "2 or more"),
        ("--train.anchors", 0, "1 or more"),
        ("--train.anchors", 9999, "no more than those"),
        ("--train.log-every", 0, "1 or more"),
        ("--train.dtype", "float16", "float32, bfloat16"),
        ("--draft.layers", 0, "1 or more"),
        ("--draft.taps", 0, "1 or more"),
        ("--draft.block-size", 1, "2 or more"),
        ("--draft.mask-token-id", -1, "0 or more"),
        ("--loss.name", "mse", "decay, dpace, kl, lk"),
        ("--loss.gamma", 0, "over 0"),
        ("--loss.gamma", "nan", "over 0"),
        ("--loss.vocabulary", 0, "2 or more"),
        ("--loss.vocabulary", 1, "2 or more"),
        ("--optimizer.name", "sgd", "adamw, muon"),
        ("--optimizer.learning-rate", "inf", "over 0"),
        ("--optimizer.learning-rate", "nan", "over 0"),
        ("--optimizer.clip", -1, "over 0"),
        ("--optimizer.warmup", 1, "from 0 up to 1"),
        ("--optimizer.weight-decay", "nan", "from 0 up to 1"),
        ("--checkpoint.every", 0, "1 or more"),
        ("--checkpoint.keep", 0, "1 or more"),
        ("--evaluation.every", 0, "1 or more"),
        ("--evaluation.rows", -1, "0 or more"),
        ("--export.dtype", "int8", "float32, bfloat16"),
        ("--mesh.data", 0, "1 or more"),
        ("--mesh.fsdp", 0, "1 or more"),
        ("--mesh.tensor", 0, "1 or more"),
        ("--seed", -1, "0 to 4294967295"),
        ("--seed", 2**32, "0 to 4294967295"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_flag(flag, value, right):
    message = refusal(flag, value)
    assert message.startswith(f"{flag}: ")
    assert str(value) in message
    assert right in message


def test_text_that_is_no_number_is_refused_by_its_flag():
    assert refusal("--train.epochs", "many") == (
        "argument --train.epochs: 'many'; a whole number is right; `train --help` shows what is right"
    )
    assert refusal("--train.epochs", "none").startswith("argument --train.epochs: 'none'; a whole number is right")
    assert refusal("--loss.gamma", "x").startswith("argument --loss.gamma: 'x'; a number or none is right")
    assert refusal("--train.batchsize", 3).endswith("did you mean --train.batch-size?")


def test_the_paper_s_decay_is_the_default_of_each_block_size():
    """An option that was left out once switched the decay off."""
    sizes = {8: 4.0, 10: 5.0, 16: 7.0}
    assert {size: RunConfig("x", draft=DraftShape(block_size=size)).gamma for size in sizes} == sizes
    assert RunConfig("x", loss=LossConfig(gamma=2.5)).gamma == 2.5
    assert PRESETS["qwen3-8b"].gamma == 7.0
    assert PRESETS["llama3.1-8b"].gamma == 5.0
    assert PRESETS["smollm2-demo"].gamma == 4.0


def test_the_published_presets_are_the_paper_s_recipe():
    for name in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama3.1-8b"):
        config = PRESETS[name]
        train, rate = config.train, config.optimizer
        assert (train.epochs, train.length, train.anchors, train.steps) == (6, 3072, 512, None)
        assert (rate.name, rate.learning_rate, rate.warmup, rate.clip) == ("adamw", 6e-4, 0.04, 1.0)
        assert (config.loss.name, config.draft.layers, config.draft.taps) == ("decay", 5, 5)


IDS = {
    "tiny": (1, 8, 14, 20, 27),
    "smollm2-demo": (1, 8, 14, 20, 27),
    "qwen3-0.6b": (1, 7, 13, 19, 25),
    "qwen3-4b": (1, 9, 17, 25, 33),
    "qwen3-8b": (1, 9, 17, 25, 33),
    "llama3.1-8b": (1, 8, 15, 22, 29),
}
MASKS = dict.fromkeys(IDS, 151669) | {"tiny": 16, "smollm2-demo": 16, "llama3.1-8b": 128002}
BLOCKS = dict.fromkeys(IDS, 16) | {"tiny": 8, "smollm2-demo": 8, "llama3.1-8b": 10}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_s_draft_is_that_of_the_published_layout(name):
    target, draft = TARGET_OF[name], draft_config(PRESETS[name], TARGET_OF[name])
    assert (draft.target_layer_ids, draft.mask_token_id, draft.block_size) == (IDS[name], MASKS[name], BLOCKS[name])
    assert draft.num_target_layers == target.num_layers
    assert draft.num_layers == PRESETS[name].draft.layers
    own = {"layers", "qk_norm", "attention_bias", "mlp_bias"}
    for field in {field.name for field in dataclasses.fields(TransformerConfig)} - own:
        assert getattr(draft, field) == getattr(target, field), field
    assert (draft.qk_norm, draft.attention_bias, draft.mlp_bias) == (True, False, False)
    assert all(layer.rotary == target.layers[0].rotary and not layer.causal for layer in draft.layers)
    assert DraftConfig.from_hf(draft.to_hf()) == draft


def shaped(target=SMOLLM2, **shape):
    return draft_config(RunConfig("x", draft=DraftShape(**{"mask_token_id": 16} | shape)), target)


def test_a_new_draft_turns_by_the_angles_of_layers_that_see_all():
    layers = (LayerConfig(Rotary(1e4), window=64), LayerConfig(Rotary(1e6))) * 15
    found = shaped(dataclasses.replace(SMOLLM2, layers=layers))
    assert {layer.rotary.theta for layer in found.layers} == {1e6}


def test_a_mask_outside_the_embedding_or_that_is_a_stop_is_refused():
    rows = dataclasses.replace(TARGETS["qwen3-4b"], vocab_size=151669)  # the tokenizer's own length
    for target, mask in ((rows, 151669), (SMOLLM2, 49152), (SMOLLM2, 2)):
        with pytest.raises(UserError, match=rf"^--draft.mask-token-id: {mask}; a row of the target's embedding"):
            shaped(target, mask_token_id=mask)
    with pytest.raises(UserError, match=r"^--draft.mask-token-id: not set; "):
        shaped(mask_token_id=None)
    assert shaped(mask_token_id=49151).mask_token_id == 49151


def test_taps_that_a_target_has_no_layers_for_are_refused():
    small = dataclasses.replace(SMOLLM2, layers=SMOLLM2.layers[:6])
    assert shaped(small, taps=3).target_layer_ids == (1, 2, 3)
    assert shaped(small, taps=1).target_layer_ids == (3,)
    for taps in (4, 5, 6, 7):
        with pytest.raises(UserError, match=rf"^--draft.taps: {taps} do not fit a target of 6 layers; fewer is right$"):
            shaped(small, taps=taps)


@pytest.mark.parametrize("layers", range(3, 12))
def test_no_new_draft_taps_the_last_layer_or_one_twice(layers):
    target = dataclasses.replace(SMOLLM2, layers=SMOLLM2.layers[:layers])
    for taps in range(1, 12):
        try:
            ids = shaped(target, taps=taps).target_layer_ids
        except UserError:
            continue
        assert len(set(ids)) == taps
        assert 0 <= min(ids) <= max(ids) <= layers - 2


def test_the_learning_rate_rises_evenly_and_falls_as_a_cosine():
    rate = optimizer.schedule(OptimizerConfig(learning_rate=1.0, warmup=0.04), 100)
    seen = np.array([float(rate(step)) for step in range(101)])
    np.testing.assert_allclose(seen[:5], [0.25, 0.4375, 0.625, 0.8125, 1.0], rtol=1e-6)
    np.testing.assert_allclose(seen[4:], (1 + np.cos(np.pi * np.arange(97) / 96)) / 2, atol=1e-6)
    for steps in (1, 2, 3, 30):
        assert all(
            0 < float(optimizer.schedule(OptimizerConfig(), steps)(step)) <= 6e-4 * 1.0001 for step in range(steps)
        )


def test_a_config_that_is_made_in_python_is_checked_too():
    with pytest.raises(UserError, match=r"^--train.anchors: 8 in rows of 4 tokens; no more than those is right$"):
        RunConfig("x", train=TrainConfig(length=4, anchors=8))
    assert isinstance(parser().parse_args([]), argparse.Namespace)
