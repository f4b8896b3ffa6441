"""A picture's style and ids hold in it alone, though a page has one space of both for all pictures."""

from __future__ import annotations

import ast
import html
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import svg
from workbench.widgets import saved
from workbench.widgets.saved import saved_picture

WIDGETS = Path(saved.__file__).parent
TEXTS = (
    ".wb-pic .s{font-size:9px}", ".wb-pic .s{font-size:17px}", ".wb-pic th{top:0}",
    ".wb-fl :is(b,i),.wb-pic{color:red}", "@media print{.wb-fl{top:0}.wb-pic p,h4{left:0}}",
)  # fmt: skip
RULES = st.lists(st.sampled_from(TEXTS), max_size=3)
PATTERN = '<defs><pattern id="wb-fell" width="5" height="5"/></defs>'


def styled(rules: list[str], text: str, nested: bool = False) -> str:
    style = f"<style>{''.join(rules)}</style>"
    inner = svg.document(10, 10, style, PATTERN, svg.rect(0, 0, 9, 9, fill="url(#wb-fell)"), title=text)
    return svg.html(style, inner) if nested else inner


@given(RULES, RULES, st.text("abc", max_size=3), st.booleans())
def test_a_rule_reaches_no_other_picture(first: list[str], second: list[str], text: str, nested: bool) -> None:
    one, other = styled(first, text, nested), styled(second, text)
    scopes = [{rule.split(".")[2].split()[0] for rule in selectors(each)} for each in (one, other)]
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
    kept = saved_picture(picture)
    assert kept["image/svg+xml"] == picture and 'alt="a &lt; b"' in kept["text/html"]
    assert saved_picture(svg.html("<p>words</p>")).keys() == {"text/html"}


@given(RULES, st.text("abc", max_size=3))
def test_pictures_within_one_share_its_rules(rules: list[str], text: str) -> None:
    """Also those that stand in one of them, and are for words around it."""
    inner = [styled(rules, text), svg.document(10, 10, title="another")]
    whole = svg.html("<p class='s'>words</p>", *inner)
    (scope,) = set(re.findall(r"\bst-\w+", whole))
    assert whole.count(f'class="wb-pic {scope}"') == 3
    kept = saved_picture(whole)["text/html"]
    drawings = [unquote(each) for each in re.findall(r'src="data:image/svg\+xml,([^"]*)"', kept)]
    assert len(drawings) == 2 and "<svg" not in kept
    styles = [re.findall(r"<style>.*?</style>", each) for each in drawings]
    assert sorted(styles[0]) == sorted(styles[1]) and all(ET.fromstring(each) is not None for each in drawings)


@given(st.text(), st.text(st.characters(categories=("Cc", "Cs", "Po", "Sm")), max_size=5))
def test_an_image_of_any_text_is_well_formed(title: str, words: str) -> None:
    kept = saved_picture(svg.html(svg.document(10, 10, svg.text(0, 9, words), title=title)))["text/html"]
    (address,) = re.findall(r' src="data:image/svg\+xml,([^"]*)"', kept)
    root = ET.fromstring(unquote(address))
    assert root.tag.endswith("svg") and not set('"<>\n') & set(address)


def selectors(markup: str) -> list[str]:
    rules = "".join(re.findall(r"<style>(.*?)</style>", markup, re.DOTALL))
    found = [each for each in re.findall(r"[^{}]+(?=\{)", rules) if not each.strip().startswith("@")]
    return [each.strip() for preludes in found for each in re.split(r",(?![^(]*\))", preludes)]


@pytest.mark.parametrize("path", sorted(WIDGETS.rglob("*.py")), ids=lambda path: str(path.relative_to(WIDGETS)))
def test_every_rule_of_every_widget_is_its_pictures_own(path: Path) -> None:
    """All style in the texts of the source, as one picture has it: rules that begin with no class of a picture too."""
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    rules = [each for each in texts if isinstance(each, str) and re.match(r"(<style>)?(\.wb-|@media)", each)]
    for each in rules:
        if each.count("{") != each.count("}"):
            continue  # a piece of a longer one
        picture = svg.html(svg.tag("style", re.sub(r"</?style>", "", each)))
        (scope,) = set(re.findall(r'class="wb-pic (st-\w+)"', picture))
        assert all(selector.startswith(f".wb-pic.{scope}") for selector in selectors(picture)), each


def test_a_readers_text_stays_as_it_is() -> None:
    text = 'fill="url(#wb-fell)" and id="wb-fell"'
    picture = svg.html(PATTERN, f"<p>{html.escape(text, quote=False)}</p>")
    assert f"<p>{text}</p>" in picture and '<pattern id="wb-fell"' not in picture
