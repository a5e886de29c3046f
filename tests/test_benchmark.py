import gzip
import html
import io
import json
import random
import sys
import types
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import cast

import pytest

from dflash_jax.errors import UserError
from inference import benchmark, measure, questions, report, tables
from inference.engine import Engine, Generation, SamplingConfig
from inference.figures import accepted_by_slot, figures, histogram
from inference.measure import Asking, Measured, Pair
from inference.parts import Parts
from tests import pair, tiny

RESULT_KEYS = {
    "data",
    "temperature",
    "batch_size",
    "block_size",
    "prompts",
    "identical",
    "baseline_tokens_per_second",
    "dflash_tokens_per_second",
    "speedup",
    "acceptance_length",
    "block_seconds",
    "token_seconds",
    "block_cost",
    "histogram",
    "by_slot",
    "time_split",
    "per_prompt",
}
PARTS = {"prefill_seconds", "draft_seconds", "verify_seconds", "rest_seconds"}
PICTURES = [
    "Speedup",
    "Acceptance length",
    "Acceptance by slot",
    "Blocks by length",
    "Time with the draft",
]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def write(tmp_path):
    def rows(*lines):
        path = tmp_path / "q.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return rows


@pytest.fixture
def run(target, draft, tmp_path, capsys):
    """Run the command on the tiny pair; return its JSON, its page and standard output."""

    def run(*arguments):
        capsys.readouterr()
        files = ["--json", tmp_path / "o.json", "--report", tmp_path / "o.html"]
        sizes = ["--max-length", 300, "--max-new-tokens", 20]
        benchmark.main([*map(str, ["--ckpt", target, "--draft", draft, *sizes, *files, *arguments])])
        page = (tmp_path / "o.html").read_text(encoding="utf-8")
        return json.loads((tmp_path / "o.json").read_text()), page, capsys.readouterr().out

    return run


def answer(blocks, *, cut=False, seconds=2.0, tokens=None, sizes=None):
    """An answer of blocks; the last one is cut inside its accepted drafts, or ends with the target's own token."""
    drafted = [False]
    for block in blocks:
        drafted += [True] * (block - 1) + [False]
    drafted[-1] = cut
    sizes = list(sizes or [4] * len(blocks))
    return Generation(tokens or list(range(len(drafted))), drafted, list(blocks), "length", 0.5, seconds, sizes)


def test_shares_by_slot_of_whole_blocks():
    # Accepted drafts: 3, 0, 1, 3.
    assert accepted_by_slot([answer([4, 1]), answer([2, 4])]) == pytest.approx([3 / 4, 2 / 4, 2 / 4])


def test_a_block_cut_inside_its_drafts_says_nothing_of_later_slots():
    # Accepted: 0, 3, and 2 of a block that was cut there: of the two that came to slot 3, one was judged and accepted.
    assert accepted_by_slot([answer([1, 4]), answer([2], cut=True)]) == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    # The same with the target's own token at the end: slot 2 was refused.
    assert accepted_by_slot([answer([1, 4]), answer([2])]) == pytest.approx([2 / 3, 1 / 3, 1 / 3])


def test_slots_that_no_block_came_to_have_no_share():
    assert accepted_by_slot([answer([1, 1])]) == [0.0, None, None]
    assert accepted_by_slot([answer([2], cut=True)]) == [1.0, 1.0, None]
    assert accepted_by_slot([answer([])]) == []


def test_a_short_block_says_nothing_of_slots_that_it_does_not_have():
    # Slot 1: 3 of 4; slot 2, of the three that came so far and have it, two: 1 of 2; slot 3: 0 of 1.
    mixed = answer([2, 3, 2, 1, 1], sizes=[2, 4, 4, 4, 1])
    assert accepted_by_slot([mixed]) == pytest.approx([3 / 4, 3 / 4 / 2, 0])


def test_blocks_are_counted_by_length():
    assert histogram([answer([4, 1]), answer([2, 4, 1])], 4) == [2, 1, 0, 2]
    assert histogram([answer([4, 1])], None) == [1, 0, 0, 1]
    assert histogram([answer([])], None) == []


