import contextlib
import dataclasses
import functools
import itertools
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import gguf
import hypothesis
import jax
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from hypothesis import strategies as st

import convert
from convert import gguf_header, weights
from convert.gguf_config import read
from convert.gguf_header import StoredTensor
from dflash_jax.errors import UserError
from dflash_jax.rope import Rotary
from tests.checkpoints import demo_file, finish_gguf, gguf_writer, refusal, same, write_gguf, write_target

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


def retype(file: Path, name: str, kind: int) -> None:
    """Change the type that a tensor's entry in the header names."""
    content = bytearray(file.read_bytes())
    at = content.index(name.encode()) + len(name)
    (dimensions,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at + 4 + 8 * dimensions, kind)
    file.write_bytes(content)


def test_frequencies_of_another_type_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, "llama", rope_factors=np.ones(4, np.float32))
    retype(file, "rope_freqs.weight", gguf.GGMLQuantizationType.I8)
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


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A type as ggml defines it: a block's values and bytes, where its floats end, and what it means."""

    count: int
    size: int
    floats: list[int]
    decode: Callable[[bytes], list[float]]


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def nibble(packed: bytes, i: int) -> int:
    """The low nibbles hold the first half of the values, the high nibbles the second."""
    count = len(packed)
    return packed[i] & 15 if i < count else packed[i - count] >> 4


def bit(packed: bytes, i: int) -> int:
    return int.from_bytes(packed, "little") >> i & 1


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def decode_q4_0(block: bytes) -> list[float]:
    d, quants = half(block, 0), block[2:]
    return [d * (nibble(quants, i) - 8) for i in range(32)]


def decode_q4_1(block: bytes) -> list[float]:
    d, minimum, quants = half(block, 0), half(block, 2), block[4:]
    return [d * nibble(quants, i) + minimum for i in range(32)]


def decode_q5_0(block: bytes) -> list[float]:
    d, high, quants = half(block, 0), block[2:6], block[6:]
    return [d * (nibble(quants, i) + 16 * bit(high, i) - 16) for i in range(32)]


def decode_q5_1(block: bytes) -> list[float]:
    d, minimum, high, quants = half(block, 0), half(block, 2), block[4:8], block[8:]
    return [d * (nibble(quants, i) + 16 * bit(high, i)) + minimum for i in range(32)]


def decode_q8_0(block: bytes) -> list[float]:
    d = half(block, 0)
    return [d * signed(byte) for byte in block[2:]]


