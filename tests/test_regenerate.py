import fcntl
import json

import pytest

from dflash_jax.errors import UserError
from tests import pair
from training import conversations, regenerate, rounds

CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "old"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "older"},
]
BATCH = ("--batch-size", "3")  # one for all: each compiles programs of its own
ANSWERED = {"role": "assistant", "content": pair.ANSWER}


@pytest.fixture
def write(tmp_path):
    def rows(*lines, name="p.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return rows


@pytest.fixture
def output(tmp_path):
    return tmp_path / "chats.jsonl"


@pytest.fixture
def arguments(target, output):
    """A command line on the tiny target, to which more may be added."""

    def words(data, *more):
        sizes = ["--max-length", "200", "--max-new-tokens", "20", *(BATCH if "--endpoint" not in more else ())]
        return ["--target", target, "--data", data, "--output", str(output), *sizes, *map(str, more)]

    return words


@pytest.fixture
def ask(arguments, capsys):
    """Run the command; return standard output."""

    def run(data, *more):
        capsys.readouterr()
        regenerate.main(arguments(data, *more))
        return capsys.readouterr().out

    return run


def lines_of(output):
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_thinking_reaches_the_prompt(ask, write, output):
    ask(write({"prompt": "a"}), "--thinking")
    [answer] = lines_of(output)
    assert pair.tokenizer().decode(answer["prompt_ids"]).endswith("<|im_start|>assistant\n")


def test_every_user_turn_is_answered_anew(ask, write, output):
    data = write(
        {"question": "a?", "answer": "b"},
        "",
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "x"}]},
        {"prompt_ids": [5, 6, 7]},
        {"conversations": []},
    )
    said = ask(data)
    assert said.startswith("5 answers, 60 tokens, 100.0% ended by a stop, ")
    assert said.endswith(" tokens/s\n")
    lines = lines_of(output)
    assert [(line["line"], line["turn"]) for line in lines] == [(1, 1), (3, 1), (4, 1), (5, 1), (3, 2)]
    assert all(line["response_ids"] == pair.ANSWER_IDS and line["finish_reason"] == "stop" for line in lines)
    assert [line.get("messages") for line in lines] == [
        [{"role": "user", "content": "a?"}, ANSWERED],
        [*CHAT[:2], ANSWERED],
        [{"role": "user", "content": "hi"}, ANSWERED],
        None,
        [*CHAT[:2], ANSWERED, CHAT[3], ANSWERED],
    ]
    assert (lines[3]["text"], lines[3]["prompt_ids"]) == (pair.ANSWER, [5, 6, 7])
    rendered = pair.tokenizer().apply_chat_template(
        lines[4]["messages"][:-1],
        tokenize=True,
        return_dict=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert lines[4]["prompt_ids"] == rendered


def call(role="assistant"):
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}


def says(*roles):
    return [call() if role == "call" else {"role": role, "content": role} for role in roles]


@pytest.mark.parametrize(
    ("roles", "asked"),
    [
        (["user"], [["user"]]),
        (["assistant", "user", "assistant"], [["user"]]),
        (["user", "user"], [["user"], ["user"]]),
        (["user", "assistant", "system", "user"], [["user"], ["system", "user"]]),
        (["user", "call", "tool", "tool", "assistant", "user"], [["user", "call", "tool", "tool"], ["user"]]),
        (["user", "call"], []),
        (["system"], []),
    ],
)
def test_a_chat_is_cut_where_answers_are_due(write, roles, asked):
    (row,) = conversations.read(write({"messages": says(*roles)}))
    assert row.ahead == [says(*turn) for turn in asked]


