"""A tiny pair on disk whose answers are known: every token has one likeliest successor, and the draft always proposes
the same token. Greedily, whatever was asked, it answers `ANSWER` and stops."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from convert import names
from dflash_jax.config import DraftConfig, TargetConfig
from tests import tiny

ANSWER = "Zwölf🙂!"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ("<|im_start|>", "<|im_end|>")
STOP = len(LETTERS) + 1
VOCABULARY = 264
MASK = 262  # a row of the embedding that is no token of the tokenizer
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TARGET = dataclasses.replace(tiny.TARGET, vocab_size=VOCABULARY, stop_token_ids=(STOP,))
DRAFT = dataclasses.replace(tiny.DRAFT, vocab_size=VOCABULARY, mask_token_id=MASK)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """A byte-level tokenizer without merges: a token is a byte."""
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template)


ANSWER_IDS: list[int] = [*tokenizer().encode(ANSWER), STOP]
# The draft's one proposal, "l": accepted as the first draft of one block, and nowhere else.
DRAFTED_AT = 4
EMITTED = [1, 1, 1, 2, 1, 1, 1, 1, 1, 1]  # after the first token


def write_target(directory: Path, template: str | None = TEMPLATE) -> Path:
    arrays = {name: _array(it) for name, it in names.expected(TARGET, "target").items()}
    # A token's embedding says which place of the answer it is; the head names the next.
    embedding = np.zeros((TARGET.vocab_size, TARGET.hidden_size), np.float32)
    head = np.zeros_like(embedding)
    embedding[:, 0] = 1
    head[ANSWER_IDS[0], 0] = 1
    for place, token in enumerate(ANSWER_IDS[:-1], 1):
        embedding[token] = np.eye(TARGET.hidden_size)[place]
        head[ANSWER_IDS[place], place] = 1
    embedding[MASK] = embedding[ANSWER_IDS[DRAFTED_AT - 1]]
    arrays |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    _write(directory, TARGET, arrays)
    tokenizer(template).save_pretrained(directory)
    return directory


def write_draft(directory: Path) -> Path:
    _write(directory, DRAFT, {name: _array(it) for name, it in names.expected(DRAFT, "draft").items()})
    return directory


def _array(tensor: names.Tensor) -> np.ndarray:
    """Norms of ones; layers that compute something, and add nothing of it to what passes through them."""
    if len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    if "o_proj" in tensor.path or "down_proj" in tensor.path:
        return np.zeros(tensor.shape, np.float32)
    return np.random.default_rng(0).standard_normal(tensor.shape, np.float32)


def _write(directory: Path, config: TargetConfig | DraftConfig, arrays: dict[str, np.ndarray]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    save_file(arrays, directory / "model.safetensors")
