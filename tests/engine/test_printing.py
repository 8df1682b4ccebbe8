"""What does not print is escaped, what does stays, and no text of a cell acts in Markdown or a spreadsheet."""

import pytest

from engine.printing import in_csv, in_markdown, printable, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, 100 %", "plain text, 100 %"),
        ("\u00e9 \u65e5\u672c", "\u00e9 \u65e5\u672c"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\r\tc\x00", "a\\nb\\r\\tc\\x00"),
        ("\x9b1m", "\\x9b1m"),  # ESC [ in one byte of Latin-1
        ("\u202egpj", "\\u202egpj"),  # the rest from right to left
        ("\u2028", "\\u2028"),  # a line break for str.splitlines
        (b"\xff.jpg".decode(errors="surrogateescape"), "\\udcff.jpg"),
        ("C:\\x1b", "C:\\x1b"),
    ],
)
def test_a_line_is_printable(text, shown):
    assert printable(text) == shown == printable(shown)


def test_say_prints_one_line_for_each(capsys):
    say("a", 1, "b\nc", "")
    say("d", errors=True)
    assert capsys.readouterr() == ("a\n1\nb\\nc\n\n", "d\n")


def test_cells():
    assert in_markdown("a|b \\ <i> [k=5] [x](y)") == "a\\|b \\\\ \\<i> [k=5] [x]\\(y)"
    assert [in_csv(value) for value in ("=1+1", "+1", "-1", "@x", "a=1", -1.5, None)] == [
        *("'=1+1", "'+1", "'-1", "'@x", "a=1", -1.5, None)
    ]
