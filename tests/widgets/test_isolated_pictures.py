"""A picture's style and ids hold in it alone, though a page has one space of both for all pictures."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from workbench import svg
from workbench.widgets.view import saved_picture

TEXTS = (".wb-pic .s{font-size:9px}", ".wb-pic .s{font-size:17px}", ".wb-pic th{top:0}")
RULES = st.lists(st.sampled_from(TEXTS), max_size=3)
PATTERN = '<defs><pattern id="wb-fell" width="5" height="5"/></defs>'


def styled(rules: list[str], text: str, nested: bool = False) -> str:
    style = f"<style>{''.join(rules)}</style>"
    inner = svg.document(10, 10, style, PATTERN, svg.rect(0, 0, 9, 9, fill="url(#wb-fell)"), title=text)
    return svg.html(style, inner) if nested else inner


@given(RULES, RULES, st.text("abc", max_size=3), st.booleans())
def test_a_rule_reaches_no_other_picture(first: list[str], second: list[str], text: str, nested: bool) -> None:
    one, other = styled(first, text, nested), styled(second, text)
    scopes = [set(re.findall(r"\.wb-pic\.(st-\w+)", picture)) for picture in (one, other)]
    classes = [set(re.findall(r'class="wb-pic (st-\w+)"', picture)) for picture in (one, other)]
    assert scopes == classes, "every rule is for a picture that is there"
    assert not re.search(r"\.wb-pic(?!\.st-)", one + other), "and none for all pictures"
    if sorted(first) != sorted(second) and not nested:
        assert not classes[0] & classes[1]


@given(st.text("abc", max_size=3), st.text("abc", max_size=3), st.booleans())
def test_ids_are_the_pictures_own_and_are_found(text: str, other: str, nested: bool) -> None:
    ids = [re.findall(r'\bid="([^"]+)"', styled([], title, nested)) for title in (text, other)]
    assert all(len(each) == 1 for each in ids) and (ids[0] == ids[1]) == (text == other)
    assert re.findall(r"url\(#([^)]+)\)", styled([], text, nested)) == ids[0]
    assert styled([], text, nested) == styled([], text, nested)


def test_a_saved_drawing_is_an_image_too_with_its_title() -> None:
    picture = styled([], "a < b")
    saved = saved_picture(picture)
    assert saved["image/svg+xml"] == picture and 'alt="a &lt; b"' in saved["text/html"]
    assert saved_picture(svg.html("<p>words</p>")).keys() == {"text/html"}
