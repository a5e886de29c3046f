import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convert import progress
from convert.__main__ import main
from convert.conversion import read_size
from dflash_jax.errors import UserError
from tests.checkpoints import write_draft, write_gguf, write_target, write_tokenizer

DFLASH = {"mask_token_id": 60, "target_layer_ids": [0, 1]}


def run(*arguments: str | Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "convert"]
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_target(tmp_path / "target", "qwen3-tied")
    write_tokenizer(tmp_path / "target")
    (tmp_path / "target/generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    return tmp_path / "target"


def test_converting_and_inspecting_from_the_shell(target, tmp_path):
    converted = run("to-flax", target, tmp_path / "made", "--dtype", "bfloat16")
    assert converted.returncode == 0, converted.stderr
    assert converted.stdout == f"{tmp_path}/made: target, 17,532 parameters, bfloat16\n"
    assert converted.stderr == "converting target\nhashing target\n"
    described = run("inspect", tmp_path / "made", "--json")
    assert described.returncode == 0
    assert described.stderr == ""
    described = json.loads(described.stdout)
    assert described.pop("bytes") > 17_532 * 2
    assert described == {
        "path": f"{tmp_path}/made",
        "format": "Flax checkpoint",
        "kind": "target",
        "architecture": "Qwen3ForCausalLM",
        "tie_word_embeddings": True,
        "stop_token_ids": [9, 8],
        "parameters": 17_532,
        "dtypes": ["bfloat16"],
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 10,
        "max_positions": 128,
        "chat_template": True,
        "layers": [
            {
                "layer": i,
                "attention": "full",
                "experts": "none",
                "width": 40,
                "parameters": 5348,
                "dtypes": ["bfloat16"],
            }
            for i in range(3)
        ],
    }


def test_faults_are_one_line_and_status_2(tmp_path):
    failed = run("to-flax", tmp_path / "none", tmp_path / "made")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == f"error: {tmp_path}/none: no such file or directory, and not a hub id (owner/name)\n"
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_one_line_and_status_2():
    failed = run("to-flax", "a")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("error: the following arguments are required: DST; ")
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["inspect", "a", "b"], "unrecognized arguments: b"),
        (["inspect", "a", "--js"], "unrecognized arguments: --js; did you mean --json?"),
        (["to-flax", "a", "b", "--dtype"], "argument --dtype: expected one argument"),
        (["to-flax", "a", "no-such-directory-here/b", "--dtype", "int4"], "--dtype int4: not supported; keep, float32"),
    ],
)
def test_what_is_wrong_is_named(arguments, message):
    with pytest.raises(UserError) as caught:
        main(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("command", [[], ["to-flax"], ["to-hf"], ["inspect"]])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert "example:\n  python -m convert to-flax Qwen/Qwen3-4B" in capsys.readouterr().out


def test_inspecting_a_draft_prints_what_pairs_it(tmp_path, capsys):
    main(["inspect", str(write_draft(tmp_path))])
    described, _, table = capsys.readouterr().out.partition("\n\n")
    lines = dict(line.split(maxsplit=1) for line in described.splitlines())
    assert lines["kind"] == "draft"
    assert lines["target_layer_ids"] == "1, 2"
    assert lines["block_size"] == "4"
    assert lines["mask_token_id"] == "60"
    assert lines["layout"] == "published"
    assert lines["dtypes"] == "float32"
    assert lines["chat_template"] == "no"
    assert [line.split() for line in table.splitlines()] == [
        ["layer", "attention", "experts", "width", "parameters", "dtypes"],
        ["0", "full", "none", "40", "5,828", "float32"],
        ["1", "full", "none", "40", "5,828", "float32"],
    ]


def test_token_ids_are_printed_as_they_are_written(tmp_path, capsys):
    main(["inspect", str(Path(__file__).parents[1] / "inference/demo_draft")])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.partition("\n\n")[0].splitlines())
    assert (lines["mask_token_id"], lines["vocab_size"]) == ("16", "49,152")


def test_a_layer_is_told_by_what_it_sees_and_what_transforms(tmp_path, capsys):
    write_target(tmp_path / "target", "qwen3-moe-partly-dense")
    main(["inspect", str(tmp_path / "target"), "--json"])
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [(layer["experts"], layer["width"]) for layer in layers] == [("2 of 6", 12), ("none", 40), ("2 of 6", 12)]


