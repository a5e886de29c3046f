import itertools
import json
import struct
from pathlib import Path
from typing import Any

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import convert
from convert import hub, load, names
from convert.weights import row_blocks
from dflash_jax.config import DraftConfig
from tests import tiny
from tests.checkpoints import (
    DRAFT_CONFIG,
    draft_tensors,
    refusal,
    same,
    write_directory,
    write_draft,
    write_shards,
    write_target,
)

DEMO_DRAFT = Path(__file__).parents[1] / "inference/demo_draft"
INDEX = "model.safetensors.index.json"


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_target(tmp_path / "target", "qwen3")
    return tmp_path / "target"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft")


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3-biased", "qwen3-yarn", "llama", "llama3-biased"])
def test_targets_load_as_transformers_saves_them(tmp_path, name):
    _, config, params = write_target(tmp_path, name)
    loaded = convert.load_target(str(tmp_path), None)
    assert loaded.config == config
    assert same(loaded.params, params)


def test_shards_load_as_one_file_does(tmp_path):
    _, _, params = write_target(tmp_path, "qwen3", max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(convert.load_target(str(tmp_path), None).params, params)


def test_a_draft_loads_with_kernels_turned(draft):
    loaded = convert.load_draft(str(draft), None)
    theirs = draft_tensors()
    assert loaded.config.target_layer_ids == (1, 2)
    assert set(loaded.params) == {"fc", "context_norm", "final_norm", "layers_0", "layers_1"}
    np.testing.assert_array_equal(loaded.params["fc"]["kernel"], theirs["fc.weight"].T)
    np.testing.assert_array_equal(loaded.params["context_norm"]["scale"], theirs["hidden_norm.weight"])
    np.testing.assert_array_equal(
        loaded.params["layers_1"]["mlp"]["down_proj"]["kernel"], theirs["layers.1.mlp.down_proj.weight"].T
    )


def test_the_demo_draft_loads_in_its_own_dtype():
    loaded = convert.load_draft(str(DEMO_DRAFT), None)
    theirs = load_file(DEMO_DRAFT / "model.safetensors")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"bfloat16"}
    assert sum(leaf.size for leaf in jax.tree.leaves(loaded.params)) == 19_361_152
    np.testing.assert_array_equal(loaded.params["fc"]["kernel"], theirs["fc.weight"].T)


def test_dtypes_are_kept_or_cast_by_rounding_to_nearest(tmp_path):
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in draft_tensors().items()}
    kept = convert.load_draft(str(write_directory(tmp_path / "bf16", DRAFT_CONFIG, tensors)), None)
    assert kept.params["fc"]["kernel"].dtype == "bfloat16"
    cast = convert.load_draft(str(write_draft(tmp_path / "f32")), "bfloat16")
    assert same(cast.params, kept.params)
    wide = convert.load_draft(str(tmp_path / "bf16"), "float32")
    assert wide.params["fc"]["kernel"].dtype == "float32"
    np.testing.assert_array_equal(wide.params["fc"]["kernel"], np.float32(tensors["fc.weight"].T))


def test_float64_needs_the_64_bit_mode(draft, float64):
    assert convert.load_draft(str(draft), "float64").params["fc"]["kernel"].dtype == "float64"
    with jax.enable_x64(False):
        assert "--dtype float64: " in refusal(convert.load_draft, draft, "float64")


def test_stored_float64_is_not_narrowed_unasked(tmp_path):
    path = write_directory(tmp_path, DRAFT_CONFIG, {k: v.astype(np.float64) for k, v in draft_tensors().items()})
    assert "--dtype float32 is right" in refusal(convert.load_draft, path, None)
    assert convert.load_draft(str(path), "float32").params["fc"]["kernel"].dtype == "float32"


def test_each_tensor_is_placed_by_its_path(draft):
    seen = {}

    def place(path: tuple[str, ...], array: np.ndarray) -> jax.Array:
        seen["/".join(path)] = array.shape
        return jax.device_put(array)

    convert.load_draft(str(draft), None, place=place)
    assert seen == names.shapes(DraftConfig.from_hf(DRAFT_CONFIG))


def test_stops_are_the_union_of_both_configs(target):
    edit_config(target, eos_token_id=7)
    (target / "generation_config.json").write_text('{"eos_token_id": [9, 7, 8]}')
    assert convert.load_target(str(target), None).stop_token_ids == (7, 9, 8)
    (target / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert f"{target}/generation_config.json: eos_token_id: 'x'" in refusal(convert.load_target, target, None)


def test_legacy_buffers_are_ignored(target):
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)
    save_file(tensors, target / "model.safetensors")
    convert.load_target(str(target), None)


def test_a_tied_head_may_be_stored_only_if_it_is_the_embedding(tmp_path):
    write_target(tmp_path, "qwen3-tied")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert "head" not in convert.load_target(str(tmp_path), None).params
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(convert.load_target, tmp_path, None)


