import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import convert
from convert import gguf_tokenizer
from dflash_jax.errors import UserError
from tests.checkpoints import LETTERS, demo_file, refusal, write_draft, write_tokenizer

QWEN3 = Path(os.environ.get("QWEN3_TOKENIZER", Path(__file__).parents[2] / "shared/tokenizers/qwen3"))
TEXTS = [
    "Hello, world!",
    "It's 12345 o'clock; WE'LL see. 3.14159 and 1,000,000",
    "  leading, trailing   and\ttabs \n\n\n newlines\r\n  end  ",
    "Größe naïve café Å Å ﬁ",
    "日本語のテキストと中文，한국어. Русский עברית العربية हिन्दी",
    "emoji 😀👩‍👩‍👧 🏳️‍🌈 ½ ² Ⅷ",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # 'quoted'\n",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n\nok <tool_call>{}</tool_call>",
    "",
    "\u200b\u00a0\ufeff control \x00\x7f",
]


@pytest.fixture(scope="module")
def smollm() -> Any:
    return convert.load_tokenizer(str(demo_file()))


def test_the_demo_tokenizer_splits_digits_and_words_as_published(smollm):
    ids = smollm("Hi 1234  x  don't\n\n<|im_end|>").input_ids
    pieces = ["Hi", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx", "Ġ", "Ġdon", "'t", "ĊĊ", "<|im_end|>"]
    assert smollm.convert_ids_to_tokens(ids) == pieces
    assert ids == [26843, 216, 33, 34, 35, 36, 216, 1792, 216, 1326, 982, 1116, 2]
    assert len(smollm) == 49152
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.pad_token_id, smollm.unk_token_id) == (1, 2, 2, 0)


def test_the_demo_chat_template_renders(smollm):
    text = smollm.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(smollm, text):
    assert smollm.decode(smollm(text).input_ids) == text


def test_special_tokens_are_left_out_of_plain_text(smollm):
    assert smollm.decode(smollm("a<|im_end|>").input_ids, skip_special_tokens=True) == "a"


@pytest.fixture(scope="module")
def qwen3() -> tuple[Tokenizer, Any]:
    """The published tokenizer, and ours from the metadata that llama.cpp's converter makes of it."""
    if not QWEN3.is_dir():
        pytest.skip(f"the published Qwen3 tokenizer is not at {QWEN3}")
    published = json.loads((QWEN3 / "tokenizer.json").read_text())
    added = {token["id"]: token for token in published["added_tokens"]}
    tokens = {i: token for token, i in published["model"]["vocab"].items()} | {
        i: t["content"] for i, t in added.items()
    }
    size = 151936
    types = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(tokens))]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": types + [5] * (size - len(types)),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in published["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 151645,
        "tokenizer.ggml.padding_token_id": 151643,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": json.loads((QWEN3 / "tokenizer_config.json").read_text())["chat_template"],
    }
    return Tokenizer.from_file(str(QWEN3 / "tokenizer.json")), gguf_tokenizer.build(metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_qwen3_from_metadata_encodes_and_decodes_as_published(qwen3, text):
    published, ours = qwen3
    ids = published.encode(text).ids
    assert ours(text).input_ids == ids
    assert ours.decode(ids) == published.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=True) == published.decode(ids)


def test_qwen3_from_metadata_has_the_published_length_and_template(qwen3):
    published, ours = qwen3
    assert len(ours) == published.get_vocab_size() == 151669
    text = ours.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def metadata_of(pre: str, /, **changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer without merges but one, so that words can be seen by what they cannot merge."""
    tokens = [*LETTERS, "ab", "<s>", "</s>", "<tool>", "[PAD0]"]
    kinds = [1] * len(LETTERS) + [1, 3, 3, 4, 5]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "Ġa", "+", "b", "Ġ", "Ġ$", "x", "Ċ", "Ċ", "y"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġa", "+", "b", "Ġ", "Ġ$", "x", "Ċ", "Ċ", "y"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġa", "+b", "Ġ", "Ġ$", "x", "ĊĊ", "y"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "Ġa", "+b", "Ġ", "Ġ$", "x", "ĊĊ", "y"]),
        ("default", ["It", "'", "s", "Ġ", "123", "45", "Ġa", "+", "b", "ĠĠ", "$", "x", "Ċ", "Ċ", "y"]),
    ],
)
def test_each_way_of_splitting_finds_its_words(pre, words):
    splitter = gguf_tokenizer.build(metadata_of(pre)).backend_tokenizer.pre_tokenizer
    assert [word for word, _ in splitter.pre_tokenize_str("It's 12345 a+b  $x\n\ny")] == words


def test_texts_begin_and_end_as_the_metadata_say():
    first, last = (metadata_of("gpt-2")[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))

    def ends(pre: str, **changes: Any) -> tuple[bool, bool]:
        ids = gguf_tokenizer.build(metadata_of(pre, **changes))("x").input_ids
        return ids[0] == first, ids[-1] == last

    assert ends("gpt-2") == (False, False)
    assert ends("llama-bpe") == (True, False)
    assert ends("llama-bpe", add_bos_token=False) == (False, False)
    assert ends("gpt-2", add_bos_token=True, add_eos_token=True) == (True, True)


def test_token_types_decide_what_is_special():
    tokenizer = gguf_tokenizer.build(metadata_of("gpt-2"))
    ids = tokenizer("ab<s><tool>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "<s>", "<tool>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>"
    assert "[PAD0]" not in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' (SentencePiece) is not supported; 'gpt2'"),
        ({"model": None}, "no tokenizer in it"),
        ({"pre": "deepseek-v3"}, "tokenizer.ggml.pre 'deepseek-v3' is not supported; default, gpt-2, llama-bpe"),
        ({"tokens": None}, "tokenizer.ggml.tokens: a list"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries"),
        ({"merges": None}, "tokenizer.ggml.merges: a list"),
        ({"merges": ["abc"]}, "two tokens and a space"),
        ({"merges": ["ab zz"]}, "do not fit"),
        ({"bos_token_id": 999}, "tokenizer.ggml.bos_token_id: 999 is none of tokenizer.ggml.tokens; 0 to"),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id: -1 is none of"),
        ({"tokens": ["a"] * 2, "token_type": [1, 1]}, "a token is there twice"),
    ],
)
def test_other_tokenizers_are_refused_by_name(changes, message):
    metadata = metadata_of("gpt-2", **changes)
    with pytest.raises(UserError) as caught:
        gguf_tokenizer.build({key: value for key, value in metadata.items() if value is not None})
    assert message in str(caught.value)


def test_a_directorys_tokenizer_loads_with_its_template(tmp_path):
    write_draft(tmp_path)
    assert f"{tmp_path}: no tokenizer.json in it" in refusal(convert.load_tokenizer, tmp_path)
    write_tokenizer(tmp_path)
    tokenizer = convert.load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer("hé 1").input_ids) == "hé 1"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x<end>"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: not a readable tokenizer" in refusal(convert.load_tokenizer, tmp_path)


@pytest.mark.parametrize("torch", ["there", "absent"])
def test_torch_is_neither_imported_nor_missed(tmp_path, torch):
    """Transformers' automatic class would import it wherever it is, and transformers complains where it is not."""
    write_draft(tmp_path)
    write_tokenizer(tmp_path)
    script = (
        "import sys\n"
        + ("sys.modules['torch'] = None\n" if torch == "absent" else "")
        + f"import convert, convert.__main__; convert.load_draft({str(tmp_path)!r}, None)\n"
        f"tokenizer = convert.load_tokenizer({str(tmp_path)!r})\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "assert sys.modules.get('torch') is None"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