def test_inspecting_a_pair_says_whether_it_fits(target, tmp_path, capsys):
    draft = write_draft(tmp_path / "draft", num_target_layers=3, dflash_config=DFLASH)
    main(["inspect", str(draft), "--target", str(target), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["target"], told["fits"]) == (str(target), True)
    assert "misfit" not in told
    main(["inspect", str(write_draft(tmp_path / "other")), "--target", str(target)])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.partition("\n\n")[0].splitlines())
    assert lines["fits"] == "no"
    assert lines["misfit"] == "num_target_layers: the draft was made for 5 layers, the target has 3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "draft", "--target", "none"], "none: no such file or directory"),
        (["inspect", "target", "--target", "target"], "--target: it is for drafts, and this is a target"),
        (["to-hf", "draft", "made", "--max-shard-size", "big"], "--max-shard-size big: not a size; a number and KB"),
        (["to-hf", "draft", ""], "DST: empty; a directory"),
        (["to-hf", "draft", "made", "--max-shard-size", "10"], "--max-shard-size 10: not a size; a number and KB"),
        (["to-hf", "draft", "made", "--max-shard-size", "0GB"], "--max-shard-size 0GB: not a size"),
        (["to-hf", "draft", "made", "--max-shard-size", "5PB"], "--max-shard-size 5PB: not a size"),
        (["to-flax", "draft", "made", "--max-shard-size", "5GB"], "unrecognized arguments: --max-shard-size 5GB; `"),
    ],
)
def test_what_is_wrong_with_a_pair_or_a_size_is_named(target, tmp_path, monkeypatch, arguments, message):
    write_draft(tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        main(arguments)
    assert message in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "target"]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500MiB", 500 * 2**20), ("1.5 kb", 1500)])
def test_sizes_are_read_as_transformers_reads_them(text, size):
    assert read_size(text) == size


def test_inspecting_a_gguf_file_names_its_types(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf", "llama", tokenizer__ggml__eos_token_id=7)
    main(["inspect", str(tmp_path / "model.gguf"), "--json"])
    described = json.loads(capsys.readouterr().out)
    assert described["format"] == "GGUF file"
    assert described["architecture"] == "LlamaForCausalLM"
    assert described["dtypes"] == ["F32"]
    assert described["stop_token_ids"] == [7]


def test_inspecting_reads_no_weights(target, capsys):
    file = target / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    file.write_bytes(whole[:header] + b"\xff" * (len(whole) - header))
    main(["inspect", str(target)])
    assert "parameters           17,532" in capsys.readouterr().out


def test_a_closed_pipe_and_an_interrupt_end_without_a_traceback():
    many = "from convert.cli import run\nrun(lambda _: [print('x' * 100) for _ in range(100_000)])"
    with subprocess.Popen([sys.executable, "-c", many], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 128 + signal.SIGPIPE
    for number in (signal.SIGINT, signal.SIGTERM):
        interrupted = run(code=f"import os; from convert.cli import run; run(lambda _: os.kill(os.getpid(), {number}))")
        assert (interrupted.returncode, interrupted.stderr) == (128 + number, "")


@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.6])
@pytest.mark.parametrize("module", ["convert", "inference.generate", "training.run"])
def test_an_interrupt_while_modules_are_imported_ends_without_a_traceback(module, seconds):
    with subprocess.Popen(
        [sys.executable, "-m", module, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as one:
        time.sleep(seconds)
        one.send_signal(signal.SIGINT)
        _, told = one.communicate()
    assert one.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 0)  # 0: it was done already
    assert told == b""


def test_a_program_that_imports_the_package_keeps_its_own_way_with_interrupts(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import convert")
    (tmp_path / "theirs" / "__main__.py").write_text(
        "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}
    command = [sys.executable, "-X", "utf8", "-m", "theirs", "convert"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True\n"


def test_streams_that_are_full_closed_or_of_few_characters_end_without_a_traceback():
    command = f"exec {sys.executable} -c 'from convert.cli import run; run(lambda _: print(\"Zw\\u00f6lf\"))'"
    for redirect, status, out, err in (
        (
            ">/dev/full",
            2,
            "",
            "error: standard output: cannot be written (No space left on device); room for it is right",
        ),
        (">&-", 2, "", "error: standard output: closed; somewhere to write to is right"),
        ("2>&-", 0, "Zw\\xf6lf", ""),
    ):
        done = subprocess.run(
            ["/bin/sh", "-c", f"{command} {redirect}"],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
        )
        assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (status, out, err)


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch, capsys):
    seconds = iter(range(0, 100, 2))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    assert list(progress.show("abcdef", 6, "reading x")) == list("abcdef")
    told = ["reading x", "reading x: 2 of 6", "reading x: 5 of 6", "reading x: 6 of 6"]
    assert capsys.readouterr().err.splitlines() == told
