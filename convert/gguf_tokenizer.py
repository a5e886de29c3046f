"""The tokenizer that a GGUF file's metadata describes: byte-level BPE, built with `tokenizers`."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from convert.tokenizer_files import tokenizer_class
from dflash_jax.errors import UserError, check

MODEL = "tokenizer.ggml.model"
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# {digits} is how many of them make a word.
CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(metadata: Mapping[str, Any]) -> Any:
    """Return a transformers tokenizer with special tokens and chat template.

    Raises:
        UserError: no tokenizer, a kind or a way of splitting that is not supported, or one that contradicts itself.
    """
    model = metadata.get(MODEL)
    check(model is not None, f"no tokenizer in it (metadata {MODEL} is missing)")
    check(model == "gpt2", f"{MODEL} {model!r}{_aside(model)} is not supported; 'gpt2' (byte-level BPE) is")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    check(pre in SPLITTERS, f"tokenizer.ggml.pre {pre!r} is not supported; {', '.join(SPLITTERS)} are")
    tokens, types = _tokens(metadata)
    tokenizer = Tokenizer(_bpe(tokens, types, metadata.get("tokenizer.ggml.merges"), ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    special = {
        f"{ours}_token": _token(tokens, metadata[key], key)
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (key := f"tokenizer.ggml.{theirs}_token_id") in metadata
    }
    tokenizer.post_processor = _ends(metadata, special, adds_bos=pre == "llama-bpe")
    return tokenizer_class()(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _aside(model: Any) -> str:
    return " (SentencePiece)" if model == "llama" else ""


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    check(isinstance(tokens, list) and bool(tokens), "metadata tokenizer.ggml.tokens: a list of tokens is needed")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    check(
        len(types) == len(tokens),
        f"tokenizer.ggml.token_type has {len(types)} entries and tokenizer.ggml.tokens {len(tokens)}; as many is right",
    )
    return tokens, types


def _token(tokens: list[str], index: Any, key: str) -> str:
    check(
        isinstance(index, int) and 0 <= index < len(tokens),
        f"{key}: {index!r} is none of tokenizer.ggml.tokens; 0 to {len(tokens) - 1} are",
    )
    return tokens[index]


def _bpe(tokens: list[str], types: list[int], merges: Any, *, ignore_merges: bool) -> models.BPE:
    used = [i for i, kind in enumerate(types) if kind != UNUSED]
    vocabulary = {tokens[i]: i for i in used}
    check(len(vocabulary) == len(used), "tokenizer.ggml.tokens: a token is there twice; once is right")
    check(isinstance(merges, list), "metadata tokenizer.ggml.merges: a list of merges is needed")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    odd = [merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2]
    check(not odd, f"tokenizer.ggml.merges: {odd[:1]}; two tokens and a space between them are right")
    try:
        return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise UserError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({error})") from error


def _ends(metadata: Mapping[str, Any], special: Mapping[str, str], *, adds_bos: bool) -> Any:
    """Add the tokens that begin and end a text, where the metadata asks for them."""
    first = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    last = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not (first or last):
        return byte_level
    ids = {
        special[f"{name}_token"]: metadata[f"tokenizer.ggml.{name}_token_id"]
        for name, token in (("bos", first), ("eos", last))
        if token
    }
    template = processors.TemplateProcessing(
        single=[token for token in (first, "$A", last) if token], special_tokens=list(ids.items())
    )
    return processors.Sequence([byte_level, template])


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _cl100k(digits: str) -> Any:
    words = _split(CL100K_WORDS.format(digits=digits))
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _default() -> Any:
    """Split as llama.cpp does where a file does not say how."""
    patterns = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*map(_split, patterns), bytes_only])


# By the name that llama.cpp gives each way of splitting text into words (its llama-vocab.cpp).
SPLITTERS = {
    "default": _default,
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _cl100k("{1,3}"),
    "qwen2": lambda: _cl100k(""),
    "smollm": _smollm,
}
