import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from convert import load_tokenizer
from convert.demo_target import find_demo_target
from dflash_jax.errors import UserError
from inference.prompts import Prompt, encode
from tests import pair
from training.chats import Language, documents

# Where the real tokenizer lies: a directory with tokenizer.json and tokenizer_config.json.
QWEN3 = Path(os.environ.get("QWEN3_TOKENIZER", Path(__file__).parents[2] / "shared/tokenizers/qwen3"))
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: thoughts are rendered in answers to the last question alone, empty ones where an answer has none.
THINKER = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] != 'assistant' %}{{ m['content'] }}"
    "{% elif loop.index0 < ns.last %}{{ m['content'].split('</think>\\n\\n')[-1] }}"
    "{% elif '</think>' in m['content'] %}{{ m['content'] }}"
    "{% else %}<think>\n\n</think>\n\n{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HERE = "c.jsonl, line 7"


def ask(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def refusal(row, language):
    with pytest.raises(UserError) as caught:
        documents(row, HERE, language)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{HERE}: ")
    return message.removeprefix(f"{HERE}: ")


def read(language, *messages):
    """What each document says, supervised runs in brackets."""
    return [marked(document, language) for document in documents({"messages": list(messages)}, HERE, language)]


def marked(document, language):
    assert len(document.tokens) == len(document.supervised)
    text = ""
    for supervised, run in itertools.groupby(zip(*document, strict=True), lambda pair: pair[1]):
        part = language.tokenizer.decode([token for token, _ in run])
        text += f"⟦{part}⟧" if supervised else part
    return text


def tiny(template=PLAIN, *, thinking=False):
    return Language(pair.tokenizer(template), (pair.STOP,), pair.VOCABULARY, thinking)


@pytest.fixture(scope="module")
def llama():
    tokenizer = pair.tokenizer(LLAMA)
    marks = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"bos_token": marks[0], "additional_special_tokens": marks[1:]})
    return Language(tokenizer, tuple(tokenizer.convert_tokens_to_ids(["<|eot_id|>"])), len(tokenizer), False)


@pytest.fixture(scope="module")
def qwen3():
    if not QWEN3.is_dir():
        pytest.skip(f"no Qwen3 tokenizer at {QWEN3}; the environment variable QWEN3_TOKENIZER says where it is")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(QWEN3)
    return lambda *, thinking: Language(tokenizer, (151645, 151643), 151936, thinking)


@pytest.fixture(scope="module")
def smollm2():
    try:
        target = find_demo_target()
    except UserError as error:
        pytest.skip(str(error))
    return Language(load_tokenizer(str(target)), (2,), 49152, False)


def test_thinking_that_an_answer_was_given_with_is_asked_for():
    row = {"prompt_ids": [1], "response_ids": [2], "thinking": True}
    assert refusal(row, tiny()).startswith("answered with thinking true, and prepared otherwise; --thinking")
    assert documents(row, HERE, tiny(thinking=True))


def test_a_chat_is_one_document_where_the_template_renders_answers_always_alike():
    # A token is a byte or a mark, so ids can be written down: <|im_start|> is 256 and <|im_end|> 257.
    (document,) = documents({"messages": [ask("a"), answer("b"), ask("c"), answer("")]}, HERE, tiny())
    text = pair.tokenizer().convert_ids_to_tokens(document.tokens)
    assert "".join(text) == (
        "<|im_start|>userĊa<|im_end|>Ċ<|im_start|>assistantĊb<|im_end|>"
        "Ċ<|im_start|>userĊc<|im_end|>Ċ<|im_start|>assistantĊ<|im_end|>"
    )
    assert document.tokens[-1] == pair.STOP == 257
    assert [i for i, supervised in enumerate(document.supervised) if supervised] == [20, 21, 43]
    assert [text[i] for i in (20, 21, 43)] == ["b", "<|im_end|>", "<|im_end|>"]


def test_where_thoughts_are_not_repeated_each_answer_has_a_document_of_its_own():
    """What Qwen3's template does, without its tokenizer, which is not everywhere."""
    question = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    thought, empty = "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n"
    thinking = tiny(THINKER, thinking=True)
    assert read(thinking, ask("q"), answer(f"{thought}yo"), ask("q"), answer(f"{thought}four")) == [
        f"{question}⟦{thought}yo<|im_end|>⟧",
        f"{question}yo<|im_end|>\n{question}⟦{thought}four<|im_end|>⟧",
    ]
    assert read(thinking, ask("q"), answer("yo")) == [f"{question}⟦{empty}yo<|im_end|>⟧"]
    assert read(tiny(THINKER), ask("q"), answer("yo"), ask("q"), answer("four")) == [
        f"{question}{empty}⟦yo<|im_end|>⟧",
        f"{question}yo<|im_end|>\n{question}{empty}⟦four<|im_end|>⟧",
    ]


