import fcntl
import itertools
import json
import os
import pty
import re
import resource
import subprocess
import sys
import time

import jax
import pytest

from dflash_jax.errors import UserError
from inference import generate, results
from inference.engine import Generation
from tests import pair

MEASURED = ("prefill_seconds", "decode_seconds", "tokens_per_second")


@pytest.fixture
def ask(target, capsys):
    """Run the command on the tiny target; return standard output."""

    def run(*arguments):
        capsys.readouterr()
        generate.main(["--ckpt", target, "--max-length", "200", "--max-new-tokens", "20", *map(str, arguments)])
        return capsys.readouterr().out

    return run


@pytest.fixture
def answers(ask):
    return lambda *arguments: [json.loads(line) for line in ask(*arguments, "--json").splitlines()]


@pytest.fixture
def write(tmp_path):
    def rows(*lines):
        path = tmp_path / "p.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return rows


def test_json_has_what_is_promised(answers, draft):
    (answer,) = answers("--prompt", "hi", "--draft", draft)
    measured = {key: answer.pop(key) for key in MEASURED}
    assert all(value > 0 for value in measured.values())
    assert measured["tokens_per_second"] == pytest.approx(11 / measured["decode_seconds"])
    assert answer == {
        "text": pair.ANSWER,
        "token_ids": pair.ANSWER_IDS,
        "prompt_tokens": len("<user\nhi>\n<assistant\n<think>\n\n</think>\n\n"),  # a token is a byte or a mark
        "new_tokens": 12,
        "finish_reason": "stop",
        "emitted_per_block": pair.EMITTED,
        "acceptance_length": 1.1,
        "block_size": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 0,
        "thinking": False,
        "dtype": "float32",
    }


def test_without_a_draft_a_block_is_one_token(answers):
    (answer,) = answers("--prompt", "hi")
    assert answer["token_ids"] == pair.ANSWER_IDS
    assert answer["emitted_per_block"] == [1] * 11
    assert (answer["block_size"], answer["acceptance_length"]) == (1, 1.0)


def test_an_answer_that_its_first_token_ends_has_no_blocks(answers):
    (answer,) = answers("--prompt", "hi", "--max-new-tokens", 1)
    assert (answer["text"], answer["finish_reason"]) == ("Z", "length")
    (stopped,) = answers("--prompt", "hi", "--stop", 7, pair.ANSWER_IDS[0], "--stop", 8)
    assert (stopped["text"], stopped["token_ids"], stopped["finish_reason"]) == ("", pair.ANSWER_IDS[:1], "stop")
    for short in (answer, stopped):
        assert short["emitted_per_block"] == []
        assert short["acceptance_length"] is short["tokens_per_second"] is None


@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_inside_or_after_a_block_ends_the_answer_there(answers, draft, place):
    # Also where the stop is an accepted draft (the 5th token) or the target's own after one.
    (answer,) = answers("--prompt", "hi", "--draft", draft, "--stop", pair.ANSWER_IDS[place])
    assert answer["token_ids"] == pair.ANSWER_IDS[: place + 1]
    assert answer["finish_reason"] == "stop"
    assert sum(answer["emitted_per_block"]) == place


def test_a_cap_inside_a_character_is_met_and_the_character_shown_as_broken(ask, answers, draft):
    (answer,) = answers("--prompt", "hi", "--draft", draft, "--max-new-tokens", 8)
    assert answer["token_ids"] == pair.ANSWER_IDS[:8]
    assert answer["text"] == "Zwölf\ufffd"
    assert ask("--prompt", "hi", "--max-new-tokens", 8) == "Zwölf\ufffd\n"


