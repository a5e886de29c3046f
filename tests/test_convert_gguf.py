import contextlib
import dataclasses
import re
import struct
from pathlib import Path

import gguf
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from transformers import Qwen3Config

import convert
from convert import gguf_header
from convert.gguf_config import read
from convert.gguf_header import StoredTensor
from dflash_jax.errors import UserError
from dflash_jax.rope import Rotary
from tests import torch_models
from tests.checkpoints import demo_file, refusal, same, write_gguf, write_target

GOLDEN_EMBEDDING = np.float32(0.002536773681640625) * np.array([-42, 13, 19, -9], np.float32)
# Rows 0, 2, 1 and 3 of the file: llama.cpp lays the two halves of a head, here of 64, between each other.
GOLDEN_QUERY = np.array([-0.0963134765625, -0.1591796875, -0.1173095703125, -0.06280517578125], np.float32)


@pytest.fixture(scope="module")
def demo() -> convert.LoadedTarget:
    return convert.load_target(str(demo_file()), None)


def test_the_demo_target_loads(demo):
    config = demo.config
    assert sum(leaf.size for leaf in jax.tree.leaves(demo.params)) == 134_515_008
    assert (config.family, config.num_layers, config.hidden_size, config.intermediate_size) == ("llama", 30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert config.rms_norm_eps == 1e-05
    assert config.layers[0].rotary == Rotary(theta=100_000.0)
    assert config.tie_word_embeddings
    assert config.bos_token_id == 1
    assert demo.stop_token_ids == (2,)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(demo.params)} == {"float32"}


def test_the_demo_targets_values_are_those_that_its_blocks_spell(demo):
    """Computed by hand from the file's bytes: value = scale * nibble + minimum, or scale * byte."""
    embedding = demo.params["embedding"]
    np.testing.assert_array_equal(
        embedding[0, :4],
        np.array([-0.10654449462890625, 0.032978057861328125, 0.048198699951171875, -0.022830963134765625], np.float32),
    )
    query = demo.params["layers_0"]["attention"]["q_proj"]["kernel"]
    np.testing.assert_array_equal(query[0, [0, 1, 32, 33]], GOLDEN_QUERY)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3-biased", "llama", "llama3-biased"])
def test_a_file_loads_as_the_directory_it_was_made_from(tmp_path, name):
    write_gguf(tmp_path / "model.gguf", name, rope_factors=llama3_factors() if "llama3" in name else None)
    write_target(tmp_path / "model", name)
    ours, theirs = (convert.load_target(str(tmp_path / path), None) for path in ("model.gguf", "model"))
    assert same(ours.params, theirs.params)
    changed = {"layers", "max_positions", "bos_token_id", "stop_token_ids"}
    for field in dataclasses.fields(ours.config):
        if field.name not in changed:
            assert getattr(ours.config, field.name) == getattr(theirs.config, field.name)
    if "llama3" not in name:
        assert ours.config.layers == theirs.config.layers


