import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import LoadedTarget, load_target
from convert.published import publish
from convert.to_flax import to_flax
from convert.trees import flatten
from dflash_jax import parameters, sharding
from dflash_jax.errors import UserError
from tests import checkpoints, tiny
from tests.torch_models import random_params
from training.config import DraftShape, RunConfig
from training.initial import draft_config, fingerprint, initial_draft

QWEN3 = dataclasses.replace(tiny.TARGET, layers=tiny.TARGET.layers[:1] * 6)
LLAMA = dataclasses.replace(QWEN3, family="llama", qk_norm=False)
BIASED = dataclasses.replace(QWEN3, attention_bias=True)
SHAPE = DraftShape(layers=3, taps=2, block_size=4, mask_token_id=tiny.MASK)
CONFIG = RunConfig("x", draft=SHAPE)
DRAFT = draft_config(CONFIG, QWEN3)


def loaded(config=QWEN3, dtype=jnp.float32, stops=()):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), random_params(config, 0))
    return LoadedTarget(config, params, stops, "target")


def begun(target=None, **changes):
    config, params = initial_draft(dataclasses.replace(CONFIG, **changes), target or loaded(), sharding.make_mesh())
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, parameters.shapes(config))
    return config, flatten(params)


def refusal(**changes):
    with pytest.raises(UserError) as caught:
        begun(**changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def written(tmp_path):
    """Write a draft in the published layout; return where, and its parameters."""

    def write(config=DRAFT):
        params = random_params(config, 7)
        publish(tmp_path / "draft", config, params, "float32")
        return str(tmp_path / "draft"), params

    return write


def test_random_weights_follow_from_the_seed():
    config, one = begun()
    assert config == DRAFT
    again, other = begun()[1], begun(seed=1)[1]
    matrices = [path for path, leaf in one.items() if leaf.ndim == 2]
    assert len(matrices) == 3 * 7 + 1
    assert all((one[path] == again[path]).all() and (one[path] != other[path]).any() for path in matrices)
    assert all((leaf == 1).all() for path, leaf in one.items() if path not in matrices)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layers_of_the_target_are_taken_evenly_from_first_to_last(dtype):
    target = loaded(dtype=dtype)
    _, ours = begun(target, init_from="target")
    theirs = flatten(target.params)
    for place, source in enumerate((0, 2, 5)):
        paths = [path for path in ours if path.startswith(f"layers_{place}/")]
        assert len(paths) == 11
        for path in paths:
            assert (ours[path] == theirs[path.replace(f"layers_{place}/", f"layers_{source}/")]).all(), path
    assert (ours["final_norm/scale"] == theirs["final_norm/scale"]).all()


def test_what_a_llama_lacks_stays_as_it_begins():
    target = loaded(LLAMA)
    _, ours = begun(target, init_from="target")
    norms = [path for path in ours if "q_norm" in path or "k_norm" in path]
    assert len(norms) == 6
    assert all((ours[path] == 1).all() for path in norms)
    theirs = flatten(target.params)
    assert (ours["layers_2/mlp/up_proj/kernel"] == theirs["layers_5/mlp/up_proj/kernel"]).all()


def test_biases_are_left_behind():
    _, ours = begun(loaded(BIASED), init_from="target")
    assert not any("bias" in path for path in ours)


def test_what_the_draft_reads_first_is_the_mean_of_its_taps():
    _, ours = begun(init_from="target")
    taps = np.random.default_rng(0).normal(size=(5, 2, QWEN3.hidden_size)).astype(np.float32)
    fused = taps.reshape(5, -1) @ np.asarray(ours["fc/kernel"])
    np.testing.assert_allclose(fused, taps.mean(axis=1), atol=1e-6)


def test_one_layer_is_the_target_s_first():
    target = loaded()
    _, ours = begun(target, init_from="target", draft=dataclasses.replace(SHAPE, layers=1))
    theirs = flatten(target.params)["layers_0/attention/q_proj/kernel"]
    assert (ours["layers_0/attention/q_proj/kernel"] == theirs).all()


def test_another_draft_brings_its_own_config(written):
    """Its taps, windows and widths are what its weights were made for."""
    layers = (DRAFT.layers[0], dataclasses.replace(DRAFT.layers[0], window=6, causal=True), DRAFT.layers[0])
    theirs = dataclasses.replace(DRAFT, target_layer_ids=(0, 4), layers=layers, intermediate_size=40)
    path, params = written(theirs)
    config, ours = begun(init_from=path)
    assert config == theirs
    assert checkpoints.same(ours, flatten(params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 8}, "--draft.block-size: 8, and {path} has 4; --draft.block-size 4 is right"),
        ({"mask_token_id": 9}, "--draft.mask-token-id: 9, and {path} has 10; --draft.mask-token-id 10 is right"),
        ({"layers": 2}, "--draft.layers: 2, and {path} has 3; --draft.layers 3 is right"),
        ({"taps": 3}, "--draft.taps: 3, and {path} has 2; --draft.taps 2 is right"),
    ],
)
def test_a_draft_of_another_shape_than_asked_for_is_refused(written, change, message):
    path, _ = written()
    asked = dataclasses.replace(SHAPE, **change)
    assert refusal(init_from=path, draft=asked) == message.format(path=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "hidden_size: the draft has 32, the target 16"),
        ({"vocab_size": 12}, "vocab_size: the draft has 12, the target 11"),
        ({"num_target_layers": 8}, "num_target_layers: the draft was made for 8 layers, the target has 6"),
        (
            {"target_layer_ids": (1, 5), "num_target_layers": None},
            "target_layer_ids: 5 cannot be tapped in a target of 6 layers",
        ),
    ],
)
def test_a_draft_of_another_target_is_refused(written, change, message):
    path, _ = written(dataclasses.replace(DRAFT, **change))
    assert refusal(init_from=path).startswith(f"--init-from {path}: not a draft for this target: {message}")