def test_a_chat_comes_before_the_text_beside_it(write):
    rows = conversations.read(
        write({"prompt": "one", "prompt_id": 7, "messages": CHAT}, {"prompt": "a", "prompt_ids": []})
    )
    assert [row.ahead for row in rows] == [[CHAT[:2], CHAT[3:4]], [[{"role": "user", "content": "a"}]]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", r"line 2: not valid JSON"),
        ({"text": "a"}, r'line 2: no prompt; a row \{"messages": '),
        ({"question": 7}, r"line 2: question is the int 7; a text is right"),
        ({"messages": []}, r"line 2: messages is an empty list"),
        ({"messages": [{"role": "oracle", "content": "a"}]}, r"line 2: messages\[0\]: role is the str oracle"),
        ({"conversations": "a"}, r"line 2: conversations is the str a; a list of"),
        ({"conversations": [7]}, r"line 2: conversations\[0\] is the int 7; \{"),
        (
            {"conversations": [{"from": "oracle", "value": "a"}]},
            r"line 2: conversations\[0\]: from is the str oracle; system, human",
        ),
        (
            {"conversations": [{"from": "human"}]},
            r"line 2: conversations\[0\]: value is missing or null; a text is right",
        ),
        ({"prompt_ids": [1, 999]}, r"line 2: token id 999 is outside the vocabulary; 0 to 263 are in it"),
    ],
)
def test_a_bad_row_is_refused_by_line_before_anything_is_answered(ask, write, output, row, reason):
    with pytest.raises(UserError, match=rf"p\.jsonl, {reason}"):
        ask(write({"prompt": "a"}, row))
    assert not output.exists()


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        (["--max-new-tokens", "200"], "--max-new-tokens: 200 leave no room for a prompt in --max-length 200"),
        (["--top-p", "0"], "--top-p: 0.0; a number over 0"),
        (["--model", "m"], "--model: it needs --endpoint"),
        (["--concurrency", "3"], "--concurrency: it needs --endpoint"),
        (["--endpoint", "http://a", "--batch-size", "3"], "--batch-size: the server of --endpoint has its own"),
        (["--endpoint", "http://a", "--draft", "d"], "argument --draft: not allowed with argument --endpoint"),
        (["--data", "none.jsonl"], "--data none.jsonl: no such file"),
        (["--draft", ""], "--draft: empty"),
        (["--max-length", "21"], "--data: every prompt was skipped"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(ask, write, output, added, reason):
    with pytest.raises(UserError, match=rf"^{reason}"):
        ask(write({"prompt": "a"}), *added)
    assert not output.exists()


def test_answers_do_not_go_into_the_file_of_prompts(ask, write, output):
    write({"prompt": "a"}, name=output.name)
    with pytest.raises(UserError, match="that is the file of prompts"):
        ask(str(output))


def test_a_target_without_a_template_answers_ids_alone(arguments, tmp_path, write, output):
    bare = pair.write_target(tmp_path / "bare", template=None)
    with pytest.raises(UserError, match=r"line 2: the target's tokenizer has no chat template; .* rows of prompt_ids"):
        regenerate.main(arguments(write({"prompt_ids": [1]}, {"prompt": "a"}), "--target", bare))
    for file in bare.glob("token*"):
        file.unlink()
    regenerate.main(arguments(write({"prompt_ids": [1]}), "--target", bare))
    (line,) = lines_of(output)
    assert (line["text"], line["response_ids"]) == (None, pair.ANSWER_IDS)


@pytest.fixture
def many(write):
    """Prompts in three chunks, some of them more than once, chats of two turns, one too long and one unsayable."""
    rows: list[object] = [{"prompt_ids": [7, 9, 1 + i % 2]} for i in range(6)]
    rows[1:1] = [{"messages": CHAT}, {"prompt": "z" * 200}, {"messages": CHAT[1:]}, {"prompt": "broken"}]
    return write(*rows)


@pytest.fixture
def chunked(monkeypatch, target, tmp_path):
    monkeypatch.setattr(rounds, "CHUNK", 4)


SAMPLED = ("--temperature", "1.5", "--seed", "4")


@pytest.fixture(scope="module")
def uninterrupted():
    """The file of a run that was not interrupted, for as long as the module runs."""
    return {}


@pytest.fixture
def whole(ask, many, output, chunked, uninterrupted):
    if not uninterrupted:
        ask(many, *SAMPLED)
        uninterrupted["bytes"] = output.read_bytes()
        output.unlink()
    return uninterrupted["bytes"]


def test_prompts_that_come_again_are_sampled_anew_also_in_another_chunk(whole):
    answers = [tuple(line["response_ids"]) for line in map(json.loads, whole.splitlines()) if "text" in line]
    assert len(answers) == len(set(answers)) == 6


@pytest.mark.parametrize("kept", [0, 1, 2, 4, 5, 9, 11])
@pytest.mark.parametrize("torn", [0, 1, 60])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(ask, many, output, whole, kept, torn):
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 11
    output.write_bytes(b"".join(lines[:kept]) + b"".join(lines[kept:])[:torn])
    said = ask(many, *SAMPLED)
    assert output.read_bytes() == whole
    assert said.startswith("11 answers, ")
    assert ("tokens/s" in said) == (kept < 11)


def test_a_finished_file_needs_no_weights(ask, many, output, whole, monkeypatch):
    output.write_bytes(whole)
    monkeypatch.delattr(regenerate, "load_models")
    assert ask(many, *SAMPLED).startswith("11 answers, ")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (["--seed", "5"], "line 1: seed is 4 there and 5 here"),
        (["--temperature", "0"], "line 1: temperature is 1.5 there and 0.0 here"),
        (["--max-new-tokens", "21"], "line 1: max_new_tokens is 20 there and 21 here"),
        (["--max-length", "201"], "line 1: max_length is 200 there and 201 here"),
        (["--thinking"], "line 1: thinking is False there and True here"),
        (["--dtype", "bfloat16"], "line 1: dtype is 'float32' there and 'bfloat16' here"),
        (["--data", "other"], "line 2: it answers another prompt than line 2 of --data, or another target"),
        (["--data", "gap"], "line 2: line is 2 there and 3 here"),
        (["--num-prompts", "1"], "line 2: only 1 answers are asked for"),
    ],
)
def test_another_runs_file_is_not_gone_on_with(ask, write, output, tmp_path, monkeypatch, changed, reason):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt_ids": [7, 9, 1]}, {"prompt_ids": [7, 9, 2]}]
    first = write(*rows)
    write(rows[0], {"prompt_ids": [7, 9, 3]}, name="other")
    write(rows[0], "", rows[1], name="gap")
    ask(first, *SAMPLED)
    before = output.read_bytes()
    with pytest.raises(UserError, match=rf"--output .*, {reason}"):
        ask(first, *SAMPLED, *changed)
    assert output.read_bytes() == before