def test_objects_come_in_the_order_of_the_rows(answers, write, draft):
    path = write(
        {"prompt_ids": [pair.ANSWER_IDS[-2]]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "b" * 60},
        {"prompt_ids": [pair.ANSWER_IDS[0]]},
    )
    alone = answers("--prompts", path, "--draft", draft)
    assert [answer["text"] for answer in alone] == ["", pair.ANSWER, pair.ANSWER, pair.ANSWER[1:]]
    assert [answer["prompt_tokens"] for answer in alone] == [1, 39, 98, 1]
    together = answers("--prompts", path, "--draft", draft, "--batch-size", 3)
    assert [answer["token_ids"] for answer in together] == [answer["token_ids"] for answer in alone]


def test_the_turn_of_an_answer_comes_when_those_before_it_are_done():
    def so_far(tokens, finish_reason=None):
        return Generation([0] * tokens, [False] * tokens, [], finish_reason, 0.0, 0.0)

    events = [(1, so_far(1)), (0, so_far(1)), (1, so_far(2, "stop")), (2, so_far(1)), (0, so_far(2)), (2, so_far(2))]
    events += [(0, so_far(3, "length")), (2, so_far(3)), (2, so_far(4, "stop"))]
    told = [(i, len(one.token_ids), one.finish_reason) for i, one in results.in_order(events, 0)]
    assert told == [
        (0, 1, None),
        (0, 2, None),
        (0, 3, "length"),
        (1, 2, "stop"),
        (2, 2, None),
        (2, 3, None),
        (2, 4, "stop"),
    ]


def test_sampled_answers_are_the_same_in_text_and_json_and_in_any_batch(ask, answers, write):
    path = write({"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"})
    options = ["--prompts", path, "--temperature", 1.5, "--top-k", 200, "--top-p", 0.99, "--seed", 3]
    alone = answers(*options)
    tokens = [answer["token_ids"] for answer in alone]
    assert tokens[0] != tokens[1]
    assert (alone[0]["temperature"], alone[0]["top_k"], alone[0]["top_p"], alone[0]["seed"]) == (1.5, 200, 0.99, 3)
    assert [answer["token_ids"] for answer in answers(*options, "--batch-size", 2)] == tokens
    assert ask(*options) == "".join(answer["text"] + "\n" for answer in alone)


@pytest.fixture
def many(write):
    """Twenty prompts, some of them more than once."""
    return write(*({"prompt_ids": [7, 9, 1 + i % 13]} for i in range(20)))


SAMPLED = ("--temperature", "1.5", "--batch-size", "3", "--seed", "4")


def tokens_of(text):
    return [json.loads(line)["token_ids"] for line in text.splitlines()]


def test_a_file_of_results_is_what_json_prints(ask, answers, many, tmp_path, capsys):
    printed = answers("--prompts", many, *SAMPLED)
    output = tmp_path / "out.jsonl"
    assert ask("--prompts", many, *SAMPLED, "--output", output) == ""
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({one.pop("asked") for one in written}) == 13  # as many as there are different prompts
    for one in (*printed, *written):
        assert all(one.pop(key) is not None for key in MEASURED)
    assert written == printed


