"""Foreign text on a page has no effect, and pictures travel inside the page."""

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from babylon.ops.pages.markdown import picture, span, table

HOSTILE = "![x](https://evil.example/p.png) <script>alert(1)</script> `code` | cell\n# head"


def test_hostile_text_stays_one_code_span_in_its_cell() -> None:
    lines = table(("agent", "<because"), [(span(HOSTILE), span("fine"))])
    html = MarkdownIt("gfm-like", {"linkify": False}).render("\n".join(lines))
    assert html.count("<td") == 2
    assert not any(tag in html for tag in ("<img", "<script", "<h1", "<a "))


@given(st.text())
def test_a_span_is_one_line_without_backticks_inside(text: str) -> None:
    found = span(text)
    assert found == "" or (found[0] == found[-1] == "`" and "`" not in found[1:-1])
    assert "\n" not in found and "|" not in found


def test_a_picture_is_in_the_page_and_not_a_path() -> None:
    assert picture("loss", None) == []
    (line, _) = picture("loss", b"\x89PNG...")
    assert line.startswith("![loss](data:image/png;base64,")
    assert picture("loss", b"<svg/>")[0].startswith("![loss](data:image/svg+xml;base64,")