def test_figures_are_golden():
    one = Pair("f, line 1", 1, "a", [1, 2], answer([1] * 6, seconds=9.0), answer([4, 2], seconds=4.0))
    other = Pair("f, line 2", 2, "b", [3], answer([1, 1]), answer([1, 1], tokens=[0, 1, 7]))
    got = figures(Measured([one, other], 4.0, 2.5), 4, Parts(0.2, 0.6))
    per_prompt = got.pop("per_prompt")
    assert got.pop("time_split") == pytest.approx(
        {"prefill_seconds": 1.0, "draft_seconds": 0.5, "verify_seconds": 1.5, "rest_seconds": 0.5}
    )
    assert got.pop("by_slot") == pytest.approx([0.5, 0.25, 0.25])
    assert got.pop("histogram") == [2, 1, 0, 1]
    assert got == pytest.approx(
        {
            "prompts": 2,
            "identical": 1,
            "baseline_tokens_per_second": 2.0,
            "dflash_tokens_per_second": 3.2,
            "speedup": 1.6,
            "acceptance_length": 2.0,
            "block_seconds": 0.625,
            "token_seconds": 0.5,
            "block_cost": 1.25,
        }
    )
    assert [one["first_difference"] for one in per_prompt] == [None, 2]
    assert per_prompt[0] == {
        "where": "f, line 1",
        "turn": 1,
        "prompt_tokens": 2,
        "new_tokens": 7,
        "finish_reason": "length",
        "identical": True,
        "first_difference": None,
        "baseline_new_tokens": 7,
        "baseline_prefill_seconds": 0.5,
        "baseline_decode_seconds": 9.0,
        "baseline_tokens_per_second": 6 / 9,
        "dflash_prefill_seconds": 0.5,
        "dflash_decode_seconds": 4.0,
        "dflash_tokens_per_second": 1.5,
        "speedup": 2.25,
        "acceptance_length": 3.0,
        "emitted_per_block": [4, 2],
    }


def test_answers_of_one_token_have_no_speed():
    got = figures(Measured([Pair("f", 1, "a", [1], answer([]), answer([]))], 0.1, 0.1), 4, None)
    assert (got["identical"], got["histogram"], got["by_slot"]) == (1, [0] * 4, [])
    assert [got[key] for key in ("speedup", "acceptance_length", "block_seconds", "block_cost")] == [None] * 4


def test_blocks_of_several_sizes_have_no_parts():
    got = figures(Measured([Pair("f", 1, "a", [1], answer([1, 1]), answer([2]))], 1.0, 1.0), None, None)
    assert (got["time_split"], got["histogram"]) == (None, [0, 1])


def test_a_batchs_seconds_are_those_of_the_wall_less_all_prefills(monkeypatch):
    class Slow:
        def generate(self, asked, sampling, speculate):
            return [answer([1], seconds=4.0) for _ in asked]  # 0.5 s of prefill each

    times = iter([100.0, 106.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(times))
    answers, seconds = measure.decoding(cast(Engine, Slow()), [[1], [2], [3]], SamplingConfig(), True)
    assert (len(answers), seconds) == (3, 4.5)


def test_ways_take_turns_and_share_one_measurement_without_the_draft(monkeypatch):
    engines = [tiny.engine(block_size=size, batch_size=2) for size in (4, 8)]
    calls = []
    generate = Engine.generate

    def noted(engine, asked, sampling, speculate=True):
        calls.append((engine.block_size if speculate else 1, len(asked)))
        return generate(engine, asked, sampling, speculate)

    monkeypatch.setattr(Engine, "generate", noted)
    asked = [questions.Question(questions.Prompt(f"row {i}", ids=ids)) for i, ids in enumerate(tiny.prompts(10))]
    four, eight = measure.measure(engines, asked, Asking(None, False, SamplingConfig(16)), 2)
    assert calls == [(1, 8), (4, 8), (8, 8), (1, 2), (4, 2), (8, 2)]
    assert four.plain_seconds == eight.plain_seconds > 0
    assert [one.where for one in four.pairs] == [f"row {i}" for i in range(10)]
    for one, other in zip(four.pairs, eight.pairs, strict=True):
        assert one.plain.token_ids == one.drafted.token_ids == other.drafted.token_ids
        assert max(one.drafted.emitted_per_block) <= 4


def test_rows_of_a_file_are_asked_as_they_are(write):
    path = write(
        {"prompt": "a", "task_id": 1},
        {"messages": [{"role": "user", "content": "b"}]},
        "",
        {"prompt_ids": [1, 2]},
        {"question": "c", "answer": "d"},
        {"turns": ["e", "f"]},
    )
    read = questions.read(path)
    assert [one.first.text for one in read] == ["a", None, None, "c", "e"]
    assert read[1].first.messages == [{"role": "user", "content": "b"}]
    assert read[2].first.ids == [1, 2]
    assert [one.later for one in read] == [()] * 4 + [("f",)]
    assert read[3].first.where == f"{path}, line 5"
    assert len(questions.read(path, 2)) == 2


def test_gzipped_files_are_read(tmp_path):
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert questions.read(str(path))[0].first.text == "a"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"q\.jsonl\.gz: cannot be read"):
        questions.read(str(path))