@pytest.mark.parametrize("whole", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("torn", [0, 1, 60])
def test_a_run_that_was_killed_goes_on_where_it_ended(ask, many, tmp_path, whole, torn):
    output = tmp_path / "out.jsonl"
    ask("--prompts", many, *SAMPLED, "--output", output)
    uninterrupted = output.read_text()
    lines = uninterrupted.splitlines(keepends=True)
    output.write_text("".join(lines[:whole]) + "".join(lines[whole:])[:torn])
    ask("--prompts", many, *SAMPLED, "--output", output, "--resume")
    assert output.read_text().startswith("".join(lines[:whole]))
    assert tokens_of(output.read_text()) == tokens_of(uninterrupted)


def test_resume_starts_anew_where_there_is_nothing(ask, many, tmp_path):
    ask("--prompts", many, "--output", tmp_path / "new.jsonl", "--resume")
    assert len(tokens_of((tmp_path / "new.jsonl").read_text())) == 20


def test_a_file_is_not_written_over(ask, many, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    with pytest.raises(UserError, match=r"--output .*out\.jsonl: there already; --resume"):
        ask("--prompts", many, "--output", output)
    assert output.read_text() == "mine\n"


@pytest.mark.parametrize(
    "content",
    ["mine\n", "mine", '{"prompt": "a"}', "\0", "[1]\n", '{"text": 1}\n', '{"asked": null, "token_ids": 0}\n'],
)
def test_what_is_no_file_of_results_is_left_as_it_is(ask, many, tmp_path, content):
    output = tmp_path / "out.jsonl"
    output.write_text(content)
    with pytest.raises(UserError, match="line 1: no result of this command"):
        ask("--prompts", many, "--output", output, "--resume")
    assert output.read_text() == content


def test_results_are_not_written_over_the_prompts(ask, many):
    with pytest.raises(UserError, match="that is the file of prompts; another name is right"):
        ask("--prompts", many, "--output", many, "--resume")


def test_a_link_to_a_new_file_is_followed(ask, many, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "new")
    ask("--prompts", many, "--output", tmp_path / "link")
    assert len(tokens_of((tmp_path / "new").read_text())) == 20


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (["--seed", "5"], "line 1: seed is 4 there and 5 here"),
        (["--temperature", "0"], "line 1: temperature is 1.5 there and 0.0 here"),
        (["--max-new-tokens", "21"], "line 1: it answers another prompt or target, or has another --max-new-tokens"),
        (["--stop", "5"], "line 1: it answers another prompt or target, or has another --max-new-tokens or --stop"),
        (["--prompts", "other"], "line 2: it answers another prompt"),
        (["--prompts", "fewer"], "line 2: only 1 prompts here"),
    ],
)
def test_results_of_another_run_are_not_gone_on_with(ask, write, tmp_path, monkeypatch, changed, reason):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt_ids": [7, 9, 1]}, {"prompt_ids": [7, 9, 2]}]
    for name, some in {"first": rows, "fewer": rows[:1], "other": [rows[0], {"prompt_ids": [7, 9, 3]}]}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    ask("--prompts", "first", *SAMPLED, "--output", "out")
    before = (tmp_path / "out").read_bytes()
    with pytest.raises(UserError, match=reason):
        ask("--prompts", "first", *SAMPLED, *changed, "--output", "out", "--resume")
    assert (tmp_path / "out").read_bytes() == before


def test_only_one_run_writes_a_file(ask, many, tmp_path):
    output = tmp_path / "out.jsonl"
    with output.open("wb") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run is writing it"):
            ask("--prompts", many, "--output", output, "--resume")


def test_a_run_that_writes_nothing_leaves_no_file(ask, tmp_path):
    output = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="token id 999"):
        ask("--prompt", "a", "--stop", "999", "--output", output)
    assert not output.exists()


