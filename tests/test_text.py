import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from inference.engine import Generation
from inference.text import Detokenizer, text_of
from tests import pair

TOKENIZER = pair.tokenizer()
# Byte-level tokenizers write each byte as a letter.
LETTERS = bytes_to_unicode()


def pieces(tokenizer, ids, sizes):
    detokenizer, found, at = Detokenizer(tokenizer), [], 0
    for size in sizes:
        found.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*found, detokenizer.finish()]


def test_a_character_comes_when_all_its_bytes_have():
    ids = TOKENIZER.encode("aé🙂!")
    assert pieces(TOKENIZER, ids, [1] * len(ids)) == ["a", "", "é", "", "", "", "🙂", "!", ""]
    assert pieces(TOKENIZER, ids[:-2], [len(ids) - 2]) == ["aé", "\ufffd"]  # what never came whole is told at the end


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_bytes_in_any_runs_are_together_the_whole(seed):
    rng = random.Random(seed)
    ids = [rng.randrange(pair.VOCABULARY) for _ in range(300)] + TOKENIZER.encode("é🙂ß" * 40)
    sizes: list[int] = []
    while sum(sizes) < len(ids):
        sizes.append(rng.choice([0, 1, 1, 2, 7, 50]))
    found = pieces(TOKENIZER, ids, sizes)
    assert "".join(found) == TOKENIZER.decode(ids)
    for continuation in ([0x80] * 100, [0xF0, 0x9F] * 60, [0xE2] * 3 + [0x82, 0xAC] * 50):
        letters = [TOKENIZER.convert_tokens_to_ids(LETTERS[byte]) for byte in continuation]
        assert "".join(pieces(TOKENIZER, letters, [1] * len(letters))) == TOKENIZER.decode(letters)


def test_decoders_that_fall_back_to_bytes_and_strip_the_first_space_are_followed_too():
    vocabulary = {token: i for i, token in enumerate(["▁the", "▁a", "s", *(f"<0x{byte:02X}>" for byte in range(256))])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    smiley = [3 + byte for byte in "🙂é".encode()]
    ids = [0, 1, 2, *smiley, 1, *smiley, *smiley, 0] * 10
    found = pieces(tokenizer, ids, [1] * len(ids))
    assert "".join(found) == tokenizer.decode(ids) == ("the as🙂é a🙂é🙂é the" + " the as🙂é a🙂é🙂é the" * 9)


def test_only_the_last_tokens_are_decoded_again():
    counted = []

    class Counting:
        def decode(self, ids, **options):
            counted.append(len(ids))
            return TOKENIZER.decode(ids, **options)

    ids = TOKENIZER.encode("ab🙂") * 200
    assert "".join(pieces(Counting(), ids, [1] * len(ids))) == "ab🙂" * 200
    assert max(counted) <= 33
    assert len(counted) < 1.1 * len(ids)


def generation(ids, finish_reason):
    return Generation(ids, [False] * len(ids), [1] * (len(ids) - 1), finish_reason, 0.1, 0.1)


def test_text_leaves_out_the_stop_token_that_ended_it_and_nothing_else():
    start, stop = (TOKENIZER.convert_tokens_to_ids(token) for token in pair.SPECIAL)
    ids = [start, *TOKENIZER.encode("a ,"), pair.MASK, stop]
    assert text_of(generation(ids, "stop"), TOKENIZER) == "<|im_start|>a ,"
    assert text_of(generation(ids, "length"), TOKENIZER) == "<|im_start|>a ,<|im_end|>"
    assert text_of(generation([stop], "stop"), TOKENIZER) == ""
    # A stop that the user named is left out, whatever it is.
    assert text_of(generation(TOKENIZER.encode("abc"), "stop"), TOKENIZER) == "ab"
