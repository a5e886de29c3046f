"""Drafts in the layout of `speculators`: read, decoded with their own head, and written back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.__main__ import main
from convert.speculators import read_vocabulary, write_vocabulary
from convert.to_hf import to_hf
from dflash_jax import cache, sharding
from dflash_jax.config import DraftConfig
from dflash_jax.draft import Draft
from inference import decode
from inference.engine import Engine, SamplingConfig
from tests import tiny
from tests.checkpoints import DRAFT_CONFIG, draft_tensors, refusal, same, write_directory
from tests.torch_models import SIZES, YARN

LAYERS = {name: DRAFT_CONFIG[name] for name in (*SIZES, "hidden_act", "rms_norm_eps", "rope_theta")}
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS | {"model_type": "qwen3", "num_hidden_layers": 2},
    "draft_vocab_size": 9,
    "block_size": 4,
    "aux_hidden_state_layer_ids": [2, 3],
    "mask_token_id": 60,
    "sample_from_anchor": False,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
}
TOKENS = np.array([0, 3, 4, 8, 20, 21, 22, 40, 60])


def tensors(tokens: np.ndarray = TOKENS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    v, d = SIZES["vocab_size"], SIZES["hidden_size"]
    own = {name: rng.standard_normal((size, d), np.float32) for name, size in (("embed_tokens", v), ("lm_head", 9))}
    made = draft_tensors() | {f"{name}.weight": value for name, value in own.items()}
    return made | {"d2t": tokens - np.arange(9), "t2d": np.isin(np.arange(v), tokens)}


def write(directory: Path, **changes: Any) -> Path:
    return write_directory(directory, CONFIG | changes, tensors())


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
WHOLE = {"d2t": np.zeros(61, np.int64), "t2d": np.ones(61, bool)}


def write_whole(directory: Path, *without: str, **more: np.ndarray) -> Path:
    """Write a draft whose head knows all tokens."""
    held = tensors() | {HEAD: np.random.default_rng(6).standard_normal((61, 24), np.float32)} | more
    held = {name: value for name, value in held.items() if name not in ("d2t", "t2d", *without) or name in more}
    return write_directory(directory, CONFIG | {"draft_vocab_size": 61}, held)


def test_a_config_means_what_a_published_one_does(tmp_path):
    found = convert.load_draft(str(write(tmp_path / "draft"))).config
    published = DraftConfig.from_hf(DRAFT_CONFIG | {"num_target_layers": None})
    assert found == dataclasses.replace(published, own_vocabulary=9, own_embedding=True)
    assert found.target_layer_ids == (1, 2)  # one lower than theirs


def test_what_a_config_leaves_out_is_transformers_default(tmp_path):
    own = CONFIG["transformer_layer_config"]
    inner = {name: value for name, value in own.items() if name not in ("rms_norm_eps", "model_type", "rope_theta")}
    config = convert.load_draft(str(write(tmp_path / "draft", transformer_layer_config=inner))).config
    assert config.rms_norm_eps == 1e-6
    assert config.layers[0].rotary.theta == 1e4


def test_sliding_layers_see_the_whole_block_where_the_config_says_so(tmp_path):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    inner = CONFIG["transformer_layer_config"] | sliding
    for both, causal in ((False, True), (True, False)):
        changes = {"transformer_layer_config": inner, "sliding_window_non_causal": both}
        config = convert.load_draft(str(write(tmp_path / f"draft-{both}", **changes))).config
        assert [layer.causal for layer in config.layers] == [causal, False]


def test_embedding_head_and_vocabulary_are_the_drafts_own(tmp_path):
    params = convert.load_draft(str(write(tmp_path / "draft")), "bfloat16").params
    theirs = tensors()
    assert params["embedding"].shape == (61, 24)
    np.testing.assert_array_equal(params["head"], theirs["lm_head.weight"].T.astype(jnp.bfloat16))
    np.testing.assert_array_equal(params["vocabulary"], TOKENS)
    assert params["vocabulary"].dtype == np.int32  # whatever dtype is asked for


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_it_comes_back_in_its_own_layout(tmp_path, dtype):
    write(tmp_path / "source")
    main(["to-flax", str(tmp_path / "source"), str(tmp_path / "flax"), "--dtype", dtype, "--verify"])
    main(["to-hf", str(tmp_path / "flax"), str(tmp_path / "made"), "--verify"])
    held, expected = load_file(tmp_path / "made/model.safetensors"), tensors()
    assert held.keys() == expected.keys()
    for name in ("d2t", "t2d"):
        assert held[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(held[name], expected[name])
    loaded, source = (convert.load_draft(str(tmp_path / name)) for name in ("made", "source"))
    assert loaded.config == source.config
    written = json.loads((tmp_path / "made/config.json").read_text())
    assert written["speculators_config"] == CONFIG["speculators_config"]
    if dtype == "keep":
        assert same(loaded.params, source.params)


@pytest.mark.parametrize(
    ("without", "own"),
    [((), (61, True)), ((EMBEDDING,), (61, False)), ((HEAD,), (None, True)), ((EMBEDDING, HEAD), (None, False))],
)
def test_what_is_left_to_the_target_is_the_targets(tmp_path, without, own):
    write_whole(tmp_path / "source", *without)
    main(["to-flax", str(tmp_path / "source"), str(tmp_path / "flax"), "--verify"])
    main(["to-hf", str(tmp_path / "flax"), str(tmp_path / "made"), "--verify"])
    for name in ("source", "flax", "made"):
        config = convert.load_draft(str(tmp_path / name)).config
        assert (config.own_vocabulary, config.own_embedding) == own
    assert (
        load_file(tmp_path / "made/model.safetensors").keys() == load_file(tmp_path / "source/model.safetensors").keys()
    )
    written = json.loads((tmp_path / "made/config.json").read_text())
    assert (written["speculators_model_type"], written["draft_vocab_size"]) == ("dflash", 61)


def test_a_pruned_head_may_stand_beside_the_targets_embedding(tmp_path):
    held = {name: value for name, value in tensors().items() if name != EMBEDDING}
    config = convert.load_draft(str(write_directory(tmp_path / "draft", CONFIG, held))).config
    assert (config.own_vocabulary, config.own_embedding) == (9, False)


def test_a_map_of_all_tokens_must_change_nothing(tmp_path):
    assert convert.load_draft(str(write_whole(tmp_path / "same", **WHOLE))).config.own_vocabulary == 61
    turned = WHOLE | {"d2t": np.arange(60, -61, -2)}
    told = refusal(convert.load_draft, write_whole(tmp_path / "turned", **turned))
    assert "d2t, t2d: of a head that knows all tokens, in another order" in told


def test_what_a_config_does_not_say_is_not_said_for_it(tmp_path):
    to_hf(str(write(tmp_path / "draft")), tmp_path / "made")
    assert "sliding_window_non_causal" not in json.loads((tmp_path / "made/config.json").read_text())
    to_hf(str(write(tmp_path / "both", sliding_window_non_causal=True)), tmp_path / "made-both")
    assert json.loads((tmp_path / "made-both/config.json").read_text())["sliding_window_non_causal"] is True


def test_its_rotary_scaling_is_spelled_for_old_readers_too(tmp_path):
    inner = CONFIG["transformer_layer_config"] | {"rope_parameters": dict(YARN)}
    to_hf(str(write(tmp_path / "draft", transformer_layer_config=inner)), tmp_path / "made")
    written = json.loads((tmp_path / "made/config.json").read_text())["transformer_layer_config"]
    assert written["rope_scaling"]["rope_type"] == "yarn"
    assert convert.load_draft(str(tmp_path / "made")).config.layers[0].rotary.theta == YARN["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type: 'eagle3' is not supported; 'dflash' is"),
        ({"sample_from_anchor": True}, "sample_from_anchor: true is not supported"),
        ({"shift_label": True}, "shift_label: true is not supported"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids: None; a list"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids: [0, 2]; a list"),
        ({"draft_vocab_size": 62}, "draft_vocab_size: 62; a number from 1 to the vocabulary's, 61, is right"),
        ({"draft_vocab_size": 8}, "d2t is [9], and [8] is right"),
        ({"draft_vocab_size": 61}, "lm_head.weight is [9, 24], and [61, 24] is right"),
        ({"mask_token_id": None}, "mask_token_id: None"),
        ({"target_hidden_size": 48}, "target_hidden_size: 48, and the draft has 24"),
        ({"transformer_layer_config": None}, "transformer_layer_config: None"),
        ({"transformer_layer_config": {"model_type": "bert"}}, "model_type 'bert' is not supported"),
        ({"transformer_layer_config": LAYERS | {"hidden_size": "x"}}, "hidden_size: 'x'"),
    ],
)
def test_what_it_cannot_be_is_refused(tmp_path, changes, told):
    assert told in refusal(convert.load_draft, write(tmp_path / "draft", **changes))


@pytest.mark.parametrize(
    "tokens", [TOKENS[::-1], np.array([0, 3, 4, 8, 20, 21, 22, 40, 99]), np.array([0, 3, 3, 8, 20, 21, 22, 40, 60])]
)
def test_a_vocabulary_that_contradicts_itself_is_refused(tmp_path, tokens):
    held = tensors() | {"d2t": np.ascontiguousarray(tokens - np.arange(9))}
    write_directory(tmp_path / "draft", CONFIG, held)
    assert "d2t: its tokens are not those that t2d marks" in refusal(convert.load_draft, tmp_path / "draft")


def test_vocabularies_are_read_as_they_are_written():
    found = write_vocabulary(TOKENS.astype(np.int32), 61)
    np.testing.assert_array_equal(read_vocabulary(found["d2t"], found["t2d"]), TOKENS)
    assert found["d2t"].dtype == np.int64


@pytest.mark.parametrize("known", [tiny.VOCABULARY, tiny.VOCABULARY - 4], ids=["all tokens", "some tokens"])
def test_decoding_asks_the_drafts_own_head_and_changes_no_token(known):
    """With the target's own embedding and head it drafts as a published draft does, of the tokens that it knows."""
    target = convert.LoadedTarget(tiny.TARGET, tiny.params(tiny.TARGET, 0), (), "tiny")
    published = convert.LoadedDraft(tiny.DRAFT, tiny.params(tiny.DRAFT, 1), "tiny")
    tokens = np.sort(np.random.default_rng(0).permutation(tiny.VOCABULARY)[:known]).astype(np.int32)
    own = {"embedding": target.params["embedding"], "head": target.params["head"][:, tokens]}
    if known < tiny.VOCABULARY:
        own["vocabulary"] = jnp.asarray(tokens)
    config = dataclasses.replace(tiny.DRAFT, own_vocabulary=known, own_embedding=True)
    draft = convert.LoadedDraft(config, published.params | own, "tiny")
    prompts, asked = tiny.prompts(5, seed=4), SamplingConfig(max_new_tokens=40)
    theirs, ours = (Engine(target, one, max_length=192).generate(prompts, asked) for one in (published, draft))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    blocks = [[one.emitted_per_block for one in found] for found in (ours, theirs)]
    assert (blocks[0] == blocks[1]) == (known == tiny.VOCABULARY)
    accepted = [
        token
        for one, prompt in zip(ours, prompts, strict=True)
        for token, drafted in zip(one.token_ids[1:], _drafted(one.emitted_per_block), strict=True)
        if drafted
    ]
    assert accepted
    assert set(accepted) <= set(tokens.tolist())


