"""Unprintable characters are escaped, and the text of a cell is inert in Markdown and in spreadsheets."""

from markdown_it import MarkdownIt

from engine.errors import on_command_line
from engine.printing import heard_by, in_csv, in_markdown, printable, say


def test_unprintable_characters_are_escaped_once():
    for text, expected in [
        ("plain text, 100 %", "plain text, 100 %"),
        ("\u00e9 \u65e5\u672c", "\u00e9 \u65e5\u672c"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\r\tc\x00", "a\\nb\\r\\tc\\x00"),
        ("\x9b1m", "\\x9b1m"),  # ESC [ in one byte of Latin-1
        ("\u202egpj", "\\u202egpj"),  # the rest from right to left
        ("\u2028", "\\u2028"),  # a line break for str.splitlines
        (b"\xff.jpg".decode(errors="surrogateescape"), "\\udcff.jpg"),
        ("C:\\x1b", "C:\\x1b"),
    ]:
        assert printable(text) == expected == printable(expected)


def test_say_gives_each_argument_as_one_line_to_the_listener(capsys):
    heard = []
    say("nobody listens")
    with heard_by(heard.append):
        say("e")
        with on_command_line():
            say("a", 1, "b\nc", "")
            say("d", errors=True)
    say("nobody listens")
    assert heard == ["e"] and capsys.readouterr() == ("a\n1\nb\\nc\n\n", "d\n")


def test_cells_are_inert_in_markdown_and_csv():
    assert in_markdown("a|b \\ <i> [k=5] [x](y)") == "a\\|b \\\\ \\<i> [k=5] [x]\\(y)"
    names = [
        "a*b*c",
        "*",
        "_x_",
        "__init__",
        "a__b_",
        "`x`",
        "``",
        "~x~",
        "&amp; &#42; &",
        "dino_(x_)",
        "![a](b)",
        "<b>",
    ]
    for name in [*names, "a|b", "\\*x\\*", "*_`", "vit_s_", "k_"]:
        (inline,) = (
            token for token in MarkdownIt().enable("strikethrough").parse(f"x {in_markdown(name)}") if token.children
        )
        assert [(part.type, part.content) for part in inline.children] == [("text", f"x {name}")], name
    assert in_markdown("top1_k10 & k=5") == "top1_k10 & k=5"
    values = ["=1+1", "+1", "-1", "@x", "a=1", -1.5, None]
    assert [in_csv(value) for value in values] == ["'=1+1", "'+1", "'-1", "'@x", "a=1", -1.5, None]
