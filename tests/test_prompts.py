import io
import json
import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_jax.errors import UserError
from inference import prompts
from inference.prompts import Prompt, encode
from tests import pair

# Where the real tokenizer lies: a directory with tokenizer.json and tokenizer_config.json.
QWEN3 = Path(os.environ.get("QWEN3_TOKENIZER", Path(__file__).parents[2] / "shared/tokenizers/qwen3"))
ASK = "What is 2 + 2?"


def refusal(act, *arguments, **options):
    with pytest.raises(UserError) as caught:
        act(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def write(tmp_path):
    def rows(*lines, name="p.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return rows


def test_a_file_holds_prompts_of_all_three_forms_and_names_each_by_its_line(write):
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    path = write({"prompt": "one", "id": 7}, "", {"messages": chat}, "  ", {"prompt_ids": [3, 0]}, "")
    assert prompts.from_file(path) == [
        Prompt(f"{path}, line 1", text="one"),
        Prompt(f"{path}, line 3", messages=chat),
        Prompt(f"{path}, line 5", ids=[3, 0]),
    ]


def test_a_file_may_come_from_another_system(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes('\ufeff{"prompt": "ä\u2028b"}\r\n{"prompt": "c"}\r\n'.encode())
    assert [prompt.text for prompt in prompts.from_file(str(path))] == ["ä\u2028b", "c"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "the list [1]"),
        ("null", "missing or null"),
        ({}, "no prompt"),
        ({"question": "a"}, "no prompt"),
        ({"prompt": "a", "prompt_ids": [1]}, "prompt and prompt_ids"),
        ({"prompt": ""}, "empty"),
        ({"prompt": " \n"}, "empty"),
        ({"prompt": None}, "prompt is missing or null"),
        ({"prompt": 3}, "prompt is the int 3"),
        ('{"prompt": "a\\ud800"}', "not valid UTF-8"),
        ({"prompt_ids": []}, "prompt_ids is an empty list"),
        ({"prompt_ids": "12"}, "prompt_ids is the str 12"),
        ({"prompt_ids": [1, 2.0]}, "prompt_ids"),
        ({"prompt_ids": [True]}, "prompt_ids"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "hi"}, "messages is the str hi"),
        ({"messages": ["hi"]}, "messages[0] is the str hi"),
        ({"messages": [{"role": "user"}]}, "messages[0]: content is missing"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0]: content is the list"),
        ({"messages": [{"content": "a"}]}, "messages[0]: role is missing or null"),
        ({"messages": [{"role": "User", "content": "a"}]}, "messages[0]: role is the str User"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0]: role is the list ['user']"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "last message"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line(write, row, reason):
    path = write({"prompt": "fine"}, "", row)
    message = refusal(prompts.from_file, path)
    assert message.startswith(f"{path}, line 3: ")
    assert reason in message


def test_a_file_that_is_absent_empty_or_no_text_is_refused_by_name(write, tmp_path):
    for path in (str(tmp_path / "absent.jsonl"), str(tmp_path), write("", " ", name="empty.jsonl")):
        assert refusal(prompts.from_file, path).startswith(path)
    (tmp_path / "binary").write_bytes(b'{"prompt": "\xff"}')
    assert "not valid UTF-8 text (byte 13)" in refusal(prompts.from_file, str(tmp_path / "binary"))


def test_text_is_taken_as_it_is_unless_it_is_nothing():
    assert prompts.from_text(" a\n", "--prompt").text == " a\n"
    for text in ("", " ", "\n\t"):
        assert refusal(prompts.from_text, text, "--prompt") == "--prompt: empty; some text is needed"
    assert "--prompt: not valid UTF-8" in refusal(prompts.from_text, "a\udcff", "--prompt")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_standard_input_is_one_prompt_without_the_newline_at_its_end(end):
    content = f"a\n\nb{end}".encode()
    assert prompts.from_stream(io.BytesIO(content), raw=False).text == "a\n\nb"
    assert prompts.from_stream(io.BytesIO(content), raw=True).text == f"a\n\nb{end}"
    assert "standard input: empty" in refusal(prompts.from_stream, io.BytesIO(end.encode()), raw=False)
    assert "standard input: not valid UTF-8" in refusal(prompts.from_stream, io.BytesIO(b"\xff"), raw=True)


def test_ids_are_used_as_they_are_and_need_no_tokenizer():
    assert encode(Prompt("here", ids=[5, 6]), None) == encode(Prompt("here", ids=[5, 6]), None, raw=True) == [5, 6]


def test_text_is_the_only_message_of_a_chat():
    tokenizer = pair.tokenizer()
    ids = encode(Prompt("here", text="hé"), tokenizer)
    assert tokenizer.decode(ids) == ("<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert ids == encode(Prompt("here", messages=[{"role": "user", "content": "hé"}]), tokenizer)


def test_raw_text_has_only_the_special_tokens_that_the_tokenizer_adds():
    tokenizer = pair.tokenizer(template=None)
    assert tokenizer.decode(encode(Prompt("here", text="hé"), tokenizer, raw=True)) == "hé"
    adding = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|im_start|>")
    adding.add_bos_token = True
    adding.update_post_processor()
    assert adding.decode(encode(Prompt("here", text="hé"), adding, raw=True)) == "<|im_start|>hé"


def test_what_cannot_be_rendered_is_refused_with_the_way_out():
    bare, chat = pair.tokenizer(template=None), [{"role": "user", "content": "a"}]
    assert "no chat template; --raw takes text as it is" in refusal(encode, Prompt("f, line 2", text="a"), bare)
    assert "no chat template" in refusal(encode, Prompt("f, line 2", messages=chat), bare)
    raw = refusal(encode, Prompt("f, line 2", messages=chat), pair.tokenizer(), raw=True)
    assert raw.startswith("f, line 2: ")
    assert "leave out --raw" in raw
    for template in (
        "{{ raise_exception('no system') }}",
        "{% if %}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 / 0 }}",
    ):
        broken = pair.tokenizer(template)
        assert refusal(encode, Prompt("f, line 2", text="a"), broken).startswith("f, line 2: the chat template")


@pytest.fixture(scope="module")
def qwen3():
    if not QWEN3.is_dir():
        pytest.skip(f"no Qwen3 tokenizer at {QWEN3}; the environment variable QWEN3_TOKENIZER says where it is")
    return PreTrainedTokenizerFast.from_pretrained(QWEN3)


@pytest.mark.parametrize("thinking", [False, True])
def test_qwen3_prompts_are_those_of_its_own_template(qwen3, thinking):
    # A misspelt argument of the template is ignored without a word, so the tail is written down (faults 13 and 40).
    ids = encode(Prompt("here", text=ASK), qwen3, thinking=thinking)
    text = f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n" + (
        "" if thinking else "<think>\n\n</think>\n\n"
    )
    assert qwen3.decode(ids) == text
    assert ids == qwen3(text)["input_ids"]


def test_qwen3_does_not_think_unless_asked(qwen3):
    prompt = Prompt("here", text=ASK)
    assert prompts.has_thinking_switch(qwen3)
    assert encode(prompt, qwen3) == encode(prompt, qwen3, thinking=False) != encode(prompt, qwen3, thinking=True)


def test_qwen3_second_turns_do_not_repeat_the_thoughts_of_the_first(qwen3):
    # What came before the last question is rendered as the template renders it, thoughts left out.
    chat = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
        {"role": "user", "content": ASK},
    ]
    assert qwen3.decode(encode(Prompt("here", messages=chat), qwen3)) == (
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_template_may_have_no_switch_for_thinking():
    assert prompts.has_thinking_switch(pair.tokenizer())
    assert not prompts.has_thinking_switch(pair.tokenizer("{{ messages[0]['content'] }}"))
    assert not prompts.has_thinking_switch(pair.tokenizer(template=None))