def test_a_block_is_embedded_and_scored_by_the_drafts_own_matrices():
    target, known = tiny.params(tiny.TARGET, 0), 5
    tokens = jnp.asarray([0, 2, 5, 6, 9], jnp.int32)
    rng = np.random.default_rng(2)
    own = {"embedding": jnp.roll(target["embedding"], 3, 0), "vocabulary": tokens}
    own["head"] = jnp.asarray(rng.standard_normal((tiny.SIZES["hidden_size"], known)), jnp.float32)
    config = dataclasses.replace(tiny.DRAFT, own_vocabulary=known, own_embedding=True)
    params = tiny.params(tiny.DRAFT, 1) | own
    anchors, zeros = jnp.arange(tiny.VOCABULARY, dtype=jnp.int32)[:, None], jnp.zeros(tiny.VOCABULARY, jnp.int32)
    buffers = cache.empty(config, tiny.VOCABULARY, 16, jnp.dtype("float32"))
    block = jnp.concatenate([anchors, jnp.full((tiny.VOCABULARY, 7), tiny.MASK)], axis=1)
    states = tiny.run(Draft(config), params, own["embedding"][block], buffers, zeros)[:, 1:]
    models = decode.Models(tiny.TARGET, config, 8, sharding.make_mesh())
    found = decode.propose(models, decode.Weights(target, params), anchors, buffers, zeros)
    np.testing.assert_array_equal(found, tokens[jnp.argmax(states @ own["head"], axis=-1)])


def _drafted(blocks: list[int]) -> list[bool]:
    """Which tokens after the first were drafts: all of a block but its last."""
    return [i < size - 1 for size in blocks for i in range(size)]


def test_a_published_draft_with_a_pruned_vocabulary_is_refused(tmp_path):
    held = draft_tensors() | {"d2t": TOKENS - np.arange(9)}
    write_directory(tmp_path / "draft", DRAFT_CONFIG, held)
    assert "d2t: of a pruned vocabulary, and " in refusal(convert.load_draft, tmp_path / "draft")
    assert "d2t: of a pruned vocabulary" in refusal(lambda path: to_hf(path, tmp_path / "made"), tmp_path / "draft")


def test_slots_and_the_size_of_a_block_are_told_where_the_source_left_them_open(tmp_path):
    """Readers differ about slot 0; with it, a block of 4 brings 3 drafts or 4."""
    open_ = {name: value for name, value in CONFIG.items() if name != "sample_from_anchor"}
    to_hf(str(write_directory(tmp_path / "draft", open_, tensors())), tmp_path / "made")
    written = json.loads((tmp_path / "made/config.json").read_text())
    assert written["sample_from_anchor"] is False
    assert written["block_size"] == 4
