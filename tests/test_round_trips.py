"""What goes in comes out: Hugging Face to Flax and back, every tensor to the bit."""

import hashlib
import json
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import convert
from convert import names, progress, weights
from convert.flax_checkpoint import FlaxSource
from convert.load import any_config
from convert.shards import Shards
from convert.sources import open_source
from convert.speculators import is_speculators, read_config
from convert.to_flax import to_flax
from convert.to_hf import to_hf
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError
from tests.checkpoints import DRAFT_CONFIG, same, write_directory, write_shards, write_target
from tests.torch_models import EXPERTS, LLAMA3, SIZES, YARN

FAMILIES = ["qwen3", "qwen3-tied", "qwen3-moe", "qwen3-moe-partly-dense", "llama", "llama3-biased"]


def bits(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every stored tensor by its name: dtype, shape and bytes."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a handle, not a dictionary
                tensor = opened.get_tensor(name)
                raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                found[name] = str(tensor.dtype), list(tensor.shape), raw
    return found


def meaning(directory: Path) -> TargetConfig | DraftConfig:
    return any_config(open_source(str(directory)))


def there_and_back(base: Path, most: int = 10**9) -> Path:
    flax = to_flax(str(base / "source"), base / "flax", verify=True)
    made = to_hf(str(base / "flax"), base / "made", max_shard_bytes=most, verify=True)
    assert (flax["kind"], flax["dtype"], flax["parameters"]) == (made["kind"], made["dtype"], made["parameters"])
    assert bits(base / "made") == bits(base / "source")
    assert meaning(base / "made") == meaning(base / "source") == meaning(base / "flax")
    return base / "made"


@pytest.mark.parametrize("most", [10**9, 20_000], ids=["one-file", "shards"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_target_comes_back_and_transformers_loads_it(tmp_path, name, most):
    model, config, params = write_target(tmp_path / "source", name, max_shard_size=most)
    made = there_and_back(tmp_path, most)
    files = sorted(made.glob("*.safetensors"))
    assert (len(files) > 2) == (most < 10**9)
    # A file holds what it may, or one tensor.
    assert all(file.stat().st_size < most + 10_000 for file in files)
    again, found = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(found.values()), found
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    loaded = convert.load_target(str(tmp_path / "flax"))
    assert loaded.config == config
    assert same(loaded.params, params)


@pytest.mark.parametrize(
    ("name", "content"),
    [("generation_config.json", '{"eos_token_id": [1,'), ("tokenizer.json", "version https://git-lfs"),
     ("generation_config.json", '{"eos_token_id": "x"}')],
)  # fmt: skip
def test_what_lies_beside_the_weights_and_cannot_be_used_is_refused(tmp_path, name, content):
    write_target(tmp_path / "source", "qwen3")
    (tmp_path / "source" / name).write_text(content)
    with pytest.raises(UserError, match=rf"source/{name}: "):
        to_hf(str(tmp_path / "source"), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_that_cannot_be_read_is_named_and_not_the_destination(tmp_path):
    write_target(tmp_path / "source", "qwen3")
    (tmp_path / "source/merges.txt").symlink_to("/proc/self/mem")  # opens, and cannot be read
    with pytest.raises(UserError, match=r"source/merges.txt: cannot be read"):
        to_hf(str(tmp_path / "source"), tmp_path / "made")


def test_a_tensor_that_memory_does_not_hold_is_told(tmp_path, monkeypatch):
    write_target(tmp_path / "source", "qwen3")
    monkeypatch.setattr(weights, "assemble", Mock(side_effect=MemoryError))
    with pytest.raises(UserError, match=r"source: one of its tensors is larger than the memory that there is"):
        to_flax(str(tmp_path / "source"), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_of_thousands_of_wrong_names_a_few_are_told(tmp_path):
    write_target(tmp_path / "source", "qwen3-moe")
    file = tmp_path / "source/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 9, "layer_types": None}))
    with pytest.raises(UserError, match=r"missing model\.layers\.\d+\.\S+, .* and [\d,]+ more") as caught:
        to_hf(str(tmp_path / "source"), tmp_path / "made")
    assert len(str(caught.value)) < 1000


def test_an_index_says_what_lies_where(tmp_path):
    write_target(tmp_path / "source", "qwen3-moe")
    to_hf(str(tmp_path / "source"), tmp_path / "made", max_shard_bytes=30_000)
    index = json.loads((tmp_path / "made/model.safetensors.index.json").read_text())
    tensors = bits(tmp_path / "made")
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "made" / file, framework="np") as opened:
            assert name in opened.keys()  # noqa: SIM118
    assert index["weight_map"].keys() == tensors.keys()


def test_a_manifest_says_what_was_converted(tmp_path):
    write_target(tmp_path / "source", "qwen3")
    made = to_hf(str(tmp_path / "source"), tmp_path / "made", "bfloat16")
    assert json.loads((tmp_path / "made/manifest.json").read_text()) == made
    assert (made["kind"], made["dtype"], made["source"]["format"]) == ("target", "bfloat16", "Hugging Face directory")
    file = tmp_path / "source/model.safetensors"
    assert made["source"]["files"]["model.safetensors"] == hashlib.sha256(file.read_bytes()).hexdigest()
    to_hf(str(tmp_path / "made"), tmp_path / "again")  # its manifest does not make it a checkpoint of ours
    assert bits(tmp_path / "again") == bits(tmp_path / "made")


def test_what_is_not_what_was_read_is_told(tmp_path, monkeypatch):
    write_target(tmp_path / "source", "qwen3")
    write = Shards.write

    def flipped(self, name, array):
        array = np.array(array)
        if name == "model.norm.weight":
            array.view(np.uint8)[7] ^= 1
        write(self, name, array)

    monkeypatch.setattr(Shards, "write", flipped)
    with pytest.raises(UserError, match=r"^--verify: final_norm/scale is not what was read; "):
        to_hf(str(tmp_path / "source"), tmp_path / "made", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_one_tensor_is_held_at_a_time(tmp_path, monkeypatch, verify, dtype):
    """Whatever is made of a tensor is gone before the next one is read; two more while each is looked at again."""
    write_target(tmp_path / "source", "qwen3-moe")
    to_flax(str(tmp_path / "source"), tmp_path / "flax")
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def counted(make):
        def made(*arguments):
            nonlocal most
            array = make(*arguments).view(Held)
            alive.add(array)
            most = max(most, len(alive))
            return array

        return made

    monkeypatch.setattr(weights, "assemble", counted(weights.assemble))
    monkeypatch.setattr(FlaxSource, "_read", counted(FlaxSource._read))
    for name in ("source", "flax"):
        to_hf(str(tmp_path / name), tmp_path / f"from-{name}", dtype, verify=verify, watch=progress.show)
    # One as it is stored, and one as it is asked for; or the two that are compared.
    assert most <= 2 + (verify and dtype is not None)


class Held(np.ndarray):
    """An array that says when it is gone."""

    __hash__ = object.__hash__  # type: ignore[assignment]


ROTARY: list[dict[str, Any]] = [{}, {"rope_scaling": YARN}, {"rope_parameters": LLAMA3}, {"rope_theta": 5e5}]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A small config of any family, sizes drawn."""
    heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]))
    sizes = {
        "vocab_size": draw(st.integers(8, 40)),
        "hidden_size": draw(st.integers(1, 12)),
        "intermediate_size": draw(st.integers(1, 12)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 2 * draw(st.integers(1, 4)),
    }
    rotary: dict[str, Any] = draw(st.sampled_from(ROTARY))
    config = SIZES | {"rms_norm_eps": 1e-6, "rope_theta": 1e4} | rotary | sizes
    kind = draw(st.sampled_from(["qwen3", "qwen3_moe", "llama", "draft", "speculators"]))
    biased = {"attention_bias": draw(st.booleans())}
    if kind == "draft":
        return DRAFT_CONFIG | config | {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 2]}}
    if kind == "speculators":
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": config | {"model_type": "qwen3"},
            "draft_vocab_size": draw(st.integers(2, sizes["vocab_size"])),
            "block_size": 4,
            "aux_hidden_state_layer_ids": [2, 5, 3],
            "mask_token_id": 3,
        }
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    own = {"model_type": kind, "architectures": [architecture], "tie_word_embeddings": draw(st.booleans())}
    if kind == "qwen3_moe":
        last = sizes["num_hidden_layers"] - 1
        own |= EXPERTS | {
            "norm_topk_prob": draw(st.booleans()),
            "mlp_only_layers": draw(st.sampled_from([[], [last + 1]])),
        }
    return config | biased | own


def write_random(
    directory: Path, hf_config: dict[str, Any], held: Collection[str], dtype: Any, seed: int, parts: int
) -> None:
    """Write a checkpoint of a config, its tensors random, in one file or in several; `held` as `read_config` has it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config))
    config = read_config(hf_config, held) if is_speculators(hf_config) else meaning(directory)
    rng = np.random.default_rng(seed)
    wanted = names.expected(config, names.published_layout(config))
    tensors = {name: rng.standard_normal(tensor.shape).astype(dtype) for name, tensor in wanted.items()}
    if "d2t" in tensors:
        size = len(tensors["d2t"])
        tokens = np.sort(rng.permutation(config.vocab_size)[:size])
        marked = np.isin(np.arange(config.vocab_size), tokens)
        tensors |= {"d2t": tokens - np.arange(size), "t2d": marked}
    if parts == 1:
        write_directory(directory, hf_config, tensors)
    else:
        write_shards(directory, tensors, {name: f"part-{i % parts}.safetensors" for i, name in enumerate(tensors)})


def check_random(base: Path, *, most: int, **drawn: Any) -> None:
    write_random(base / "source", **drawn)
    there_and_back(base, most)


RANDOM: dict[str, st.SearchStrategy[Any]] = {
    "hf_config": configs(),
    "held": st.sets(st.sampled_from(["embedding", "head"])),
    "dtype": st.sampled_from([np.float32, jnp.bfloat16, np.float16]),
    "seed": st.integers(0, 2**32 - 1),
    "parts": st.integers(1, 3),
    "most": st.sampled_from([1, 500, 10**9]),
}
ANY_SPEED = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(ANY_SPEED, max_examples=20)
@given(drawn=st.fixed_dictionaries(RANDOM))
def test_random_checkpoints_come_back(tmp_path_factory, drawn):
    check_random(tmp_path_factory.mktemp("round"), **drawn)


@pytest.mark.slow
@settings(ANY_SPEED, max_examples=200)
@given(drawn=st.fixed_dictionaries(RANDOM))
def test_two_hundred_random_checkpoints_come_back(tmp_path_factory, drawn):
    check_random(tmp_path_factory.mktemp("round"), **drawn)
