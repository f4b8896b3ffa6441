"""The built site: no warning, no broken link, nothing that is fetched, a place for every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.conftest import BUILD_SECONDS, Site
from tools.site.addresses import Page, broken_addresses, fetched
from tools.site.build import build
from tools.site.notebooks import read_course
from tools.site.stage import ROOT, places

pytestmark = pytest.mark.timeout(BUILD_SECONDS)


def test_it_is_built_without_a_warning_or_a_broken_link(site: Site) -> None:
    assert site.problems == ()


@pytest.mark.site
@pytest.mark.smoke
def test_a_site_of_two_pages_is_built_and_its_broken_links_are_named(tmp_path: Path) -> None:
    docs = tmp_path / "in" / "docs"
    docs.mkdir(parents=True)
    for name in ("conf.py", "_static", "_templates"):
        (docs / name).symlink_to(ROOT / "docs" / name)
    (docs / "index.md").write_text("# Front\n\n```{toctree}\na\n```\n\n[gone](gone.md)\n")
    (docs / "a.md").write_text('# A\n\n[front](index.md)\n\n<a href="none.html">no page</a>\n')
    assert build(tmp_path / "out", tmp_path / "in") == [
        "docs/index.md: a link to gone.md, which is not there",
        "a.html: leads to no file: none.html",
    ]
    assert "<h1>A" in (tmp_path / "out" / "html" / "a.html").read_text()


def test_no_style_fetches_anything(site: Site) -> None:
    styles = sorted(site.html.rglob("*.css"))
    assert styles and {path.name: found for path in styles if (found := fetched(path.read_text()))} == {}
    assert not list(site.html.rglob("*.woff*")) and not list(site.html.rglob("*athjax*"))


def test_every_page_is_there_and_leads_on(site: Site) -> None:
    for path, place in places().items():
        if not path.endswith(".png"):
            assert (site.html / place).with_suffix(".html").is_file(), path
    front = Page((site.html / "index.html").read_text()).addresses
    for path in places():
        if path.startswith(("notebooks/", "docs/")) and path.endswith((".py", ".md")):
            place = Path(places()[path]).with_suffix(".html")
            above = front if len(place.parts) == 1 else Page((site.html / _above(place)).read_text()).addresses
            assert any(address.endswith(place.name) for address in above) or place.stem == "index", path


def _above(place: Path) -> str:
    return "course.html" if place.parts[0] == "notebooks" else f"{place.parts[0]}/index.html"


def test_the_course_names_every_notebook_and_shows_its_pictures(site: Site) -> None:
    course = (ROOT / "docs" / "course.md").read_text()
    shown = 0
    for name, notebook in read_course(ROOT / "notebooks").items():
        assert f"](../notebooks/{name})" in course
        pictures = sum(len(cell.get("outputs", ())) for cell in notebook.cells)
        page = (site.html / "notebooks" / name).with_suffix(".html").read_text()
        in_text = sum(cell.source.count("](pictures/") for cell in notebook.cells)
        assert page.count("as this cell shows it") == pictures == page.count('src="../_images/') - in_text
        shown += pictures
    assert shown >= 14


def test_pages_show_what_is_made_from_code_and_records(site: Site) -> None:
    def text(name: str) -> str:
        return re.sub(r"<[^>]+>", "", (site.html / f"{name}.html").read_text())

    assert "step_planned" in text("guide/traces") and "AMD EPYC" in text("machines")
    assert "check_attention" in text("reference/parts") and "max_num_batched_tokens" in text("reference/experiment")
    layout = (site.html / "layout.html").read_text()
    assert layout.count('<div class="arcs">') >= 34 and "<code>manager.py</code>" in layout


def test_the_checks_can_fail(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text('<p id="here">')
    (tmp_path / "index.html").write_text(
        '<img src="https://x/y.png"><a href="there.html#here"></a><a href="there.html#no"></a><a href="gone.html"></a>'
        '<script src="//cdn/x.js"></script><a href="../out.html"></a><img src="data:image/png;base64,AA">'
    )
    assert broken_addresses(tmp_path) == [
        "index.html: leads outside: https://x/y.png",
        "index.html: leads to no anchor: there.html#no",
        "index.html: leads to no file: gone.html",
        "index.html: leads outside: //cdn/x.js",
        "index.html: leads to no file: ../out.html",
    ]
    assert fetched("a{b:url('https://f/g.woff')} c{d:url(data:x)} @import 'https://x.css';") == [
        "https://f/g.woff",
        "https://x.css",
    ]