def llama3_factors(head_dim: int = 10, factor: float = 8.0) -> np.ndarray:
    """`generate_extra_tensors` of llama.cpp's converter, for theta 10000 and an original context of 8192."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 10_000 ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_recovered_from_its_frequencies(tmp_path):
    write_gguf(tmp_path / "model.gguf", "llama3-biased", rope_factors=llama3_factors())
    rotary = convert.load_target(str(tmp_path / "model.gguf"), None).config.layers[0].rotary
    assert rotary == Rotary(theta=1e4, kind="llama3", factor=8.0, original_max_positions=8192)


def test_frequencies_of_another_type_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, "llama", rope_factors=np.ones(4, np.float32))
    content = bytearray(file.read_bytes())
    # The type follows the name, the number of dimensions and the one dimension.
    at = content.index(b"rope_freqs.weight") + len(b"rope_freqs.weight") + 4 + 8
    content[at : at + 4] = struct.pack("<I", gguf.GGMLQuantizationType.I8)
    file.write_bytes(content)
    assert "tensor rope_freqs.weight: I8 is not supported; F32 is" in refusal(convert.load_target, file, None)


def test_frequencies_that_are_no_known_scaling_are_refused(tmp_path):
    factors = llama3_factors() + np.array([0, 0, 0, 0.01, 0], np.float32)
    write_gguf(tmp_path / "model.gguf", "llama3-biased", rope_factors=factors)
    assert "rope_freqs.weight: not the llama3 scaling" in refusal(convert.load_target, tmp_path / "model.gguf", None)


SIZES = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 8,
    "feed_forward_length": 16,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "rope.freq_base": 1e4,
}
TENSORS = {"token_embd.weight": StoredTensor((32, 8), gguf.GGMLQuantizationType.F32, 0, 32)}


def config_of(without: str = "", **metadata: object) -> dict:
    """The config of a Llama's metadata, where a key's __ stands for a dot."""
    changes = {key.replace("__", "."): value for key, value in metadata.items()}
    fields = {f"llama.{key}": value for key, value in SIZES.items() if key != without}
    return read({"general.architecture": "llama"} | fields | changes, TENSORS, None)


def test_metadata_become_a_config():
    config = config_of(
        tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=5, tokenizer__ggml__bos_token_id=1
    )
    assert config["head_dim"] == 4
    assert config["num_key_value_heads"] == 2
    assert config["vocab_size"] == 32
    assert config["rms_norm_eps"] == 1e-05
    assert config["tie_word_embeddings"]
    assert config["eos_token_id"] == [2, 5]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}


def test_scaled_rotary_settings_are_read():
    linear = config_of(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear["rope_parameters"] == {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    yarn = config_of(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=32,
        llama__rope__scaling__yarn_beta_fast=16.0,
    )
    assert yarn["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
    }


@pytest.mark.parametrize("field", SIZES)
def test_no_number_is_guessed(field):
    with pytest.raises(UserError, match=f"metadata llama.{field} is missing"):
        config_of(without=field)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "gemma3"}, "general.architecture 'gemma3' is not supported; qwen3 and llama are"),
        ({"llama__expert_count": 8}, "llama.expert_count: 8 is not supported"),
        ({"llama__rope__dimension_count": 2}, "rope.dimension_count: 2 is not supported; 4 is"),
        ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type: 'longrope' is not supported"),
        ({"llama__attention__head_count": [2, 2]}, "a number for each layer is not supported"),
        ({"llama__attention__head_count": 0}, "metadata llama.attention.head_count: 0; 1 or more is right"),
        ({"split__count": 3}, "one of 3 parts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(metadata, message):
    with pytest.raises(UserError, match=re.escape(message)):
        config_of(**metadata)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf", "qwen3")
    return tmp_path / "model.gguf"


def test_damaged_files_are_refused(file):
    whole = file.read_bytes()
    for length in (0, 3, 10, 24, 60, len(whole) // 2, len(whole) - 64):
        file.write_bytes(whole[:length])
        assert refusal(convert.load_target, file, None).startswith(f"{file}: truncated")
    damaged = {
        "not a GGUF file": b"PK" + whole[2:],
        "GGUF version 1 is not supported": whole[:4] + struct.pack("<I", 1) + whole[8:],
        "big-endian": whole[:4] + struct.pack(">I", 3) + whole[8:],
        "truncated or corrupt": whole[:16] + struct.pack("<Q", 1 << 40) + whole[24:],
    }
    for message, content in damaged.items():
        file.write_bytes(content)
        assert message in refusal(convert.load_target, file, None)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.data())
def test_a_corrupt_header_is_refused_or_read_but_never_crashes(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    if not file.exists():
        write_gguf(file, "qwen3")
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 3_000))] = data.draw(st.integers(0, 255))
    broken = file.with_name("broken.gguf")
    broken.write_bytes(content)
    with contextlib.suppress(UserError):
        gguf_header.read_header(broken)


def test_missing_and_unexpected_tensors_are_named(tmp_path):
    write_gguf(tmp_path / "model.gguf", "qwen3", qwen3__block_count=2)
    message = refusal(convert.load_target, tmp_path / "model.gguf", None)
    assert "unexpected blk.2.attn_k.weight, blk.2.attn_k_norm.weight" in message


def test_a_draft_is_no_gguf_file(file):
    assert (
        refusal(convert.load_draft, file, None) == f"{file}: a .gguf file holds a target; a draft's directory is right"
    )


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")])
def test_floats_are_kept_and_quantised_values_widened(monkeypatch, tmp_path, kind, dtype):
    blocks = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}  # what quantised types are stored in
    monkeypatch.setitem(torch_models.TARGETS, "wide", Qwen3Config(**torch_models.SIZES | blocks))
    write_gguf(tmp_path / "model.gguf", "wide", kind=gguf.GGMLQuantizationType[kind])
    write_target(tmp_path / "model", "wide")
    ours, theirs = (convert.load_target(str(tmp_path / path), None).params for path in ("model.gguf", "model"))
    kernel, exact = (tree["layers_0"]["mlp"]["up_proj"]["kernel"] for tree in (ours, theirs))
    assert kernel.dtype == dtype
    assert ours["final_norm"]["scale"].dtype == "float32"
    np.testing.assert_allclose(np.float32(kernel), exact, atol=0.01)
    if kind != "Q8_0":
        np.testing.assert_array_equal(np.asarray(kernel), np.asarray(exact).astype(kernel.dtype))


def test_types_that_cannot_be_dequantised_are_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", "qwen3", kind=gguf.GGMLQuantizationType.I8)
    assert "blk.0.attn_q.weight (I8)" in refusal(convert.load_target, tmp_path / "model.gguf", None)