def test_a_draft_with_a_head_of_its_own_is_refused(written):
    path, _ = written(dataclasses.replace(DRAFT, own_vocabulary=DRAFT.vocab_size))
    assert refusal(init_from=path).startswith(f"--init-from {path}: it has a head of its own, and cannot be trained")


def test_a_draft_in_bfloat16_is_trained_in_float32(tmp_path):
    publish(tmp_path / "half", DRAFT, random_params(DRAFT, 7), "bfloat16")
    begun(init_from=str(tmp_path / "half"))


def test_what_is_no_draft_is_refused(tmp_path):
    assert "absent" in refusal(init_from=str(tmp_path / "absent"))
    checkpoints.write_target(tmp_path / "target", "qwen3")
    assert "is not a draft" in refusal(init_from=str(tmp_path / "target"))


def test_a_stop_that_only_the_generation_config_names_is_no_mask():
    assert refusal(target=loaded(stops=(3, tiny.MASK))).startswith(f"--draft.mask-token-id: {tiny.MASK}; a row of")


def matrix(values):
    return {"one": {"kernel": jnp.asarray(values)}}


def test_equal_weights_have_one_fingerprint_and_others_another():
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    flipped = values.copy()
    flipped.view(np.uint32)[3, 2] ^= 1
    exchanged = values[[1, 0, 2, 3, 4, 5]]
    trees = [
        matrix(values),
        matrix(flipped),
        matrix(exchanged),
        matrix(values[:, [0, 2, 1, 3]]),
        matrix(values.T),
        matrix(values.reshape(4, 6)),
        matrix(jnp.asarray(values).astype(jnp.bfloat16)),
        {"two": matrix(values)["one"]},
        matrix(values) | {"zero": jnp.zeros(3)},
    ]
    marks = [fingerprint(tree) for tree in trees]
    assert len(set(marks)) == len(trees)
    assert fingerprint(matrix(values.copy())) == marks[0]


@pytest.mark.parametrize("distance", [1, 8, 16])
def test_an_exchange_of_rows_shows_in_weights_with_few_bits(distance):
    """bfloat16 as float32, 4,096 wide: differences and places share so many factors of two that products wrap to 0."""
    values = np.random.default_rng(0).normal(size=(32, 4096)).astype(jnp.bfloat16).astype(np.float32)
    exchanged = values.copy()
    exchanged[[0, distance]] = values[[distance, 0]]
    assert fingerprint(matrix(values)) != fingerprint(matrix(exchanged))


def test_a_target_has_one_fingerprint_whatever_its_format(tmp_path):
    checkpoints.write_target(tmp_path / "hf", "qwen3")
    checkpoints.write_target(tmp_path / "sharded", "qwen3", max_shard_size="20KB")
    checkpoints.write_gguf(tmp_path / "target.gguf", "qwen3")
    to_flax(str(tmp_path / "hf"), tmp_path / "flax")
    places = [tmp_path / name for name in ("hf", "sharded", "target.gguf", "flax")]
    marks = {fingerprint(load_target(str(place), "float32").params) for place in places}
    assert len(marks) == 1
    assert fingerprint(load_target(str(places[0]), "bfloat16").params) not in marks