def test_a_templates_own_default_prompt_is_in_the_document(smollm2):
    assert read(smollm2, ask("hi"), answer("Hello.\n"), ask("2?"), answer(" four")) == [
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦Hello.\n<|im_end|>⟧\n"
        "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n⟦ four<|im_end|>⟧"
    ]
    (document,) = documents({"messages": [ask("hi"), answer("Hello.")]}, HERE, smollm2)
    assert document.tokens[-3:] == [19556, 30, 2]


def test_a_template_that_trims_answers_is_followed(llama):
    assert read(llama, ask("hi"), answer(" yo\n"), ask("2?"), answer("four"), ask("left out")) == [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦yo<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦four<|eot_id|>⟧"
    ]


def test_qwen3_without_thinking_gives_each_answer_a_document_of_its_own(qwen3):
    # The empty thoughts stand in the prompt of an answer, and not before answers of earlier turns.
    assert read(qwen3(thinking=False), ask("hi"), answer("yo"), ask("2?"), answer("four")) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦yo<|im_end|>⟧",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦four<|im_end|>⟧",
    ]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (answer("<think>\nhm\n</think>\n\nyo"), answer("<think>\nso\n</think>\n\nfour")),
        (answer("yo", reasoning_content="hm"), answer("four", reasoning_content="\nso\n")),
    ],
)
def test_qwen3_thoughts_are_supervised_in_their_own_turn_and_gone_in_the_next(qwen3, one, two):
    language = qwen3(thinking=True)
    assert read(language, ask("hi"), one, ask("2?"), two) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\nyo<|im_end|>⟧",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nso\n</think>\n\nfour<|im_end|>⟧",
    ]
    message = refusal({"messages": [ask("hi"), one]}, qwen3(thinking=False))
    assert message.startswith("messages[1]: an answer with reasoning, and --no-thinking; --thinking")


def test_qwen3_ids_are_those_of_decoding_and_of_the_answers_text(qwen3):
    # transformers finds no supervised token here: the stock template does not mark what is generated.
    row = {"messages": [ask("What is 2 + 2?"), answer("2 + 2 is 4.")]}
    for thinking in (False, True):
        language = qwen3(thinking=thinking)
        (document,) = documents(row, HERE, language)
        prompt = encode(Prompt("", messages=row["messages"][:1]), language.tokenizer, thinking=thinking)
        assert document.tokens[: len(prompt)] == prompt
        assert document.supervised == [False] * len(prompt) + [True] * (len(document.tokens) - len(prompt))
        thoughts = [151667, 271, 151668, 271] if thinking else []
        assert document.tokens[len(prompt) :] == [*thoughts, 17, 488, 220, 17, 374, 220, 19, 13, 151645]


def test_qwen3_tools_are_answered_between_calls_and_answers(qwen3):
    call = answer("", tool_calls=[{"name": "f", "arguments": {"x": 1}}])
    one, two = read(qwen3(thinking=False), ask("hi"), call, {"role": "tool", "content": "3"}, answer("three"))
    assert one.endswith('</think>\n\n⟦<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>⟧')
    assert two.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦three<|im_end|>⟧")


def test_an_answer_ends_where_decoding_would():
    assert read(tiny(), ask("a"), answer("b<|im_end|>c"))[0].endswith("assistant\n⟦b<|im_end|>⟧")


TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["\n", " x ", "<think>", "</think>", "é\n\n"]
)
CHAT = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXT), min_size=1, max_size=6)


