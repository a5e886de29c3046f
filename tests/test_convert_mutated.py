"""Sixty checkpoints that something is wrong with: each is refused in one line, and nothing is left."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.__main__ import main
from tests.checkpoints import DRAFT_CONFIG, draft_tensors, refusal, write_directory, write_shards, write_target

INDEX = "model.safetensors.index.json"
NORM, FC, GATE = "norm.weight", "fc.weight", "layers.0.mlp.gate_proj.weight"
Damage = Callable[[Path], None]


def weights(directory: Path) -> Path:
    return next(iter(sorted(directory.glob("*.safetensors"))))


def cut(size: Callable[[int], int]) -> Damage:
    def damage(directory: Path) -> None:
        file = weights(directory)
        content = file.read_bytes()
        file.write_bytes(content[: size(len(content))])

    return damage


def header_length(length: int) -> Damage:
    """Have the file say that its header is so long."""

    def damage(directory: Path) -> None:
        file = weights(directory)
        file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change what the header says, and leave the data as it is."""

    def damage(directory: Path) -> None:
        file = weights(directory)
        content = file.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        told = json.loads(content[8 : 8 + size])
        change(told)
        text = json.dumps(told).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return damage


def entry(name: str, **changes: Any) -> Damage:
    return header(lambda told: told[name].update(changes))


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    """Write other tensors than there were."""

    def damage(directory: Path) -> None:
        file = weights(directory)
        held = load_file(file)
        change(held)
        save_file(held, file)

    return damage


def renamed(old: str, new: str) -> Damage:
    return tensors(lambda held: held.update({new: held.pop(old)}))


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    return tensors(lambda held: held.update({name: np.ascontiguousarray(change(held[name]))}))


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(directory: Path) -> None:
        file = directory / INDEX
        told = json.loads(file.read_text())
        change(told)
        file.write_text(json.dumps(told))

    return damage


def listing(change: Callable[[dict[str, Any]], object]) -> Damage:
    return index(lambda told: change(told["weight_map"]))


def swapped(held: dict[str, str]) -> None:
    held["hidden_norm.weight"], held[FC] = held[FC], held["hidden_norm.weight"]


def config(**changes: Any) -> Damage:
    def damage(directory: Path) -> None:
        file = directory / "config.json"
        told = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in told.items() if value != "absent"}))

    return damage


def written(name: str, content: bytes) -> Damage:
    def damage(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return damage


def longer(directory: Path) -> None:
    file = weights(directory)
    file.write_bytes(file.read_bytes() + b"x")


def swapped_shards(directory: Path) -> None:
    one, two = (directory / f"part-{i}.safetensors" for i in range(2))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def overlapping(told: dict[str, Any]) -> None:
    told[NORM]["data_offsets"] = told["hidden_norm.weight"]["data_offsets"]


def one_file(directory: Path) -> None:
    write_directory(directory, DRAFT_CONFIG, draft_tensors())


def two_files(directory: Path) -> None:
    write_directory(directory, DRAFT_CONFIG, draft_tensors())
    (directory / "model.safetensors").unlink()
    held = draft_tensors()
    write_shards(directory, held, {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(held))})


