import io
import itertools

import pytest

from inference.display import AnswerWriter, has_colours, summary
from inference.engine import Generation
from tests import pair

TOKENIZER = pair.tokenizer()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def generation(ids, drafted, finish_reason=None):
    return Generation(ids, [mark == "d" for mark in drafted], [1] * (len(ids) - 1), finish_reason, 0.25, 0.5)


def test_colours_are_for_terminals_that_have_them_and_users_who_want_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colours(Terminal())
    assert not has_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())
    monkeypatch.setenv("NO_COLOR", "")  # by the convention, an empty value asks for nothing
    assert has_colours(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours(Terminal())


def test_only_what_is_new_is_written_each_token_in_the_colour_of_where_it_came_from():
    out = Terminal()
    writer = AnswerWriter(TOKENIZER, out, colours=True)
    ids = TOKENIZER.encode("abécd")  # é is two tokens
    written = [""]
    for count in (1, 3, 6):
        writer.show(generation(ids[:count], "tddtdt"[:count]))
        written.append(out.getvalue())
    writer.show(generation([*ids, pair.STOP], "tddtdtt", "stop"))
    written.append(out.getvalue())
    pieces = [after.removeprefix(before) for before, after in itertools.pairwise(written)]
    assert pieces == [
        "\x1b[33ma\x1b[0m",
        "\x1b[36mb\x1b[0m",
        "\x1b[33mé\x1b[0m\x1b[36mc\x1b[0m\x1b[33md\x1b[0m",
        "\n",
    ]


@pytest.mark.parametrize(("out", "shown"), [(Terminal(), "␛[2J␍␡\ufffd\t\n"), (io.StringIO(), "\x1b[2J\r\x7f\x9b\t\n")])
def test_an_answer_cannot_steer_the_terminal_and_is_untouched_elsewhere(out, shown):
    writer = AnswerWriter(TOKENIZER, out, colours=False)
    ids = TOKENIZER.encode("\x1b[2J\r\x7f\x9b\t")
    writer.show(generation(ids, "t" * len(ids), "length"))
    assert out.getvalue() == shown


def test_the_summary_says_speed_acceptance_and_why_it_ended():
    assert summary(generation([1, 2, 3], "ttt", "length")) == (
        "3 tokens, 4.0 tokens/s, acceptance length 1.00, finish reason length, prefill 0.25 s, decode 0.50 s"
    )
    assert summary(generation([1], "t", "stop")) == "1 token, finish reason stop, prefill 0.25 s, decode 0.50 s"
