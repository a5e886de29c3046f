import dataclasses
import json
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

import convert
from convert import names
from convert.__main__ import main
from convert.published import publish
from convert.to_flax import to_flax
from convert.to_hf import to_hf
from convert.trees import nest
from dflash_jax.config import DraftConfig, TargetConfig
from inference.demo import DEMO_DRAFT
from inference.engine import Engine, SamplingConfig
from tests import tiny
from tests.checkpoints import (
    DRAFT_CONFIG,
    draft_tensors,
    refusal,
    same,
    write_directory,
    write_draft,
    write_gguf,
    write_target,
    write_tokenizer,
)
from tests.torch_models import LLAMA3, YARN, params_of, random_params

MIXED = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": MIXED,
    "mixed-both-ways": MIXED | {"is_causal": False},
    "causal-by-its-other-name": {
        "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 2], "block_size": 4, "causal": True}
    },
    "yarn": {"rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"}},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "partial": {"partial_rotary_factor": 0.4},
}


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def reference_model(directory: Path, **options: Any) -> Any:
    """Load a draft into the published reference, which must find every tensor and no other."""
    reference = pytest.importorskip("dflash.model", reason="needs the published reference, PyPI's `dflash`")
    model, found = reference.DFlashDraftModel.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(found.values()), found
    return model.eval()


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft")