@pytest.mark.parametrize(
    ("name", "row", "turns"),
    [
        (
            "gsm8k",
            {"question": "1+1? {x}"},
            ["1+1? {x}\nPlease reason step by step, and put your final answer within \\boxed{}."],
        ),
        (
            "aime25",
            {"problem": "p"},
            ["p\nPlease reason step by step, and put your final answer within \\boxed{}."],
        ),
        (
            "humaneval",
            {"prompt": "def f(): 100 % 7"},
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef f(): 100 % 7\n```"
            ],
        ),
        ("mbpp", {"prompt": "p"}, ["p"]),
        ("mt-bench", {"prompt": ["p", "q"]}, ["p", "q"]),
        ("alpaca", {"instruction": "i", "input": ""}, ["i"]),
        ("alpaca", {"instruction": "i", "input": "j"}, ["i\n\nInput:\nj"]),
    ],
)
def test_rows_of_named_sets_are_asked_in_the_references_words(name, row, turns, write):
    [read] = questions.read(f"{name}={write(row)}")
    assert [read.first.text, *read.later] == turns


def test_contest_problems_come_with_the_code_to_begin_with(write):
    path = write({"question_content": "q", "starter_code": "class S:"}, {"question_content": "q", "starter_code": ""})
    texts = sorted(str(one.first.text).split("### Question:\n")[1] for one in questions.read(f"livecodebench={path}"))
    assert texts == [
        "q\n\n### Format: Use the following code structure:\n```python\nclass S:\n```\n\n"
        "### Answer: (use the provided format with backticks)",
        "q\n\n### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
        "### Answer: (use the provided format with backticks)",
    ]


def test_the_published_reference_asks_the_same_in_the_same_order(write):
    reference = pytest.importorskip("dflash.benchmark")
    rows = [{"question": f"{i}?", "problem": f"{i}", "prompt": f"{i}"} for i in range(9)]
    path = write(*rows)
    for name, known in reference.DATASETS.items():
        if name == "mt-bench":
            continue
        ours = [one.first.text for one in questions.read(f"{name}={path}", 5)]
        assert ours == reference._select_dataset([known["format"](row) for row in rows], 5)


def test_named_sets_come_through_the_datasets_library(monkeypatch):
    asked = []

    def load_dataset(*place, **options):
        asked.append((place, options))
        return [{"prompt": [f"{i}", f"{i}?"]} for i in range(5)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    read = questions.read("mt-bench", 3)
    assert asked == [(("HuggingFaceH4/mt_bench_prompts",), {"split": "train"})]
    order = list(range(5))
    random.Random(42).shuffle(order)
    assert [(one.first.text, one.later) for one in read] == [(f"{i}", (f"{i}?",)) for i in order[:3]]
    assert read[0].first.where == f"mt-bench, row {order[0] + 1}"


def test_without_the_library_or_the_hub_a_line_says_what_is_right(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="--data gsm8k: needs a library; `pip install datasets`, or --data gsm8k=FILE"):
        questions.read("gsm8k")

    def unreachable(*place, **options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(UserError, match=r"cannot be fetched from the hub \(no route\); a network that reaches"):
        questions.read("gsm8k")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1]", "line 1: the list [1]; a row {"),
        ({"text": "a"}, "line 1: no prompt; a row {"),
        ({"question": "a", "prompt": "b"}, "line 1: prompt and question; a row {"),
        ({"question": 3}, "question is the int 3; a text is right"),
        ({"turns": []}, "turns is no list of texts"),
        ({"turns": ["a", " "]}, "line 1: empty; some text is needed"),
        ("", "empty; a row {"),
    ],
)
def test_rows_that_are_not_right_are_refused(row, message, write):
    with pytest.raises(UserError) as refused:
        questions.read(write(row))
    assert message in str(refused.value)


def test_a_row_that_is_none_of_the_named_set_is_refused(write):
    with pytest.raises(UserError, match=r"line 1: no row of gsm8k \(KeyError\('question'\)\)"):
        questions.read(f"gsm8k={write({'prompt': 'a'})}")


def test_the_command_writes_what_is_promised(run, write):
    asked = "Is 1 < 2 & 3? <script>alert(1)</script>"
    document, page, out = run("--data", write({"question": asked}, {"prompt": "b"}))
    [result] = document["results"]
    assert result.keys() == RESULT_KEYS
    assert {key: document[key] for key in result} == result
    assert document.keys() == RESULT_KEYS | {"results", "combinations", "machine", "versions", "settings"}
    assert document["machine"].keys() == {"device", "backend", "devices", "cpu", "cores"}
    assert document["versions"].keys() == {"python", "dflash-jax", "jax", "jaxlib", "flax"}
    assert document["settings"]["max_new_tokens"] == 20
    assert document["settings"]["thinking"] is False
    assert (result["prompts"], result["identical"], result["block_size"]) == (2, 2, 8)
    assert result["acceptance_length"] == 1.1
    assert result["histogram"] == [18, 2, 0, 0, 0, 0, 0, 0]
    assert result["by_slot"] == [0.1, 0.0, None, None, None, None, None]
    assert result["block_cost"] == pytest.approx(result["block_seconds"] / result["token_seconds"])
    assert result["speedup"] == pytest.approx(result["acceptance_length"] / result["block_cost"])
    assert result["time_split"].keys() == PARTS
    assert [one["emitted_per_block"] for one in result["per_prompt"]] == [pair.EMITTED] * 2
    assert "tokens identical in 2 of 2 prompts" in out
    assert "blocks by tokens: 1: 90.0%, 2: 10.0%," in out
    assert "accepted up to slot: 1: 10.0%, 2: 0.0%, 3: –," in out
    check_page(page, asked)


def test_what_is_measured_is_written_before_the_next_is(run, write, tmp_path, monkeypatch, capsys):
    path, measure = write({"prompt": "b"}), benchmark.measure

    def once(engines, *arguments):
        monkeypatch.setattr(benchmark, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        return measure(engines, *arguments)

    monkeypatch.setattr(benchmark, "measure", once)
    with pytest.raises(KeyboardInterrupt):
        run("--data", path, "--batch-size", 1, 2)
    document = json.loads((tmp_path / "o.json").read_text())
    assert ([one["batch_size"] for one in document["results"]], document["combinations"]) == ([1], 2)
    assert "speedup" not in document  # as it would be at the top of the one combination that was asked for
    assert "batch 1, block 8" in capsys.readouterr().out
    assert "batch 1, block 8" in (tmp_path / "o.html").read_text()


def check_page(page, asked):
    """The page is well-formed, shows every picture and each token of the answer, and takes nothing from elsewhere."""
    root = ET.fromstring(page)
    assert [title.text for title in root.iter(f"{SVG}title")] == PICTURES
    text = next(p for p in root.iter("p") if p.get("class") == "text")
    blocks = [[(token.get("class"), token.text) for token in block] for block in text]
    assert blocks[3] == [("drafted", "l"), ("target", "f")]
    assert "".join(str(piece) for block in blocks for _, piece in block) == pair.ANSWER
    assert [kind for block in blocks for kind, _ in block].count("drafted") == 1
    assert html.escape(asked) in page
    assert "<script" not in page
    assert page.count("http") == page.count("http://www.w3.org/2000/svg") == len(PICTURES)
    assert "url(" not in page


def test_combinations_are_all_measured_and_named(run, write):
    arguments = ["--block-size", 4, 8, "--temperature", 0, 1.5, "--top-k", 1]
    document, page, out = run("--data", write({"prompt": "a"}, {"prompt": "b"}), *arguments)
    assert document.keys() == {"results", "combinations", "machine", "versions", "settings"}
    combinations = [(one["temperature"], one["batch_size"], one["block_size"]) for one in document["results"]]
    assert combinations == [(0.0, 1, 4), (0.0, 1, 8), (1.5, 1, 4), (1.5, 1, 8)]
    assert [one["identical"] for one in document["results"]] == [2] * 4
    assert [len(one["by_slot"]) for one in document["results"][:2]] == [3, 7]
    lines = out.splitlines()
    assert lines[0].split() == " ".join(tables.HEADS).split()
    assert [line.split()[:4] for line in lines[1:5]] == [
        ["q.jsonl", f"{t:g}", f"{b}", f"{k}"] for t, b, k in combinations
    ]
    assert out.count("(sampled answers may differ: rounding can tip a draw)") == 2
    assert page.count("<svg") == 2 + 3 * 4
    assert "q.jsonl, temperature 1.5, batch 1, block 4" in page


def test_a_second_turn_is_asked_after_the_models_own_answer(run, write, capsys):
    document, page, _ = run("--data", write({"turns": ["a", "b"]}, {"prompt": "c"}))
    first, other, second = document["per_prompt"]
    assert (first["turn"], other["turn"], second["turn"]) == (1, 1, 2)
    # The chat so far: the question, the answer without its stop token, and the marks around both.
    chat = f"<user\na>\n<assistant\n{'.' * (len(pair.ANSWER_IDS) - 1)}>\n<user\nb>\n<assistant\n<think>\n\n</think>\n\n"
    assert second["prompt_tokens"] == len(chat)
    assert document["prompts"] == 3
    assert '<p class="quiet">b</p>' in page


def test_a_second_turn_without_room_is_left_out_and_told(run, write, capsys, target, draft):
    path = write({"turns": ["a", "b" * 300]})
    benchmark.main(
        ["--ckpt", target, "--draft", draft, "--max-length", "200", "--data", path, "--max-new-tokens", "20"]
    )
    told = capsys.readouterr()
    assert f"left out: {path}, line 1, turn 2: " in told.err
    assert "--max-length 200 is the limit" in told.err
    assert "identical in 1 of 1 prompts" in told.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nothing.jsonl"], "--data nothing.jsonl: no such file or set; a JSONL file, or one of gsm8k, "),
        (["--data", "gsm8k=nothing.jsonl"], "--data gsm8k=nothing.jsonl: no such file"),
        (["--block-size", "1"], "'1'; a whole number of 2 or more, or auto, is right"),
        (["--block-size", "400"], "--block-size: 400; up to --max-length, 300, is right"),
        (["--batch-size", "2", "2"], "--batch-size: a value more than once"),
        (["--temperature", "-1"], "--temperature: -1.0; 0 (greedy), or a number from"),
        (["--json", "no/where.json"], "--json no/where.json: no is no directory"),
        (["--report", ""], "--report '': no name of a file"),
        (["--json", "one", "--report", "one"], "--json and --report: both one"),
        (["--max-new-tokens", "1"], "'1'; a whole number of 2 or more is right"),
        (["--mesh", "data=64"], "64"),
        (["--max-new-tokens", "299"], "line 1: 39 tokens and --max-new-tokens 299 make 338; --max-length 300"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_written(
    arguments, message, target, draft, write, tmp_path, monkeypatch
):
    path = write({"prompt": "a"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        benchmark.main(["--ckpt", target, "--draft", draft, "--max-length", "300", "--data", path, *arguments])
    assert message in str(refused.value)
    assert [file.name for file in tmp_path.iterdir()] == ["q.jsonl"]


def test_a_target_without_a_draft_and_an_output_over_the_prompts_are_refused(target, draft, write):
    path = write({"prompt": "a"})
    with pytest.raises(UserError, match="--draft: missing"):
        benchmark.main(["--ckpt", target, "--data", path])
    with pytest.raises(UserError, match="that is the file of prompts"):
        benchmark.main(["--ckpt", target, "--draft", draft, "--data", path, "--json", path])
    assert json.loads(Path(path).read_text()) == {"prompt": "a"}


def test_block_sizes_are_read_and_auto_is_one():
    args = benchmark._parser().parse_args(["--data", "a", "b", "--block-size", "8", "auto"])
    assert (args.data, args.block_size, args.temperature, args.batch_size) == (["a", "b"], [8, "auto"], [0.0], [1])


def test_a_terminal_shows_a_ruled_table(run, write):
    document, _, _ = run("--data", write({"prompt": "a"}))

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    tables.show(document["results"], out)
    assert "┃" in out.getvalue()
    assert "q.jsonl" in out.getvalue()


def test_where_answers_differ_is_told():
    one = {"where": "f, line 3", "turn": 1, "first_difference": 4, "identical": False}
    result = {"identical": 1, "prompts": 8, "temperature": 0.0, "per_prompt": [one] * 7}
    assert tables.sameness(result) == (
        "tokens identical in 1 of 8 prompts; different in "
        f"{'; '.join(['f, line 3, turn 1, from token 5'] * 5)} and 2 more"
    )


def test_control_characters_and_broken_text_are_shown_and_not_obeyed():
    assert report.escape('<a href="\'">&\x00\x1b[31m\ud800') == "&lt;a href=&quot;&#x27;&quot;&gt;&amp;␀␛[31m\ufffd"


def test_labels_tell_what_differs_and_fit():
    one = {"data": "/a/b/questions.jsonl", "temperature": 0.0, "batch_size": 1, "block_size": 8}
    assert report._labels([one]) == ["questions.jsonl"]
    long = one | {"data": "x" * 60, "batch_size": 8, "block_size": "auto"}
    labels = report._labels([one, long | {"temperature": 0.5}])
    assert labels == [
        "questions.…, temperature 0, batch 1, block 8",
        "xxxxxxx…, temperature 0.5, batch 8, block auto",
    ]
