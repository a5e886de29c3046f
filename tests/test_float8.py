"""Checkpoints in float8: dequantised where each block has a scale, refused by name otherwise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.inspection import inspect
from convert.to_hf import to_hf
from tests.checkpoints import refusal, write_target

BLOCK = (16, 8)  # divides neither 24 nor 40 rows
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[: shape[0], : shape[1]]


def write(directory: Path, settings: Any = SETTINGS, *, scales: bool = True) -> dict[str, torch.Tensor]:
    """Quantise the projections of a target as Qwen3-FP8 is; return what they then mean."""
    write_target(directory, "qwen3")
    file = directory / "model.safetensors"
    held, meant = load_file(file), {}
    generator = torch.Generator().manual_seed(0)
    for name, value in list(held.items()):
        meant[name] = value
        if "_proj" not in name:
            continue
        counts = [-(-size // part) for size, part in zip(value.shape, BLOCK, strict=True)]
        scale = torch.rand(counts, generator=generator) + 0.01
        held[name] = (value / spread(scale, value.shape)).to(torch.float8_e4m3fn)
        meant[name] = (held[name].float() * spread(scale, value.shape)).bfloat16()
        if scales:
            held[f"{name}_scale_inv"] = scale
    save_file(held, file)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return meant


def test_blocks_are_multiplied_by_their_scales(tmp_path):
    meant = write(tmp_path / "source")
    to_hf(str(tmp_path / "source"), tmp_path / "made", verify=True)
    made = load_file(tmp_path / "made/model.safetensors")
    assert made.keys() == meant.keys()
    for name, value in meant.items():
        assert made[name].dtype == value.dtype
        torch.testing.assert_close(made[name], value, rtol=0, atol=0)
    assert "quantization_config" not in json.loads((tmp_path / "made/config.json").read_text())


def test_scales_are_applied_before_casting(tmp_path):
    write(tmp_path / "source")
    wide = convert.load_target(str(tmp_path / "source"), "float32").params
    held = load_file(tmp_path / "source/model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    expected = held[name].float() * spread(held[f"{name}_scale_inv"], held[name].shape)
    np.testing.assert_array_equal(wide["layers_0"]["mlp"]["down_proj"]["kernel"], expected.T)


def test_a_tied_head_may_be_stored_in_it_too(tmp_path):
    write(tmp_path / "source")
    file = tmp_path / "source/model.safetensors"
    held = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = torch.ones(61, 24).to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = torch.full((4, 3), 0.5)
    save_file(held, file)
    config = json.loads((tmp_path / "source/config.json").read_text())
    (tmp_path / "source/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    np.testing.assert_array_equal(convert.load_target(str(tmp_path / "source")).params["embedding"], 0.5)
    save_file(held | {"lm_head.weight_scale_inv": torch.full((4, 3), 0.25)}, file)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(convert.load_target, tmp_path / "source")


def test_inspecting_tells_what_is_stored(tmp_path):
    write(tmp_path / "source")
    layers = inspect(str(tmp_path / "source"))["layers"]
    assert layers[0]["dtypes"] == ["float32", "float8_e4m3fn"]


@pytest.mark.parametrize(
    ("settings", "scales", "told"),
    [
        (None, False, "model.layers.0.mlp.down_proj.weight (F8_E4M3)"),
        (SETTINGS, False, "missing model.layers.0.mlp.down_proj.weight_scale_inv"),
        (None, True, "unexpected model.layers.0.mlp.down_proj.weight_scale_inv"),
        (SETTINGS | {"weight_block_size": None}, True, "weight_block_size None"),
        (SETTINGS | {"weight_block_size": [128, 128]}, True, "_scale_inv is [2, 5], and [1, 1] is right"),
        (SETTINGS | {"quant_method": "compressed-tensors"}, True, "quant_method 'compressed-tensors' is not supported"),
        ("fp8", True, "quantization_config: 'fp8'; an object is right"),
    ],
)
def test_what_cannot_be_dequantised_is_refused_by_name(tmp_path, settings, scales, told):
    write(tmp_path / "source", settings, scales=scales)
    assert told in refusal(convert.load_target, tmp_path / "source")