def test_every_missing_unexpected_and_misshaped_tensor_is_named(draft):
    tensors = draft_tensors()
    del tensors["norm.weight"], tensors["layers.0.mlp.up_proj.weight"]
    tensors["embed_tokens.weight"] = tensors["lm_head.weight"] = np.ones((61, 24), np.float32)
    tensors["fc.weight"] = tensors["fc.weight"].T.copy()
    save_file(tensors, draft / "model.safetensors")
    message = refusal(convert.load_draft, draft, None)
    assert message == (
        f"{draft}: the tensors are not those of its config: missing layers.0.mlp.up_proj.weight, norm.weight; "
        "unexpected embed_tokens.weight, lm_head.weight; fc.weight is [48, 24], and [24, 48] is right"
    )


def test_drafts_with_a_pruned_vocabulary_are_refused(draft):
    tensors = draft_tensors() | {"d2t": np.ones(4, np.float32), "t2d": np.ones(4, np.float32)}
    save_file(tensors, draft / "model.safetensors")
    assert "d2t, t2d: of a pruned vocabulary, and " in refusal(convert.load_draft, draft, None)


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")])
def test_other_dtypes_are_refused_by_name(draft, dtype, name):
    tensors = draft_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].astype(dtype)
    save_file(tensors, draft / "model.safetensors")
    assert f"fc.weight ({name})" in refusal(convert.load_draft, draft, None)


def test_targets_and_drafts_are_not_taken_for_each_other(target, draft):
    assert f"{draft}/config.json: architectures: DFlashDraftModel is a draft" in refusal(
        convert.load_target, draft, None
    )
    assert "['Qwen3ForCausalLM'] is not a draft" in refusal(convert.load_draft, target, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": "absent", "rope_theta": "absent"}, "no rotary base"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel (model_type 'gpt2') is not"),
        ({"hidden_size": "big"}, "hidden_size: 'big'"),
        ({"architectures": [3]}, "wrong type"),
        ({"num_hidden_layers": 2}, "unexpected model.layers.2."),
    ],
)
def test_bad_configs_are_refused(target, changes, message):
    edit_config(target, **changes)
    if "num_hidden_layers" in changes:
        edit_config(target, layer_types="absent")
    assert message in refusal(convert.load_target, target, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ', "not valid JSON"),
        ("[]", "holds a JSON list; an object is right"),
        ("\xff\xfe", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"hidden_size": ' + "1" * 5000 + "}", "not valid JSON"),
        ('{"hidden_size": 1, "hidden_size": 2}', "hidden_size more than once"),
    ],
)
def test_bad_json_is_refused(target, text, message):
    (target / "config.json").write_bytes(text.encode("latin-1"))
    found = refusal(convert.load_target, target, None)
    assert found.startswith(f"{target}/config.json: ")
    assert message in found


def test_paths_that_hold_no_checkpoint_are_refused(tmp_path, target):
    assert f"{tmp_path}/none: no such file or directory" in refusal(convert.load_target, tmp_path / "none", None)
    assert "cannot be read (File name too long)" in refusal(convert.load_target, tmp_path / ("a" * 5000), None)
    (tmp_path / "empty").mkdir()
    assert "no config.json in it" in refusal(convert.load_target, tmp_path / "empty", None)
    assert "weights alone; the directory" in refusal(convert.load_target, target / "model.safetensors", None)
    assert "not a checkpoint" in refusal(convert.load_target, target / "config.json", None)
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    assert "only pytorch_model.bin, and pickle files are never loaded" in refusal(convert.load_target, target, None)
    (target / "pytorch_model.bin").unlink()
    assert "no weights in it; model.safetensors" in refusal(convert.load_target, target, None)
    (target / "model.safetensors").symlink_to(tmp_path / "nowhere")
    assert "no weights in it" in refusal(convert.load_target, target, None)


def test_damaged_safetensors_are_refused(target):
    file = target / "model.safetensors"
    whole = file.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    damaged = {
        "empty": b"",
        "truncated header": whole[: 8 + header // 2],
        "truncated data": whole[:-4],
        "oversized header": struct.pack("<Q", 1 << 60) + whole[8:],
        "not JSON": whole[:8] + b"x" * header + whole[8 + header :],
    }
    for content in damaged.values():
        file.write_bytes(content)
        assert f"{file}: not a readable safetensors file" in refusal(convert.load_target, target, None)


def test_a_tensor_twice_in_a_file_is_refused(draft):
    file = draft / "model.safetensors"
    length, content = struct.unpack("<Q", file.read_bytes()[:8])[0], file.read_bytes()[8:]
    header = json.loads(content[:length])
    text = json.dumps(header).replace('"fc.weight"', f'"fc.weight": {json.dumps(header["fc.weight"])}, "fc.weight"')
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + content[length:])
    assert refusal(convert.load_draft, draft, None) == f"{file}: fc.weight more than once; once is right"