def scale_and_minimum(packed: bytes, group: int) -> tuple[int, int]:
    """Six bits each: those of groups 0 to 3 lie together, those of 4 to 7 have their upper two bits above these."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low = packed[group + 4]
    return (low & 15) + 16 * (packed[group - 4] >> 6), (low >> 4) + 16 * (packed[group] >> 6)


def decode_k(block: bytes, quant: Callable[[int, int], int]) -> list[float]:
    """Q4_K and Q5_K: 8 groups of 32 values, each with a scale and a minimum."""
    d, d_minimum = half(block, 0), half(block, 2)
    values = []
    for group in range(8):
        scale, minimum = scale_and_minimum(block[4:16], group)
        values += [d * scale * quant(group, i) - d_minimum * minimum for i in range(32)]
    return values


def group_nibble(packed: bytes, group: int, i: int) -> int:
    """Every 32 bytes hold two groups of 32 values."""
    pair = group // 2
    return nibble(packed[32 * pair : 32 * pair + 32], 32 * (group % 2) + i)


def decode_q4_k(block: bytes) -> list[float]:
    return decode_k(block, lambda group, i: group_nibble(block[16:], group, i))


def decode_q5_k(block: bytes) -> list[float]:
    return decode_k(block, lambda group, i: group_nibble(block[48:], group, i) + 16 * (block[16 + i] >> group & 1))


def decode_q6_k(block: bytes) -> list[float]:
    """Two halves of 128 values, each of four quarters of 32; every 16 values have a scale."""
    low, high, scales, d = block[:128], block[128:192], block[192:208], half(block, 208)
    values = []
    for i in range(256):
        part, quarter, j = i // 128, i % 128 // 32, i % 32
        nibbles = low[64 * part : 64 * part + 64]
        upper = high[32 * part + j] >> 2 * quarter & 3
        values.append(d * signed(scales[i // 16]) * (nibble(nibbles, i % 128) + 16 * upper - 32))
    return values


BLOCKS = {
    "F32": Blocks(1, 4, [3], lambda block: [*struct.unpack("<f", block)]),
    "F16": Blocks(1, 2, [1], lambda block: [half(block, 0)]),
    "BF16": Blocks(1, 2, [1], lambda block: [*struct.unpack("<f", b"\0\0" + block)]),
    "Q8_0": Blocks(32, 34, [1], decode_q8_0),
    "Q4_0": Blocks(32, 18, [1], decode_q4_0),
    "Q4_1": Blocks(32, 20, [1, 3], decode_q4_1),
    "Q5_0": Blocks(32, 22, [1], decode_q5_0),
    "Q5_1": Blocks(32, 24, [1, 3], decode_q5_1),
    "Q4_K": Blocks(256, 144, [1, 3], decode_q4_k),
    "Q5_K": Blocks(256, 176, [1, 3], decode_q5_k),
    "Q6_K": Blocks(256, 210, [209], decode_q6_k),
}
KEPT = {"F16": "float16", "BF16": "bfloat16"}

# Rows of every matrix are multiples of 256, the longest block.
WIDE = {
    "max_position_embeddings": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4},
}
HEADS = {"attn_q.weight": 4, "attn_k.weight": 2}
WIDE_TENSORS = {
    "token_embd.weight": ("embedding", (61, 256)),
    "output_norm.weight": ("final_norm/scale", (256,)),
    "output.weight": ("head", (61, 256)),
}
WIDE_LAYER = {
    "attn_norm.weight": ("input_norm/scale", (256,)),
    "attn_q.weight": ("attention/q_proj/kernel", (256, 256)),
    "attn_k.weight": ("attention/k_proj/kernel", (128, 256)),
    "attn_v.weight": ("attention/v_proj/kernel", (128, 256)),
    "attn_output.weight": ("attention/o_proj/kernel", (256, 256)),
    "ffn_norm.weight": ("mlp_norm/scale", (256,)),
    "ffn_gate.weight": ("mlp/gate_proj/kernel", (512, 256)),
    "ffn_up.weight": ("mlp/up_proj/kernel", (512, 256)),
    "ffn_down.weight": ("mlp/down_proj/kernel", (256, 512)),
}
QWEN3_LAYER = {
    "attn_q_norm.weight": ("attention/q_norm/scale", (64,)),
    "attn_k_norm.weight": ("attention/k_norm/scale", (64,)),
}
# By path in our tree: values of our layout, and the dtype that they have as they are stored.
Expected = dict[str, tuple[np.ndarray, str]]


def wide_tensors(family: str, layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Every tensor's name in the file, path in our tree, and shape in the file."""
    for name, (path, shape) in WIDE_TENSORS.items():
        yield name, path, shape
    for i in range(layers):
        for name, (path, shape) in (WIDE_LAYER | (QWEN3_LAYER if family == "qwen3" else {})).items():
            yield f"blk.{i}.{name}", f"layers_{i}/{path}", shape