def test_the_demo_draft_comes_back_from_flax_bit_for_bit(tmp_path):
    to_flax(str(DEMO_DRAFT), tmp_path / "flax")
    to_hf(str(tmp_path / "flax"), tmp_path / "made")
    files = {"config.json", "manifest.json", "model.safetensors"}
    assert {file.name for file in (tmp_path / "made").iterdir()} == files
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "made", DEMO_DRAFT))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype for name in theirs)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    ours, theirs = (read_config(path) for path in (tmp_path / "made", DEMO_DRAFT))
    assert {name: ours[name] for name in theirs} == theirs
    assert DraftConfig.from_hf(ours) == DraftConfig.from_hf(theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_published_reference_and_transformers_read_a_draft_as_we_do(tmp_path, layout):
    write_directory(tmp_path / "source", DRAFT_CONFIG | LAYOUTS[layout], draft_tensors())
    to_hf(str(tmp_path / "source"), tmp_path / "made")
    source, made = (convert.load_draft(str(tmp_path / path)) for path in ("source", "made"))
    assert made.config == source.config
    assert same(made.params, source.params)
    read = Qwen3Config.from_pretrained(tmp_path / "made").to_dict()
    assert DraftConfig.from_hf(read | {"architectures": ["DFlashDraftModel"]}) == source.config
    model = reference_model(tmp_path / "made")
    assert same(params_of(model), source.params)
    assert (model.block_size, model.mask_token_id, list(model.target_layer_ids)) == (4, 60, [1, 2])


def test_a_config_is_spelled_for_readers_old_and_new(tmp_path):
    theirs = DRAFT_CONFIG | LAYOUTS["yarn"] | {"is_causal": True}
    config = DraftConfig.from_hf(theirs)
    publish(tmp_path / "made", config, convert.load_draft(str(write_draft(tmp_path / "source"))).params, "bfloat16")
    written = read_config(tmp_path / "made")
    assert (written["dtype"], written["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert written["architectures"] == ["DFlashDraftModel"]
    assert (written["block_size"], written["num_target_layers"], written["layer_types"]) == (
        4,
        5,
        ["full_attention"] * 2,
    )
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    assert "rope_theta" not in written["rope_scaling"]
    assert written["rope_scaling"].items() < written["rope_parameters"].items()
    assert written["dflash_config"] == {"mask_token_id": 60, "target_layer_ids": [1, 2], "causal": True}
    assert written["is_causal"] is True
    old = {name: value for name, value in written.items() if name != "rope_parameters"}
    assert DraftConfig.from_hf(old) == DraftConfig.from_hf(written) == config


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the reference calls what transformers has renamed
def test_the_published_reference_decodes_a_published_pair_in_the_same_blocks(tmp_path, monkeypatch):
    reference = pytest.importorskip("dflash.model", reason="needs the published reference, PyPI's `dflash`")
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)  # its clock asks for CUDA
    config = dataclasses.replace(tiny.DRAFT, num_target_layers=tiny.TARGET.num_layers)
    publish(tmp_path / "target", tiny.TARGET, random_params(tiny.TARGET), None)
    publish(tmp_path / "draft", config, random_params(config, seed=1), None)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    draft = reference_model(tmp_path / "draft", attn_implementation="sdpa")
    engine = Engine.load(str(tmp_path / "target"), str(tmp_path / "draft"), max_length=96)
    cap, accepted = 40, 0
    for prompt in tiny.prompts(3, seed=2):
        [ours] = engine.generate([prompt], SamplingConfig(max_new_tokens=cap))
        theirs = reference.dflash_generate(
            draft, target, torch.tensor([prompt]), cap, [], block_size=config.block_size, return_stats=True
        )
        assert ours.token_ids == theirs.output_ids[0, len(prompt) :].tolist()
        starts = np.cumsum([1, *ours.emitted_per_block])
        # The reference shortens blocks that start less than a block before the cap.
        whole = int((starts[:-1] + config.block_size <= cap).sum())
        assert ours.emitted_per_block[:whole] == theirs.acceptance_lengths[:whole]
        accepted += sum(ours.emitted_per_block[:whole]) - whole
    assert accepted > 10


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-biased", "qwen3-sliding", "llama", "llama3-biased"])
def test_transformers_loads_a_target_with_what_lies_beside_it(tmp_path, name):
    model, config, params = write_target(tmp_path / "source", name)
    write_tokenizer(tmp_path / "source")
    (tmp_path / "source/generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    to_flax(str(tmp_path / "source"), tmp_path / "flax")
    to_hf(str(tmp_path / "flax"), tmp_path / "made")
    assert {file.name for file in (tmp_path / "made").iterdir()} == {
        "manifest.json",
        *(file.name for file in (tmp_path / "source").iterdir()),
    }
    again, found = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(found.values()), found
    assert type(again) is type(model)
    assert again.generation_config.eos_token_id == [9, 8]
    assert same(params_of(again, tied=config.tie_word_embeddings), params)
    assert TargetConfig.from_hf(again.config.to_dict()) == config
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits)


def test_transformers_loads_a_gguf_file_turned_into_a_directory(tmp_path):
    _, params = write_gguf(tmp_path / "source.gguf", "llama", tokenizer__ggml__eos_token_id=7)
    to_hf(str(tmp_path / "source.gguf"), tmp_path / "made")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert same(params_of(again), params)
    assert again.config.eos_token_id == 7


def test_fields_that_we_do_not_interpret_are_kept(tmp_path):
    theirs = DRAFT_CONFIG | {
        "bos_token_id": 1,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": DRAFT_CONFIG["dflash_config"] | {"fc_layernorm": False},
    }
    write_directory(tmp_path / "source", theirs, draft_tensors())
    to_hf(str(tmp_path / "source"), tmp_path / "made")
    written = read_config(tmp_path / "made")
    assert (written["bos_token_id"], written["initializer_range"]) == (1, 0.02)
    assert written["dflash_config"] == theirs["dflash_config"]
    assert (written["dtype"], written["torch_dtype"]) == ("float32", "float32")
    assert "auto_map" not in written  # the code that it names is not there


def test_rotary_settings_that_were_not_in_force_do_not_come_to_be(tmp_path):
    """Transformers 5 prefers `rope_scaling` where there are both; we and others `rope_parameters`."""
    theirs = DRAFT_CONFIG | LAYOUTS["linear"] | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    write_directory(tmp_path / "source", theirs, draft_tensors())
    to_hf(str(tmp_path / "source"), tmp_path / "made")
    assert read_config(tmp_path / "made")["rope_scaling"] is None


def test_a_file_is_what_the_safetensors_library_writes(tmp_path):
    tensors = draft_tensors()
    for i, dtype in enumerate((jnp.bfloat16, np.float16)):
        tensors |= {name: value.astype(dtype) for name, value in tensors.items() if f"layers.{i}" in name}
    write_directory(tmp_path / "source", DRAFT_CONFIG, tensors)
    made = to_hf(str(tmp_path / "source"), tmp_path / "made")
    assert made["dtype"] == "bfloat16+float16+float32"
    assert read_config(tmp_path / "made")["dtype"] == "float32"  # which holds them all
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "made/model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_casting_while_writing_or_while_reading_is_the_same(draft, tmp_path):
    to_hf(str(draft), tmp_path / "one", "bfloat16")
    params = convert.load_draft(str(draft)).params
    publish(tmp_path / "two", DraftConfig.from_hf(DRAFT_CONFIG), params, "bfloat16")
    expected = convert.load_draft(str(draft), "bfloat16").params
    for made in (tmp_path / "one", tmp_path / "two"):
        assert same(convert.load_draft(str(made)).params, expected)
        assert read_config(made)["torch_dtype"] == "bfloat16"
    with safe_open(tmp_path / "two/model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert opened.get_tensor("fc.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("narrow", [np.float16, jnp.bfloat16])
def test_half_precision_is_kept(tmp_path, narrow):
    tensors = {name: value.astype(narrow) for name, value in draft_tensors().items()}
    made = to_hf(str(write_directory(tmp_path / "source", DRAFT_CONFIG, tensors)), tmp_path / "made")
    assert made["dtype"] == read_config(tmp_path / "made")["dtype"] == np.dtype(narrow).name
    assert same(load_file(tmp_path / "made/model.safetensors"), tensors)


def test_float64_is_cast_or_refused(draft, tmp_path, float64):
    params = convert.load_draft(str(draft), "float64").params
    config = DraftConfig.from_hf(DRAFT_CONFIG)
    message = refusal(lambda path: publish(Path(path), config, params, None), tmp_path / "made")
    assert message.startswith("dtypes that are not published: context_norm/scale (float64), ")
    assert message.endswith("; --dtype float32 or bfloat16 is right")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    publish(tmp_path / "made", config, params, "float32")
    assert same(convert.load_draft(str(tmp_path / "made")).params, convert.load_draft(str(draft)).params)


def test_memory_holds_one_tensor_more(tmp_path):
    config = dataclasses.replace(tiny.TARGET, vocab_size=2000, hidden_size=512, intermediate_size=1024)
    params = nest((path, jnp.ones(shape)) for path, shape in names.shapes(config).items())
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 3.5 * largest
    tracemalloc.start()
    try:
        publish(tmp_path / "made", config, params, "bfloat16")
        assert tracemalloc.get_traced_memory()[1] < 1.1 * largest
    finally:
        tracemalloc.stop()


def test_parameters_of_another_config_are_refused(draft, tmp_path):
    config = dataclasses.replace(DraftConfig.from_hf(DRAFT_CONFIG), target_layer_ids=(1, 2, 3))
    params = convert.load_draft(str(draft)).params
    message = refusal(lambda path: publish(Path(path), config, params, None), tmp_path / "made")
    assert message == "the tensors are not those of its config: fc/kernel is [48, 24], and [72, 24] is right"


def test_a_disk_without_room_is_the_users_fault(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    message = refusal(to_hf, draft, tmp_path / "made")
    assert message == f"{tmp_path}/made: cannot be written (51,424 bytes are needed, and 1,000 are free)"
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_flax_checkpoint_is_not_written_into(draft, tmp_path):
    to_flax(str(draft), tmp_path / "flax")
    before = sorted((tmp_path / "flax").rglob("*"))
    message = refusal(to_hf, tmp_path / "flax", tmp_path / "flax/inner")
    assert message.endswith("lies in the Flax checkpoint that is read; a path outside it is right")
    assert sorted((tmp_path / "flax").rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "made"], "none: no such file or directory, and not a hub id"),
        (["draft", "draft"], "draft: is there already; another path, or removing it, is right"),
        (["draft", "no/made"], "no: no such directory; one that is there is right"),
        (["draft", "made", "--dtype", "float16"], "--dtype float16: not supported; keep, float32 or bfloat16 is"),
        (["empty", "made"], "empty: no config.json in it"),
    ],
)
def test_faults_are_one_line_and_nothing_is_left(draft, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert message in refusal(lambda _: main(["to-hf", *arguments]), draft)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_says_what_it_wrote(draft, tmp_path, capsys):
    main(["to-hf", str(draft), str(tmp_path / "made"), "--dtype", "bfloat16"])
    assert capsys.readouterr().out == f"{tmp_path}/made: draft, 12,856 parameters, bfloat16\n"


def test_a_killed_process_leaves_no_destination(draft, tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from convert import shards, to_hf\n"
        "shards.check_room = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "to_hf.to_hf(sys.argv[1], Path(sys.argv[2]))"
    )
    killed = subprocess.run([sys.executable, "-c", code, draft, tmp_path / "made"], check=False)
    assert killed.returncode == -9
    [left] = [path for path in tmp_path.iterdir() if path != draft]
    assert left.name.startswith(".made.")
    to_hf(str(draft), tmp_path / "made")
    assert convert.load_draft(str(tmp_path / "made")).config.num_layers == 2