def test_a_full_disk_is_told_and_what_was_written_is_kept(ask, many, tmp_path):
    output = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"^--output .*out\.jsonl: cannot be written \(File too large\); more room"):
            ask("--prompts", many, "--output", output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    whole = output.read_text().rpartition("\n")[0]
    assert len(tokens_of(whole)) >= 2
    ask("--prompts", many, "--output", output, "--resume")
    assert output.read_text().startswith(whole)
    assert len(tokens_of(output.read_text())) == 20


def test_a_killed_command_resumes_to_one_result_a_prompt(target, draft, write, tmp_path):
    output = tmp_path / "out.jsonl"
    prompts = write(*({"prompt_ids": [7, 9, i % 200, i // 200]} for i in range(300)))
    run = command("--ckpt", target, "--draft", draft, "--prompts", prompts, "--output", str(output), "--resume")
    kills = 0
    while True:
        process = subprocess.Popen(**run, stderr=subprocess.DEVNULL)
        had = output.stat().st_size if output.exists() else 0
        while process.poll() is None and kills < 1:
            if output.exists() and output.stat().st_size > had + 30_000:
                process.kill()
                kills += 1
                break
            time.sleep(0.01)
        if process.wait() == 0:
            break
    assert kills == 1
    expected = 0
    for expected, line in enumerate(output.read_text().splitlines(), 1):  # noqa: B007
        assert json.loads(line)["prompt_tokens"] == 4
    assert expected == 300


def test_raw_text_and_thinking_change_the_prompt(answers):
    thoughts = len("<think>\n\n</think>\n\n")

    def length(*options):
        return answers("--prompt", "hé", *options)[0]["prompt_tokens"]

    assert length("--raw") == 3
    assert length("--thinking") == length() - thoughts == length("--no-thinking") - 19
    assert answers("--prompt", "a", "--thinking")[0]["thinking"] is True


def test_thinking_that_the_template_does_not_know_is_remarked(tmp_path, capsys):
    pair.write_target(tmp_path, template="{{ messages[0]['content'] }}")
    generate.main(
        ["--ckpt", str(tmp_path), "--prompt", "a", "--max-length", "200", "--max-new-tokens", "1", "--thinking"]
    )
    assert "--thinking: the chat template has no such switch" in capsys.readouterr().err


def test_other_dtypes_and_block_sizes_are_used_and_recorded(answers, draft):
    (answer,) = answers("--prompt", "hi", "--draft", draft, "--dtype", "bfloat16", "--block-size", 3)
    assert (answer["text"], answer["dtype"], answer["block_size"]) == (pair.ANSWER, "bfloat16", 3)
    (answer,) = answers("--prompt", "hi", "--draft", draft, "--block-size", "auto")
    assert (answer["text"], answer["block_size"]) == (pair.ANSWER, "auto")


def test_ids_can_be_answered_without_a_tokenizer(tmp_path, capsys, write):
    target = pair.write_target(tmp_path / "bare")
    (target / "tokenizer.json").unlink()
    path = write({"prompt_ids": [1]})
    arguments = ["--ckpt", str(target), "--prompts", path, "--max-length", "200", "--max-new-tokens", "20"]
    generate.main([*arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["token_ids"]) == (None, pair.ANSWER_IDS)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        generate.main(arguments)


BAD = {
    "no source": ([], "no prompt; one of --prompt"),
    "two sources": (["--prompt", "a", "-"], "--prompt and -; one of"),
    "three sources": (["--prompt", "a", "--prompts", "f", "-"], "--prompt and --prompts and -"),
    "stray text": (["hello"], "hello: a prompt goes after --prompt"),
    "empty": (["--prompt", ""], "--prompt: empty"),
    "blank": (["--prompt", " \n"], "--prompt: empty"),
    "absent file": (["--prompts", "absent.jsonl"], "absent.jsonl: cannot be read"),
    "absent target": (["--prompt", "a", "--ckpt", "./absent"], "./absent"),
    "absent draft": (["--prompt", "a", "--draft", "./absent"], "./absent"),
    "draft of nothing": (["--prompt", "a", "--draft", ""], "--draft: empty"),
    "target of nothing": (["--prompt", "a", "--ckpt", ""], "--ckpt: empty"),
    "unknown flag": (["--prompt", "a", "--maxlength", "9"], "--maxlength"),
    "shortened flag": (["--prompt", "a", "--max-new", "9"], "--max-new"),
    "value left out": (["--prompt"], "--prompt"),
    "dtype": (["--prompt", "a", "--dtype", "float16"], "--dtype"),
    "block size alone": (["--prompt", "a", "--block-size", "8"], "--block-size: it needs --draft"),
    "too long": (["--prompt", "a" * 300], "--prompt: 338 tokens and --max-new-tokens 20 make 358; --max-length 200"),
    "too many": (["--prompt", "a", "--max-new-tokens", "999"], "--max-new-tokens 999 make 1038; --max-length 200"),
    "stop": (["--prompt", "a", "--stop", "264"], "--stop: token id 264 is outside the vocabulary; 0 to 263"),
    "negative stop": (["--prompt", "a", "--stop", "-1"], "--stop: token id -1"),
    "many stops": (["--prompt", "a", "--stop", *map(str, range(40))], "--stop: 41 with the checkpoint's own"),
    "resume of nothing": (["--prompt", "a", "--resume"], "--resume: it needs --output"),
    "output to nothing": (["--prompt", "a", "--output", ""], "--output: empty"),
    "output to no file": (
        ["--prompt", "a", "--output", "/dev/full", "--resume"],
        "--output /dev/full: no regular file",
    ),
    "output nowhere": (["--prompt", "a", "--output", "absent/out"], "--output absent/out: cannot be written"),
    "no number": (["--prompt", "a", "--max-new-tokens", "ten"], "--max-new-tokens: 'ten'; a whole number"),
    "memory": (
        ["--prompt", "a", "--batch-size", "1" + "0" * 18],
        "--max-length, --batch-size: caches for 2" + "0" * 20 + " tokens take",
    ),
} | {
    f"{flag} {value[:12]}": (["--prompt", "a", flag, value], flag)
    for flag, values in {
        "--max-new-tokens": ("0", "-3", "1.5", "1" * 5000),
        "--max-length": ("0", "1", "-1"),
        "--batch-size": ("0", "-1"),
        "--temperature": ("-1", "nan", "inf", "warm"),
        "--top-p": ("0", "-0.5", "1.01", "nan"),
        "--top-k": ("-1", "1.5", str(2**31)),
        "--seed": ("-1", str(2**32), "x"),
        "--block-size": ("0", "1", "-8", "b"),
        "--stop": ("a", "1.0"),
        "--mesh": ("", "2", "data=0", "model=2", "data=2,data=2", "data=9,tensor=1", "data=99999999999", "data=٢"),
    }.items()
    for value in values
}


@pytest.mark.parametrize("case", BAD)
def test_what_the_user_got_wrong_is_one_line_that_names_it(ask, capsys, case):
    arguments, reason = BAD[case]
    with pytest.raises(UserError) as caught:
        ask(*arguments)
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert not re.search(r"\b(max_new_tokens|max_length|batch_size|stop_token_ids|top_k)\b", message)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("size", "reason"), [("201", "--block-size: 201; up to --max-length"), ("1", "--block-size")])
def test_a_block_has_at_least_an_anchor_and_a_draft_and_at_most_the_room_there_is(ask, draft, size, reason):
    with pytest.raises(UserError, match=reason):
        ask("--prompt", "a", "--draft", draft, "--block-size", size)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": ', "not valid JSON"),
        ({"prompt_ids": [0, 264]}, "token id 264 is outside the vocabulary"),
        ({"prompt_ids": [-1]}, "token id -1 is outside"),
        ({"prompt_ids": [0] * 181}, "181 tokens and --max-new-tokens 20 make 201; --max-length 200"),
        ({"prompt": "a" * 143}, "181 tokens and"),
        ({"messages": [], "prompt": "a"}, "prompt and messages"),
    ],
)
def test_all_rows_are_checked_before_anything_is_answered(ask, capsys, write, row, reason):
    path = write({"prompt": "fine"}, "", row, {"prompt": "fine"})
    with pytest.raises(UserError) as caught:
        ask("--prompts", path, "--json")
    assert str(caught.value).startswith(f"{path}, line 3: {reason}")
    assert capsys.readouterr().out == ""


def test_a_draft_in_place_of_the_target_is_told_apart(draft):
    with pytest.raises(UserError, match=r"config\.json: .*is a draft; a target .* belongs here"):
        generate.main(["--ckpt", draft, "--prompt", "a"])


def test_a_file_called_like_a_field_keeps_its_name(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed").write_text('{"prompt_ids": [999]}')
    with pytest.raises(UserError, match=r"^seed, line 1: token id"):
        ask("--prompts", "seed")


def test_a_prompt_that_just_fits_is_answered(answers, write):
    assert answers("--prompts", write({"prompt_ids": [9] * 180}))[0]["token_ids"] == pair.ANSWER_IDS


def test_no_chat_template_points_to_raw(tmp_path):
    pair.write_target(tmp_path, template=None)
    arguments = ["--ckpt", str(tmp_path), "--prompt", "a", "--max-length", "200", "--max-new-tokens", "1"]
    with pytest.raises(UserError, match=r"--prompt: .*--raw"):
        generate.main(arguments)
    generate.main([*arguments, "--raw"])


def test_running_out_of_memory_names_what_to_ask_less_of(ask, monkeypatch):
    def full(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(generate.Engine, "warm_up", full)
    with pytest.raises(UserError, match=r"^--max-length, --batch-size: "):
        ask("--prompt", "a")


def command(*arguments, **environment):
    return {
        "args": [sys.executable, "-m", "inference.generate", *arguments],
        "env": os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    }


def test_as_a_command_it_reads_standard_input_and_keeps_results_and_progress_apart(target, draft):
    done = subprocess.run(
        **command("--ckpt", target, "--draft", draft, "-"), input=b"hi\n", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout.decode()) == (0, f"{pair.ANSWER}\n")
    lines = done.stderr.decode().splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["reading", "reading", "compiling"]
    assert re.fullmatch(
        r"12 tokens, \d+\.\d tokens/s, acceptance length 1\.10, finish reason stop, "
        r"prefill \d\.\d\d s, decode \d\.\d\d s",
        lines[-1],
    )


def test_as_a_command_it_ends_with_status_2_and_one_line(target):
    done = subprocess.run(**command("--ckpt", target, "--prompt", ""), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"error: --prompt: empty; some text is needed\n"


def on_a_terminal(arguments, **environment):
    """Run the command with a terminal for standard output; return what the terminal was sent."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        **command(*arguments, TERM="xterm", **environment), stdout=theirs, stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    sent = b""
    with open(ours, "rb", buffering=0) as terminal:
        for _ in itertools.count():
            try:
                sent += (piece := terminal.read(4096))
            except OSError:  # the other end is closed
                break
            if not piece:
                break
    assert process.wait() == 0
    return sent.decode().replace("\r\n", "\n")


def test_a_terminal_shows_where_each_token_came_from(target, draft):
    arguments = ["--ckpt", target, "--draft", draft, "--prompt", "hi"]
    legend, answer, rest = on_a_terminal(arguments).split("\n")
    assert legend == "\x1b[36maccepted drafts\x1b[0m, \x1b[33mtokens of the target\x1b[0m"
    assert re.sub(r"\x1b\[\d+m", "", answer) == pair.ANSWER
    assert re.findall(r"\x1b\[36m(.*?)\x1b\[0m", answer) == ["l"]
    assert "".join(re.findall(r"\x1b\[33m(.*?)\x1b\[0m", answer)) == "Zwöf🙂!"
    assert rest == ""


def test_a_terminal_shows_no_colours_where_none_are_wanted(target, draft):
    arguments = ["--ckpt", target, "--draft", draft, "--prompt", "hi"]
    assert on_a_terminal(arguments, NO_COLOR="1") == f"{pair.ANSWER}\n"


def test_a_run_imports_no_torch(target):
    code = "import sys; from inference.generate import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    run = command("--ckpt", target, "--prompt", "hi")
    run["args"] = [sys.executable, "-c", code, *run["args"][3:]]
    assert subprocess.run(**run, capture_output=True, check=True).stdout.decode() == f"{pair.ANSWER}\n"


def test_libraries_keep_to_themselves_that_there_is_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from convert import cli; cli.run(lambda argv: __import__('transformers'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