@functools.cache
def random_blocks(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Blocks to build tensors of, and their values.

    Values of quantised types are multiples of 2**-24 and below 2**14, so that Python computes them without rounding,
    and float32 rounds them once, as it does in ggml.
    """
    layout = BLOCKS[kind]
    raw = np.random.default_rng(0).integers(0, 256, (8192 // layout.count, layout.size), np.uint8)
    # Without the exponent's highest bit a float is finite: less than 2.
    raw[:, layout.floats] &= 0xBF
    return raw, np.array([layout.decode(block.tobytes()) for block in raw], np.float32)


def write_blocks(file: Path, family: str, kind_of: Callable[[str], str], layers: int = 1) -> Expected:
    """Write a file whose matrices have the types that `kind_of` gives their names, and norms F32."""
    writer = gguf_writer(file, WIDE | {"model_type": family, "num_hidden_layers": layers})
    rng = np.random.default_rng(1)
    expected = {}
    for name, path, shape in wide_tensors(family, layers):
        kind = kind_of(name) if len(shape) == 2 else "F32"
        raw, values = random_blocks(kind)
        picked = rng.integers(len(raw), size=(*shape[:-1], shape[-1] // BLOCKS[kind].count))
        stored, meant = raw[picked].reshape(*shape[:-1], -1), values[picked].reshape(shape)
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        heads = HEADS.get(name.removeprefix("blk.0.").removeprefix("blk.1."))
        if family == "llama" and heads:
            meant = meant[[64 * head + 2 * (i % 32) + i // 32 for head in range(heads) for i in range(64)]]
        expected[path] = (meant.T if path == "head" or "kernel" in path else meant), KEPT.get(kind, "float32")
    finish_gguf(writer)
    return expected


def check_loads(file: Path, expected: Expected) -> None:
    """Compare every tensor, as it is kept and as each dtype."""
    for dtype in (None, "float32", "bfloat16"):
        params = flatten_dict(convert.load_target(str(file), dtype).params, sep="/")
        assert params.keys() == expected.keys()
        for path, (values, kept) in expected.items():
            assert params[path].dtype == (dtype or kept)
            meant = torch.tensor(values).to(getattr(torch, dtype or kept)).float().numpy()
            np.testing.assert_array_equal(np.float32(params[path]), meant)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read most matrices in several steps, the last one shorter: 100 rows of 256 values."""
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", 25_600)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_every_type_has_the_values_that_its_blocks_spell(tmp_path, kind, family):
    expected = write_blocks(tmp_path / "model.gguf", family, lambda name: kind)
    check_loads(tmp_path / "model.gguf", expected)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_file_mixes_types_as_published_ones_do(tmp_path, family):
    larger = ("output.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight")
    expected = write_blocks(
        tmp_path / "model.gguf", family, lambda name: "Q6_K" if name in larger else "Q4_K", layers=2
    )
    assert {kept for _, kept in expected.values()} == {"float32"}
    check_loads(tmp_path / "model.gguf", expected)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_file_holds_all_types_at_once(tmp_path, family):
    kinds = itertools.cycle(BLOCKS)
    expected = write_blocks(tmp_path / "model.gguf", family, lambda name: next(kinds), layers=2)
    assert {kept for _, kept in expected.values()} == {"float32", "float16", "bfloat16"}
    check_loads(tmp_path / "model.gguf", expected)


def refused_unread(file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the refusal of a file of which nothing but the header may be read."""

    def never(*arguments: object) -> NoReturn:
        pytest.fail("a tensor was read")

    monkeypatch.setattr(np, "fromfile", never)
    return refusal(functools.partial(convert.load_target, place=never, watch=never), file, None)


@pytest.mark.parametrize("kind", ["I8", "Q8_1", "Q8_K"])
def test_types_that_cannot_be_dequantised_are_refused(monkeypatch, tmp_path, kind):
    file = tmp_path / "model.gguf"
    write_blocks(file, "llama", lambda name: "F32")
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
        retype(file, name, gguf.GGMLQuantizationType[kind])
    assert refused_unread(file, monkeypatch) == (
        f"{file}: tensors of a type that the gguf package does not dequantise: "
        f"blk.0.attn_q.weight ({kind}), blk.0.ffn_down.weight ({kind})"
    )


# 4 was Q4_2 once, and 31 Q4_0_4_4.
@pytest.mark.parametrize("number", [4, 31, 1000, 2**32 - 1])
def test_types_that_are_not_known_are_refused(monkeypatch, file, number):
    retype(file, "blk.1.ffn_up.weight", number)
    message = refused_unread(file, monkeypatch)
    assert message == f"{file}: tensor blk.1.ffn_up.weight is of type {number}, which is not supported"


def test_rows_that_are_no_whole_blocks_are_refused(monkeypatch, file):
    retype(file, "blk.1.ffn_up.weight", gguf.GGMLQuantizationType.Q4_K)
    message = refused_unread(file, monkeypatch)
    shape = "has shape (40, 24), whose rows are no whole Q4_K blocks of 256"
    assert message == f"{file}: corrupt: tensor blk.1.ffn_up.weight {shape}"
