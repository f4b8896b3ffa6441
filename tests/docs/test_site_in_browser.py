"""The site in a real browser, offline: no page is wider than the screen, both themes read, arcs answer the pointer."""

from __future__ import annotations

import pytest

from tests.docs.conftest import BUILD_SECONDS, Site
from tools.notebooks.browser import Browser, Tab

pytestmark = pytest.mark.timeout(BUILD_SECONDS)
PAGES = ("index", "guide/attention", "guide/serving", "zoo", "machines", "notebooks/04_attention_variants", "layout",
         "reference/experiment", "reference/python", "reference/backends", "scale", "project/log")  # fmt: skip
# Elements beyond the right edge that lie in no frame that scrolls, and not in the side bars, which are slid away.
BEYOND = """() => [...document.querySelectorAll('article *')].filter(e => {
  if (e.getBoundingClientRect().right <= innerWidth + 1 || e.closest('svg')) return false;
  for (let a = e; a && a.tagName !== 'ARTICLE'; a = a.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(a).overflowX)) return false;
  return true;
}).map(e => e.tagName + ' ' + e.textContent.slice(0, 60))"""
# The contrast (WCAG 2) of text with what lies behind it, the lowest of each kind of element.
CONTRAST = """selectors => {
  const rgb = c => { const v = c.match(/[\\d.]+/g).map(Number); return {v: v.slice(0, 3), a: v[3] ?? 1}; };
  const lum = v => v.map(x => (x /= 255) <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
                    .reduce((s, x, k) => s + x * [.2126, .7152, .0722][k], 0);
  const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.a === 1) return c.v; } return [255, 255, 255]; };
  return Object.fromEntries(selectors.map(s => [s, Math.min(...[...document.querySelectorAll(s)]
    .filter(e => e.textContent.trim()).slice(0, 40).map(e => {
    const [a, b] = [lum(rgb(getComputedStyle(e).color).v), lum(behind(e))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); }))]));
}"""


def opened(browser: Browser, width: int, height: int, scheme: str) -> Tab:
    tab = browser.tab(None, width, height, offline=True)
    tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type] (light or dark)
    return tab


def show(tab: Tab, site: Site, name: str) -> None:
    tab.page.goto((site.html / f"{name}.html").as_uri())


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_a_page_fits_the_screen_and_fetches_nothing(site: Site, browser: Browser, width: int, height: int) -> None:
    tab = opened(browser, width, height, "light")
    for name in PAGES:
        show(tab, site, name)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert tab.page.evaluate(BEYOND) == [], name
    assert tab.outside_requests == [] and tab.console_errors == []
    tab.close()


def test_what_is_too_wide_is_found(site: Site, browser: Browser) -> None:
    tab = opened(browser, 390, 844, "light")
    show(tab, site, "index")
    tab.page.evaluate(
        "document.querySelector('article h1').insertAdjacentHTML('afterend', "
        '\'<p style="width:900px">wide</p><div style="overflow:auto"><p style="width:900px">scrolls</p></div>\')'
    )
    assert tab.page.evaluate(BEYOND) == ["P wide"]
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_reads_in_both_themes(site: Site, browser: Browser, scheme: str) -> None:
    tab = opened(browser, 1440, 900, scheme)
    show(tab, site, "layout")
    shown = tab.page.evaluate(CONTRAST, ["article p", ".arcs li code", ".arcs li small", ".sidebar-tree a"])
    assert min(shown.values()) >= 4.5, shown
    is_dark = tab.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c < 60)")
    assert is_dark == (scheme == "dark")
    show(tab, site, "guide/python")
    shown = tab.page.evaluate(CONTRAST, ["article p", "article td", "article th", ".highlight span", "article a"])
    assert min(shown.values()) >= 4.5, shown
    tab.close()


def test_arcs_of_the_row_that_is_pointed_at_are_marked(site: Site, browser: Browser) -> None:
    tab = opened(browser, 1440, 900, "dark")
    show(tab, site, "layout")
    colour = "n => getComputedStyle(document.querySelector('.arcs path.f0')).stroke"
    before = tab.page.evaluate(colour)
    tab.page.locator(".arcs").first.locator(".n0").hover()
    assert tab.page.evaluate(colour) != before
    tab.close()
