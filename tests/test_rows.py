import json

import pytest

from convert import rows
from dflash_jax.errors import UserError

HERE = "chats.jsonl, line 7"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("9" * 5_000, "not valid JSON"),
        ("[1]", "the list [1]; a row {…} is right"),
        ("null", "missing or null; a row {…} is right"),
        ('""', "an empty str; a row {…} is right"),
    ],
)
def test_a_line_that_is_no_row_is_refused(line, reason):
    with pytest.raises(UserError) as caught:
        rows.read_row(line, HERE, "{…}")
    assert str(caught.value).startswith(f"{HERE}: {reason}")


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UserError, match=rf"^{HERE}: not valid UTF-8 text \(byte 8\)$"):
        rows.utf8(b'{"a": "\xff"}', HERE)


def test_marks_of_byte_order_are_no_part_of_a_row_wherever_files_were_put_together():
    assert rows.lines(rows.BOM + b"{}\n" + rows.BOM + b"[]\n" + rows.BOM, HERE) == ["{}", "[]", ""]


def test_a_line_may_end_as_on_another_system():
    assert rows.read_row(json.dumps({"a": "ä\u2028"}, ensure_ascii=False) + "\r", HERE, "{…}") == {"a": "ä\u2028"}


def test_messages_may_call_tools_and_must_otherwise_have_a_text():
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]},
    ]
    assert rows.check_messages(chat, HERE) == chat
    for index, role in ((0, "user"), (1, "assistant")):
        wrong = [*chat[:index], {"role": role, "content": None}]
        with pytest.raises(UserError, match=rf"messages\[{index}\]: content is missing or null; a text is right"):
            rows.check_messages(wrong, HERE)
