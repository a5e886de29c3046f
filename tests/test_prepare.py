import concurrent.futures
import fcntl
import json
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from dflash_jax.errors import UserError
from tests import pair
from tests.test_chats import PLAIN
from training import prepare
from training.prepared import open_prepared

FINISHED = {".lock", "index.npy", "manifest.json"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(pair.write_target(tmp_path_factory.mktemp("pair") / "target", template=PLAIN))


@pytest.fixture
def data(tmp_path):
    return tmp_path / "chats.jsonl"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "prepared"


@pytest.fixture
def run(target, data, output, capsys):
    """Run the command in this process; return standard output and error."""

    def run(*more):
        capsys.readouterr()
        prepare.main(["--target", target, "--data", str(data), "--output", str(output), *more])
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(run):
    def refused(*more):
        with pytest.raises(UserError) as caught:
            run(*more)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return refused


def chat(question, answer="b"):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(data, *rows):
    data.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def names(output):
    return {file.name for file in output.iterdir()}


@pytest.fixture
def short(monkeypatch):
    """Shards of two lines."""
    monkeypatch.setattr(prepare, "LINES", 2)


def test_workers_think_as_they_are_told(run, data, output, short, tmp_path, monkeypatch):
    def threads(count, _, start, told):
        return concurrent.futures.ThreadPoolExecutor(count, initializer=start, initargs=told)

    monkeypatch.setattr(prepare.concurrent.futures, "ProcessPoolExecutor", threads)
    write(data, *(chat(str(i)) for i in range(6)))
    run("--target", str(pair.write_target(tmp_path / "switching")), "--thinking", "--workers", "2")
    assert "<think>" not in pair.tokenizer().decode(open_prepared(output)[5].tokens)


def test_rows_come_in_order_and_are_counted(run, data, output, short):
    write(data, chat("one"), "", {"prompt_ids": [3], "response_ids": [4, 5]}, " ", "", chat("two", "cd"))
    assert run().out == f"{output}: 3 rows, 3 documents, 52 tokens, 13.5% supervised\n"
    rows = open_prepared(output)
    assert rows.lines.tolist() == [1, 3, 6]
    assert rows.supervised.tolist() == [2, 2, 3]
    assert rows[1].tokens.tolist() == [3, 4, 5]
    text = "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>"
    assert pair.tokenizer().decode(rows[2].tokens) == text
    assert names(output) == FINISHED | {"rows-00000.array_record", "rows-00001.array_record"}
    assert rows.manifest["stop_token_ids"] == [pair.STOP]
    assert rows.manifest["vocab_size"] == pair.VOCABULARY


def test_thinking_is_off_unless_asked_for(tmp_path, run, refused, data, output):
    # Without thinking this template's prompts end with empty thoughts, which its answers do not have.
    switching = str(pair.write_target(tmp_path / "switching"))
    write(data, chat("one"))
    assert "does not render the answer as a continuation" in refused("--target", switching)
    run("--target", switching, "--thinking")
    assert pair.tokenizer().decode(open_prepared(output)[0].tokens).endswith("<|im_start|>assistant\nb<|im_end|>")
    assert open_prepared(output).manifest["thinking"] is True
    assert "--thinking: the chat template has no such switch" in run("--thinking", "--output", str(tmp_path / "n")).err


def test_a_file_may_come_from_another_system(run, data, output):
    data.write_bytes(
        "\ufeff".encode() + json.dumps(chat("ä\u2028")).encode() + b"\r\n\r\n" + json.dumps(chat("b")).encode()
    )
    run()
    assert open_prepared(output).lines.tolist() == [1, 3]


def test_a_finished_output_is_there_already_or_refused(run, refused, data, output):
    write(data, chat("one"))
    first = run().out
    again = run()
    assert again.out == first
    assert "there already, made from the same" in again.err
    assert "finished already, and made with another thinking; another name is right" in refused("--thinking")
    write(data, chat("two"))
    assert refused().startswith(f"--output {output}: finished already, and made with another input")
    (output / "rows-00000.array_record").unlink()
    assert refused().startswith(f"{output / 'rows-00000.array_record'}: missing")


def test_a_wrong_row_is_told_by_line_and_what_was_made_is_kept(run, refused, data, output, short):
    write(data, chat("1"), chat("2"), "", chat("3"), {"messages": []})
    assert refused().startswith(f"{data}, line 5: messages is an empty list")
    assert names(output) == {".lock", "rows-00000.array_record", "rows-00000.json"}
    write(data, chat("1"), chat("2"), "", chat("3"), chat("4"), chat("5"))
    assert "1 of 3 shards are there already" in run().err
    assert open_prepared(output).lengths.tolist() == [22] * 5
    # Lines that moved, other lines and other settings are made anew.
    (output / "manifest.json").unlink()
    write(data, "", chat("1"), chat("2"), chat("3"))
    assert "there already" not in run().err
    assert open_prepared(output).lines.tolist() == [2, 3, 4]
    assert names(output) == FINISHED | {"rows-00000.array_record", "rows-00001.array_record"}


def test_a_first_row_that_is_wrong_leaves_no_directory(refused, data, output):
    write(data, {"prompt_ids": [1], "response_ids": [pair.VOCABULARY]})
    assert refused().startswith(f"{data}, line 1: response_ids[0] is the int 264; a token id of the target")
    assert not output.exists()


def test_what_cannot_be_prepared_is_refused_in_one_line(refused, data, output, tmp_path, monkeypatch):
    assert refused() == f"--data {data}: no such file; a JSONL file of chats is right"
    data.write_text("\n \n")
    assert refused().startswith(f"{data}: empty; a row {{")
    write(data, chat("one"))
    monkeypatch.setattr(prepare, "LONGEST_LINE", 20)
    assert refused().startswith(f"{data}: line 1: longer than 20 bytes")
    assert refused("--workers", "0") == (
        "argument --workers: '0'; a whole number of 1 or more is right; `python -m training.prepare --help` shows what "
        "is right"
    )
    assert refused("--output", "") == "--output: empty; a name is right"
    assert refused("--target", str(tmp_path / "absent")).startswith(str(tmp_path / "absent"))
    assert refused("--output", str(data)).startswith(f"--output {data}: no directory")
    assert refused("--output", str(tmp_path)).startswith(f"--output {tmp_path}: holds other things (chats.jsonl)")
    assert not output.exists()


def test_ids_need_no_chat_template(tmp_path, data, output, refused, run):
    bare = str(pair.write_target(tmp_path / "bare", template=None))
    write(data, {"prompt_ids": [3], "response_ids": [4]})
    run("--target", bare)
    write(data, chat("one"))
    assert f"{data}, line 1: messages[1]: the target's tokenizer has no chat template" in refused(
        "--target", bare, "--output", str(tmp_path / "other")
    )


def test_a_target_without_a_tokenizer_is_refused(tmp_path, data, refused):
    bare = pair.write_target(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    write(data, chat("one"))
    assert str(bare) in refused("--target", str(bare))


def test_two_runs_do_not_write_the_same_output(refused, data, output):
    write(data, chat("one"))
    output.mkdir()
    with (output / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refused() == f"--output {output}: another run is in it; waiting for that, or another name, is right"


def test_a_full_disk_is_one_line_and_room_is_all_that_is_missing(run, refused, data, output, short):
    write(data, *(chat(str(i)) for i in range(5)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # a shard is 64 KiB and more
    try:
        message = refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.startswith(f"{output}/rows-00000.array_record: cannot be written (")
    assert "File too large" in message
    assert message.endswith("room for it, then the same again, is right")
    assert not output.exists()
    run()
    assert len(open_prepared(output)) == 5


def test_an_input_that_changes_meanwhile_is_refused(refused, data, monkeypatch):
    write(data, chat("one"))
    cut_up = prepare.cut_up

    def change(path):
        made = cut_up(path)
        write(data, chat("two"))
        return made

    monkeypatch.setattr(prepare, "cut_up", change)
    assert refused().startswith(f"{data}: it changed while it was read")


def test_an_interrupt_leaves_no_half_shard(run, data, output, short, monkeypatch):
    write(data, *(chat(str(i)) for i in range(4)))
    documents, seen = prepare.documents, []

    def interrupted(*arguments):
        seen.append(list(output.glob("*.partial")))
        if len(seen) == 4:
            signal.raise_signal(signal.SIGINT)
        return documents(*arguments)

    monkeypatch.setattr(prepare, "documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert seen[-1]
    assert names(output) == {".lock", "rows-00000.array_record", "rows-00000.json"}


def test_killed_and_run_again_it_makes_every_row_once(target, data, output, run):
    write(data, *(chat(f"{i:04} {'x' * 100}") for i in range(5_000)))
    arguments = ["--target", target, "--data", str(data), "--output", str(output), "--workers", "2"]
    killed = subprocess.Popen(
        [sys.executable, "-m", "training.prepare", *arguments], stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_for(lambda: (output / "rows-00000.json").exists() or killed.poll() is not None)
    killed.kill()  # its workers are left alone
    assert killed.wait() == -signal.SIGKILL
    wait_for(lambda: not living(killed.pid))
    assert not (output / "manifest.json").exists()
    assert re.search(r"^[1-4] of 5 shards are there already$", run().err, re.MULTILINE)
    rows = open_prepared(output)
    assert rows.lines.tolist() == list(range(1, 5_001))
    assert names(output) == FINISHED | {f"rows-0000{i}.array_record" for i in range(5)}
    for index in (0, 999, 1000, 4999):
        assert pair.tokenizer().decode(rows[index].tokens).startswith(f"<|im_start|>user\n{index:04} x")


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def living(session):
    """The processes of a session that are left; those that are dead may still be listed."""
    listed = subprocess.run(["ps", "-o", "stat=", "-s", str(session)], capture_output=True, text=True, check=False)
    return [state for state in listed.stdout.split() if not state.startswith("Z")]


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        prepare.main(["--help"])
    assert ended.value.code == 0
    assert "python -m training.prepare --target Qwen/Qwen3-4B --data chats.jsonl" in capsys.readouterr().out