def experts(directory: Path) -> None:
    write_target(directory, "qwen3-moe")


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
MUTATIONS: dict[str, tuple[Callable[[Path], None], Damage]] = {
    "empty file": (one_file, cut(lambda size: 0)),
    "seven bytes": (one_file, cut(lambda size: 7)),
    "eight bytes": (one_file, cut(lambda size: 8)),
    "half a header": (one_file, cut(lambda size: 500)),
    "half the data": (one_file, cut(lambda size: size // 2)),
    "one byte short": (one_file, cut(lambda size: size - 1)),
    "a byte too many": (one_file, longer),
    **{
        f"a header of {length}": (one_file, header_length(length))
        for length in (0, 1, 2, 8, 100, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
    },
    "a header that is no JSON": (one_file, lambda directory: _overwrite(weights(directory), 8, b"x" * 20)),
    "a header that is a list": (one_file, lambda directory: _write_header(weights(directory), b"[]")),
    "a header without tensors": (one_file, lambda directory: _write_header(weights(directory), b"{}")),
    "a shape of other numbers": (one_file, entry(FC, shape=[48, 24])),
    "a shape of more": (one_file, entry(FC, shape=[24, 49])),
    "a negative size": (one_file, entry(FC, shape=[-24, 48])),
    "a size of text": (one_file, entry(FC, shape=["24", 48])),
    "offsets past the end": (one_file, entry(FC, data_offsets=[0, 2**40])),
    "offsets in the wrong order": (one_file, entry(FC, data_offsets=[4608, 0])),
    "offsets of other tensors": (one_file, header(overlapping)),
    "no offsets": (one_file, header(lambda told: told[FC].pop("data_offsets"))),
    "an unknown dtype": (one_file, entry(FC, dtype="F33")),
    "another dtype's name": (one_file, entry(FC, dtype="BF16")),
    "integers": (one_file, replaced(FC, lambda array: array.astype(np.int32))),
    "eight bits": (one_file, replaced(FC, lambda array: array.astype(np.uint8))),
    "float8 without scales": (one_file, lambda directory: _as_float8(weights(directory), FC)),
    "missing": (one_file, tensors(lambda held: held.pop(NORM))),
    "a layer missing": (one_file, tensors(lambda held: [held.pop(name) for name in list(held) if "layers.1" in name])),
    "a layer too many": (one_file, tensors(lambda held: held.update({"layers.2.input_layernorm.weight": held[NORM]}))),
    "renamed": (one_file, renamed(GATE, GATE.replace("gate", "gates"))),
    "another's prefix": (one_file, renamed(GATE, f"model.{GATE}")),
    "turned": (one_file, replaced(FC, lambda array: array.T)),
    "flat": (one_file, replaced(FC, lambda array: array.reshape(-1))),
    "a row less": (one_file, replaced(FC, lambda array: array[1:])),
    "no rows": (one_file, replaced(FC, lambda array: array[:0])),
    "a number": (one_file, replaced(NORM, lambda array: array[:1].reshape(()))),
    "a shard missing": (two_files, lambda directory: (directory / "part-1.safetensors").unlink()),
    "a shard cut": (two_files, cut(lambda size: size // 3)),
    "shards exchanged": (two_files, swapped_shards),
    "an index that exchanges": (two_files, listing(swapped)),
    "an index that forgets": (two_files, listing(lambda held: held.pop(NORM))),
    "an index that adds": (two_files, listing(lambda held: held.update({"more": "part-0.safetensors"}))),
    "an index to nowhere": (two_files, listing(lambda held: held.update({NORM: "part-7.safetensors"}))),
    "an index to outside": (two_files, listing(lambda held: held.update({NORM: "../part-0.safetensors"}))),
    "an index of numbers": (two_files, listing(lambda held: held.update({NORM: 1}))),
    "an index without a map": (two_files, index(lambda told: told.pop("weight_map"))),
    "an index with an empty map": (two_files, index(lambda told: told.update(weight_map={}))),
    "an index that is no JSON": (two_files, written(INDEX, b"{")),
    "a config of another width": (one_file, config(hidden_size=32)),
    "a config of more layers": (one_file, config(num_hidden_layers=3)),
    "a config of another kind": (one_file, config(architectures=["BertModel"], dflash_config="absent")),
    "a config that is no JSON": (one_file, written("config.json", b"\xff\xfe")),
    "a config of another quantisation": (one_file, config(quantization_config={"quant_method": "gptq"})),
    "an expert missing": (experts, tensors(lambda held: held.pop(EXPERT))),
    "an expert of another width": (experts, replaced(EXPERT, lambda array: array[:, 1:])),
    "an expert too many": (
        experts,
        tensors(lambda held: held.update({EXPERT.replace("experts.3", "experts.6"): held[EXPERT]})),
    ),
    "a router of fewer experts": (experts, config(num_local_experts=5, num_experts=5)),
}


def _overwrite(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def _write_header(file: Path, text: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def _as_float8(file: Path, name: str) -> None:
    """Say of a tensor that it is of float8, four times as long."""
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    told = json.loads(content[8 : 8 + size])
    told[name] |= {"dtype": "F8_E4M3", "shape": [told[name]["shape"][0], 4 * told[name]["shape"][1]]}
    text = json.dumps(told).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def test_there_are_sixty():
    assert len(MUTATIONS) >= 60


@pytest.mark.parametrize("command", ["to-flax", "to-hf"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_wrong_is_told_in_one_line_and_nothing_is_left(tmp_path, capfd, name, command):
    make, damage = MUTATIONS[name]
    source = tmp_path / "source"
    make(source)
    damage(source)
    before = sorted(tmp_path.rglob("*"))
    message = refusal(lambda _: main([command, str(source), str(tmp_path / "made")]), source)
    assert str(source) in message
    assert sorted(tmp_path.rglob("*")) == before
    assert "Traceback" not in capfd.readouterr().err