@pytest.mark.parametrize("content", ["mine\n", "mine", '{"line": 1}\n', '{"text": "a", "asked": "b"}\n'])
def test_what_is_no_file_of_answers_is_left_as_it_is(ask, write, output, content):
    output.write_text(content)
    with pytest.raises(UserError, match="line 1: no result of this command"):
        ask(write({"prompt": "a"}))
    assert output.read_text() == content


def test_only_one_run_writes_a_file(ask, write, output):
    with output.open("wb") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run is writing it"):
            ask(write({"prompt": "a"}))


def test_a_prompt_that_is_too_long_is_skipped_with_the_turns_after_it(arguments, write, output, capsys):
    turns = [{"role": "user", "content": text} for text in ("a", "b" * 150, "c")]
    data = write({"messages": turns}, {"prompt": "d"})
    regenerate.main(arguments(data))
    out, err = capsys.readouterr()
    assert out.startswith("2 answers, ")
    assert [line["line"] for line in lines_of(output)] == [1, 2]
    assert f"first of them {data}, line 1: 221 tokens; --max-length leaves room for 180" in err
    assert "skipped: 2 prompts too long for --max-length" in err


def test_prompts_that_the_template_cannot_render_are_skipped(arguments, write, output, capsys, tmp_path):
    picky = pair.TEMPLATE + "{% if messages[0]['content'] == 'no' %}{{ raise_exception('no!') }}{% endif %}"
    odd = pair.write_target(tmp_path / "odd", template=picky)
    regenerate.main(arguments(write({"prompt": "no"}, {"prompt": "yes"}), "--target", odd))
    assert [line["line"] for line in lines_of(output)] == [2]
    assert "skipped: 1 prompts that the chat template cannot render" in capsys.readouterr().err


def test_a_draft_changes_no_answer(ask, write, output, draft):
    data = write({"messages": CHAT}, {"prompt": "a"}, {"prompt_ids": pair.ANSWER_IDS[:2]})
    ask(data)
    plain = output.read_bytes()
    output.unlink()
    said = ask(data, "--draft", draft)
    assert output.read_bytes() == plain
    assert ", acceptance length 1.1" in said
