import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import convert
from convert import flax_checkpoint
from convert.to_flax import to_flax
from tests.checkpoints import (
    LETTERS,
    refusal,
    same,
    write_draft,
    write_gguf,
    write_target,
    write_tokenizer,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Hugging Face target with everything beside it that users have."""
    path = tmp_path / "source"
    write_target(path, "qwen3")
    write_tokenizer(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    return path


@pytest.fixture
def made(source: Path) -> Path:
    to_flax(str(source), source.with_name("made"))
    return source.with_name("made")


def test_a_target_comes_back_bit_for_bit(source, made):
    ours, theirs = convert.load_target(str(made), None), convert.load_target(str(source), None)
    assert same(ours.params, theirs.params)
    assert ours.config == theirs.config
    assert ours.stop_token_ids == theirs.stop_token_ids == (9, 8)


def test_it_holds_config_tokenizer_and_manifest_and_no_copy_of_its_source(source, made):
    names = {path.name for path in made.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names == {"config.json", "generation_config.json", "manifest.json", "params"} | tokenizer
    assert not any(path.is_symlink() for path in made.rglob("*"))
    assert json.loads((made / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    manifest = json.loads((made / "manifest.json").read_text())
    files = manifest["source"].pop("files")
    assert manifest == {
        "format_version": 2,
        "kind": "target",
        "source": {"name": str(source), "format": "Hugging Face directory"},
        "dtype": "float32",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(convert.load_target(str(source), None).params)),
    }
    assert files["model.safetensors"] == hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert {"config.json", "generation_config.json", "tokenizer.json"} < set(files)
    assert convert.load_tokenizer(str(made))("ab").input_ids == convert.load_tokenizer(str(source))("ab").input_ids


def test_it_does_without_its_source(source, made):
    theirs = convert.load_target(str(source), None)
    shutil.rmtree(source)
    assert same(convert.load_target(str(made), None).params, theirs.params)


def test_plain_orbax_reads_the_parameters(made):
    ours = convert.load_target(str(made), None).params
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), ours)
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert same(checkpointer.restore(made / "params/state", restore_args=as_numpy), ours)


def test_casting_while_writing_or_while_reading_is_the_same(source, made, tmp_path):
    assert to_flax(str(source), tmp_path / "narrow", "bfloat16")["dtype"] == "bfloat16"
    narrow = convert.load_target(str(tmp_path / "narrow"), None)
    assert same(narrow.params, convert.load_target(str(made), "bfloat16").params)
    assert same(narrow.params, convert.load_target(str(source), "bfloat16").params)
    to_flax(str(tmp_path / "narrow"), tmp_path / "again")
    assert same(narrow.params, convert.load_target(str(tmp_path / "again"), None).params)


def test_a_draft_comes_back_bit_for_bit(tmp_path):
    write_draft(tmp_path / "source")
    assert to_flax(str(tmp_path / "source"), tmp_path / "made")["kind"] == "draft"
    ours, theirs = (convert.load_draft(str(tmp_path / path), None) for path in ("made", "source"))
    assert same(ours.params, theirs.params)
    assert ours.config == theirs.config
    assert "is a draft; a target" in refusal(convert.load_target, tmp_path / "made")


def test_a_gguf_file_comes_back_with_its_tokenizer(tmp_path):
    last = LETTERS[-1]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*LETTERS[-58:], "a", f"{last}a", "<end>"],
        "tokenizer.ggml.token_type": [1] * 60 + [3],
        "tokenizer.ggml.merges": [f"{last} a"],
        "tokenizer.ggml.eos_token_id": 60,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<end>",
    }
    write_gguf(tmp_path / "source.gguf", "qwen3", **{key.replace(".", "__"): value for key, value in metadata.items()})
    to_flax(str(tmp_path / "source.gguf"), tmp_path / "made")
    ours, theirs = (convert.load_target(str(tmp_path / path), None) for path in ("made", "source.gguf"))
    assert same(ours.params, theirs.params)
    assert ours.config == theirs.config
    assert ours.stop_token_ids == (60,)
    one, two = (convert.load_tokenizer(str(tmp_path / path)) for path in ("made", "source.gguf"))
    text = one.apply_chat_template([{"role": "user", "content": "aa"}], tokenize=False)
    assert text == "aa<end>"
    assert one(text).input_ids == two(text).input_ids


def edit_manifest(made: Path, **changes: Any) -> None:
    file = made / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_unfinished_or_foreign_checkpoint_is_refused(made):
    edit_manifest(made, format_version=3)
    assert "manifest.json: format_version 3 is not supported; 2 is" in refusal(convert.load_target, made)
    (made / "manifest.json").unlink()
    assert "has params/ but no manifest.json, so it was never finished" in refusal(convert.load_target, made)


def test_damaged_parameters_are_refused(made):
    data = list((made / "params").glob("state/ocdbt.process_0*/d/*"))
    assert data
    for file in data:
        os.truncate(file, file.stat().st_size // 2)
    assert refusal(convert.load_target, made).startswith(f"{made}/params: not readable as orbax parameters (")
    shutil.copy(data[0], made / "params/state/manifest.ocdbt")
    assert refusal(convert.load_target, made).startswith(f"{made}/params: not readable as orbax parameters (")
    shutil.rmtree(made / "params")
    assert "has no params/" in refusal(convert.load_target, made)


def test_every_missing_unexpected_and_misshaped_parameter_is_named(made):
    params = convert.load_target(str(made), None).params
    params["final_norm"] = {"scale": jnp.ones(3)}
    params["extra"] = jnp.ones(2)
    del params["layers_1"]["mlp"]["up_proj"]
    shutil.rmtree(made / "params")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(made / "params/state", params)
    assert refusal(convert.load_target, made) == (
        f"{made}/params: the tensors are not those of its config: missing layers_1/mlp/up_proj/kernel; "
        "unexpected extra; final_norm/scale is [3], and [24] is right"
    )


def test_a_path_that_is_taken_is_refused_and_left_alone(source, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert "taken: is there already" in refusal(to_flax, source, tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link: is there already" in refusal(to_flax, source, tmp_path / "link")
    assert f"{tmp_path}/no: no such directory" in refusal(to_flax, source, tmp_path / "no/made")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError])
def test_nothing_is_left_when_writing_fails(source, tmp_path, monkeypatch, fault):
    def write(directory: Path, *_: Any) -> None:
        (directory / "config.json").write_text("{}")
        raise fault

    before = set(tmp_path.iterdir())
    monkeypatch.setattr(flax_checkpoint, "write", write)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whichever it was
        to_flax(str(source), tmp_path / "made")
    assert set(tmp_path.iterdir()) == before
    if isinstance(fault, OSError):
        assert str(caught.value) == f"{tmp_path}/made: cannot be written (No space left on device)"


def test_a_disk_without_room_is_the_users_fault(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        message = refusal(to_flax, source, tmp_path / "made")
        assert message == f"{tmp_path}/made: cannot be written (81,744 bytes are needed, and 1,000 are free)"

    def save(*_: Any, **__: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(flax_checkpoint.ocp.partial, "save", save)
    message = refusal(to_flax, source, tmp_path / "made")
    assert message == f"{tmp_path}/made: cannot be written (RESOURCE_EXHAUSTED: no space left)"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_tracebacks_that_orbax_logs_while_failing_stay_off_the_terminal(source, tmp_path, monkeypatch, caplog):
    def save(*_: Any, **__: Any) -> None:
        logging.getLogger("absl").error("Traceback of a thread")
        raise ValueError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(flax_checkpoint.ocp.partial, "save", save)
    refusal(to_flax, source, tmp_path / "made")
    assert "Traceback" not in caplog.text


def test_nothing_is_left_when_the_source_is_bad(source, tmp_path):
    (source / "config.json").write_text("{")
    before = set(tmp_path.iterdir())
    refusal(to_flax, source, tmp_path / "made")
    assert set(tmp_path.iterdir()) == before


def test_what_a_killed_process_of_the_same_number_left_is_not_in_the_way(source, tmp_path):
    (tmp_path / f".made.{os.getpid()}.partial").mkdir()
    to_flax(str(source), tmp_path / "made")
    assert convert.load_target(str(tmp_path / "made")).config.num_layers


def test_a_flax_checkpoint_is_not_written_into_itself(made):
    before = sorted(made.rglob("*"))
    message = refusal(to_flax, made, made / "inner")
    assert message == f"{made}/inner: lies in the Flax checkpoint that is read; a path outside it is right"
    assert sorted(made.rglob("*")) == before


def test_it_does_not_appear_before_it_is_whole(source, tmp_path, monkeypatch):
    real, seen = flax_checkpoint.write, []

    def write(directory: Path, *rest: Any) -> None:
        real(directory, *rest)
        seen.append((tmp_path / "made").exists())

    monkeypatch.setattr(flax_checkpoint, "write", write)
    to_flax(str(source), tmp_path / "made")
    assert seen == [False]
    np.testing.assert_equal(sorted(path.name for path in tmp_path.iterdir()), ["made", "source"])


def test_a_checkpoint_is_read_by_whatever_path_leads_to_it(source, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    to_flax(str(source), Path("../made"), verify=True)
    assert convert.load_target("../made").config == convert.load_target(str(source)).config