def index_of(draft: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Turn a draft into two shards; return its tensors and where they lie."""
    tensors = draft_tensors()
    placing = {name: f"{1 + (i % 2)}.safetensors" for i, name in enumerate(tensors)}
    (draft / "model.safetensors").unlink()
    write_shards(draft, tensors, placing)
    return tensors, placing


def rewrite_index(draft: Path, placing: dict[str, Any]) -> str:
    (draft / INDEX).write_text(json.dumps({"weight_map": placing}))
    return refusal(convert.load_draft, draft, None)


def test_an_index_that_does_not_fit_its_shards_is_refused(draft):
    tensors, placing = index_of(draft)
    assert same(convert.load_draft(str(draft), None).params, convert.load_draft(str(write_draft(draft)), None).params)
    (draft / "model.safetensors").unlink()

    name = "fc.weight"
    here, there = placing[name], {"1.safetensors": "2.safetensors", "2.safetensors": "1.safetensors"}[placing[name]]
    assert f"{name} is not in {there}" in rewrite_index(draft, placing | {name: there})
    lacking = {key: value for key, value in placing.items() if key != name}
    assert f"{name} is in {here}, and the index lacks it" in rewrite_index(draft, lacking)
    assert "names 3.safetensors, which is not there" in rewrite_index(draft, placing | {name: "3.safetensors"})
    save_file({key: tensors[key] for key in tensors if placing[key] == there or key == name}, draft / there)
    assert f"{name} is in {there}, and the index puts it in {here}" in rewrite_index(draft, placing)
    assert "no weight_map" in rewrite_index(draft, {})


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "..", "x.bin", "", 3]
)
def test_an_index_may_only_name_shards_beside_it(draft, shard):
    _, placing = index_of(draft)
    assert "not a shard's name" in rewrite_index(draft, placing | {"fc.weight": shard})


def test_a_tensor_twice_in_an_index_is_refused(draft):
    _, placing = index_of(draft)
    text = json.dumps({"weight_map": placing}).replace('{"fc.weight"', '{"fc.weight": "1.safetensors", "fc.weight"')
    (draft / INDEX).write_text(text)
    assert "fc.weight more than once" in refusal(convert.load_draft, draft, None)


@hypothesis.settings(
    max_examples=10, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=st.data())
def test_how_tensors_are_spread_over_shards_does_not_matter(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("shards")
    tensors = draft_tensors()
    (directory / "config.json").write_text(json.dumps(DRAFT_CONFIG))
    shards = data.draw(st.lists(st.integers(0, 3), min_size=len(tensors), max_size=len(tensors)))
    order = data.draw(st.permutations(list(tensors)))
    write_shards(directory, tensors, {name: f"{shard}.safetensors" for name, shard in zip(order, shards, strict=True)})
    loaded = convert.load_draft(str(directory), None)
    whole = convert.load_draft(str(write_draft(tmp_path_factory.mktemp("whole"))), None)
    assert same(loaded.params, whole.params)


@hypothesis.given(st.integers(1, 5_000), st.integers(1, 3_000_000))
def test_blocks_of_rows_are_consecutive_and_cover_everything(rows, columns):
    blocks = list(row_blocks((rows, columns)))
    assert blocks[0].start == 0
    assert blocks[-1].stop == rows
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))


def test_a_hub_id_that_is_not_cached_is_refused_offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = refusal(convert.load_target, "no-one/has-this", None)
    assert message == "no-one/has-this: no such path, and as a hub id not in the cache while HF_HUB_OFFLINE is set"


def test_a_hub_that_cannot_be_asked_is_one_line(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no http in the address")

    monkeypatch.setattr("convert.hub.snapshot_download", fail)
    message = refusal(convert.load_target, "no-one/has-this", None)
    assert message == "no-one/has-this: no such path, and as a hub id not to be had (no http in the address)"


def test_a_hub_id_that_is_cached_loads_offline(monkeypatch, tmp_path, draft):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached, commit = tmp_path / "models--some-one--has-this", "0123456789" * 4
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(commit)
    (cached / "snapshots" / commit).mkdir(parents=True)
    for file in draft.iterdir():
        (cached / "snapshots" / commit / file.name).symlink_to(file)  # as the cache keeps them
    loaded = convert.load_draft("some-one/has-this", None)
    assert same(loaded.params, convert.load_draft(str(draft), None).params)


def test_a_hub_id_loads_from_what_is_fetched_and_neither_pickles_nor_code_are(monkeypatch, draft):
    asked = {}

    def snapshot(name: str, **patterns: Any) -> str:
        asked[name] = patterns
        return str(draft)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert convert.load_draft("owner/name", None).config.block_size == 4
    assert not [p for p in asked["owner/name"]["allow_patterns"] if p.endswith(("bin", "pt", "py", "*"))]


def test_of_a_target_on_the_hub_its_config_alone_can_be_had(monkeypatch, tmp_path):
    asked = []

    def snapshot(name: str, **patterns: Any) -> str:
        asked.append((name, patterns["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    (tmp_path / "config.json").write_text(json.dumps(tiny.TARGET.to_hf()))
    assert load.target_config_of("owner/name").hidden_size == tiny.TARGET.hidden_size
    assert asked == [("owner/name", ["config.json"])]


def test_a_path_wins_over_a_hub_id(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    write_draft(tmp_path / "owner/name")
    assert convert.load_draft("owner/name", None).source == "owner/name"
