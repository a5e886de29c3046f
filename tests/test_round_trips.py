"""What goes in comes out: Hugging Face to Flax and back, every tensor to the bit."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import convert
from convert import names
from convert.load import any_config
from convert.shards import Shards
from convert.sources import open_source
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
    made = to_hf(str(base / "flax"), base / "made", most=most, verify=True)
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


def test_an_index_says_what_lies_where(tmp_path):
    write_target(tmp_path / "source", "qwen3-moe")
    to_hf(str(tmp_path / "source"), tmp_path / "made", most=30_000)
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
        return DRAFT_CONFIG | config | {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4, 2]}}
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


def write_random(directory: Path, hf_config: dict[str, Any], dtype: Any, seed: int, parts: int) -> None:
    """Write a checkpoint of a config, its tensors random, in one file or in several."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config))
    config = meaning(directory)
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


def check_random(base: Path, hf_config: dict[str, Any], dtype: Any, seed: int, parts: int, most: int) -> None:
    write_random(base / "source", hf_config, dtype, seed, parts)
    there_and_back(base, most)


RANDOM = {
    "hf_config": configs(),
    "dtype": st.sampled_from([np.float32, jnp.bfloat16, np.float16]),
    "seed": st.integers(0, 2**32 - 1),
    "parts": st.integers(1, 3),
    "most": st.sampled_from([1, 500, 10**9]),
}
ANY_SPEED = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(ANY_SPEED, max_examples=20)
@given(**RANDOM)
def test_random_checkpoints_come_back(tmp_path_factory, hf_config, dtype, seed, parts, most):
    check_random(tmp_path_factory.mktemp("round"), hf_config, dtype, seed, parts, most)


@pytest.mark.slow
@settings(ANY_SPEED, max_examples=200)
@given(**RANDOM)
def test_two_hundred_random_checkpoints_come_back(tmp_path_factory, hf_config, dtype, seed, parts, most):
    check_random(tmp_path_factory.mktemp("round"), hf_config, dtype, seed, parts, most)