@pytest.mark.parametrize(
    "name", ["plain", "thinking", "thinker", "thinker thinking", "llama", "smollm2", "qwen3", "qwen3 thinking"]
)
@settings(max_examples=25)
@given(chat=CHAT)
def test_every_answer_follows_what_decoding_would_be_given(name, chat, request):
    made = {
        "plain": tiny,
        "thinking": lambda: tiny(pair.TEMPLATE, thinking=True),
        "thinker": lambda: tiny(THINKER),
        "thinker thinking": lambda: tiny(THINKER, thinking=True),
        "llama": lambda: request.getfixturevalue("llama"),
        "smollm2": lambda: request.getfixturevalue("smollm2"),
        "qwen3": lambda: request.getfixturevalue("qwen3")(thinking=False),
        "qwen3 thinking": lambda: request.getfixturevalue("qwen3")(thinking=True),
    }
    language = made[name]()
    messages = [{"role": role, "content": text} for role, text in [("user", "q"), *chat, ("assistant", "end")]]
    try:
        rows = documents({"messages": messages}, HERE, language)
    except UserError:
        # Two answers in a row, or thoughts unasked for; what is not refused must be right.
        assert name.startswith(("qwen3", "thinker"))
        return
    prompts = [
        encode(Prompt("", messages=messages[:i]), language.tokenizer, thinking=language.thinking)
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    followed = []
    for row in rows:
        starts = [i for i, on in enumerate(row.supervised) if on and (i == 0 or not row.supervised[i - 1])]
        followed += [row.tokens[:start] for start in starts]
        assert row.tokens[-1] in language.stop_token_ids
        assert row.supervised[-1]
    assert followed == prompts


SHARED = [("system", "be"), ("human", "a"), ("gpt", "b"), ("observation", "c"), ("chatgpt", "d")]


def test_sharegpt_rows_are_the_chats_that_they_mean():
    names = ("system", "user", "assistant", "tool", "assistant")
    chat = [{"role": role, "content": text} for role, (_, text) in zip(names, SHARED, strict=True)]
    shared = [{"from": speaker, "value": text, "weight": 1} for speaker, text in SHARED]
    row = {"id": "x", "conversations": shared}
    assert documents(row, HERE, tiny()) == documents({"messages": chat}, HERE, tiny())


@pytest.mark.parametrize("more", [{}, {"messages": "of any kind"}, {"conversations": [], "id": 3}])
def test_ids_are_taken_as_they_are_and_need_no_template(more):
    language = Language(None, (), 10, False)
    (document,) = documents({"prompt_ids": [3, 0], "response_ids": [9, 1, 1], **more}, HERE, language)
    assert document == ([3, 0, 9, 1, 1], [False, False, True, True, True])
    (document,) = documents({"prompt_ids": [], "response_ids": [9]}, HERE, language)
    assert document == ([9], [True])


CHATTED = [ask("a"), answer("b")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no chat; a row {"),
        ({"prompt": "a"}, "no chat"),
        ({"messages": CHATTED, "conversations": []}, "messages and conversations;"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "hi"}, "messages is the str hi"),
        ({"messages": ["hi"]}, "messages[0] is the str hi"),
        ({"messages": [ask("a")]}, "no answer in it"),
        ({"messages": [answer("a")]}, "messages[0]: an answer to nothing"),
        ({"messages": [ask("a"), {"role": "assistant"}]}, "messages[1]: content is missing or null"),
        ({"messages": [ask(["a"]), answer("b")]}, "messages[0]: content is the list ['a']"),
        ({"messages": [{"content": "a"}]}, "messages[0]: role is missing or null; system, user"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0]: role is the list"),
        ({"messages": [ask("a\ud800"), answer("b")]}, "messages[1]: not valid UTF-8"),
        ({"conversations": None}, "conversations is missing or null"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "conversations[0]: from is the str bot; system, human"),
        ({"conversations": [{"from": [], "value": "a"}]}, "conversations[0]: from is an empty list"),
        ({"conversations": [{"from": "human"}]}, "conversations[0]: value is missing"),
        ({"prompt_ids": [1]}, "response_ids is missing"),
        ({"response_ids": [1], "messages": CHATTED}, "prompt_ids is missing"),
        ({"prompt_ids": [1], "response_ids": []}, "response_ids is an empty list"),
        ({"prompt_ids": "1", "response_ids": [1]}, "prompt_ids is the str 1"),
        ({"prompt_ids": [1, True], "response_ids": [1]}, "prompt_ids[1] is the bool True"),
        (
            {"prompt_ids": [1], "response_ids": [1, 264]},
            "response_ids[1] is the int 264; a token id of the target, 0 to 263",
        ),
        ({"prompt_ids": [-1], "response_ids": [1]}, "prompt_ids[0] is the int -1"),
    ],
)
def test_a_wrong_row_is_refused_by_line_and_field(row, reason):
    assert refusal(row, tiny()).startswith(reason)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "the target's tokenizer has no chat template"),
        ("{{ raise_exception('no') }}", "the chat template cannot render it (no)"),
        (
            PLAIN.replace("<|im_end|>", ""),
            "the chat template does not close the answer with a stop token of the target",
        ),
        (PLAIN + "{{ messages | length }}", "the chat template does not render the answer as a continuation"),
    ],
)
def test_a_template_that_no_answer_can_be_found_with_is_refused(template, reason):
    assert refusal({"messages": CHATTED}, tiny(template)).startswith(f"messages[1]: {reason}")


def test_a_tokenizer_of_another_target_is_refused():
    language = Language(pair.tokenizer(PLAIN), (pair.STOP,), 100, False)
    assert "is not in the target's vocabulary of 100" in refusal({"messages": CHATTED}, language)
