"""Price tables: what ships, what is refused, and that money is exact."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from tests.economics.tables import table
from tests.helpers.refusals import refuses
from workbench.economics.prices import (
    KINDS,
    Prices,
    Usage,
    cost_per_million,
    format_money,
    load_prices,
    shipped_tables,
)
from workbench.errors import WorkbenchError

GOOD = "name: mine\nsource: a price list\ndate: 2026-01-02\ninput: 1.10\noutput: '4.40'\n"


@pytest.mark.parametrize("name", shipped_tables())
def test_what_ships_says_whose_it_is(name: str) -> None:
    prices = load_prices(name)
    assert prices.name == name and prices.source and prices.date.year >= 2026
    assert prices.example == (name != "article-a")  # only article A names amounts; the others are made from its
    assert ("article" in prices.source) and prices.cost(Usage(1, 0, 0, 0, 1)) > 0


def test_article_a_is_what_it_says() -> None:
    prices = load_prices("article-a")
    assert [getattr(prices, kind) / prices.input for kind in KINDS] == [1, Decimal("1.25"), 2, Decimal("0.1"), 5]
    assert prices.cost(Usage(input=2000)) * 1000 == 6
    assert prices.says[0].saved == Decimal("5.90")


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    prices = load_prices(file)
    assert prices.cost(Usage(input=1_000_000)) == Fraction(11, 10)  # also where YAML reads 1.10 as a float
    refuses("no price of cache_read; it has input, output", lambda: prices.cost(Usage(cache_read=1)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cache_reed: 1", "cache_reed: unknown key; did you mean 'cache_read'"),
        ("cache_read: 1", "give both, or neither"),
        ("cache_write_1h: 1", "give both, or neither"),
        ("input: -1", "input"),
        ("input: .nan", "input"),
        ("input: cheap", "input"),
        ("date: soon", "date"),
        ("output: null", "output"),
    ],
)
def test_mistakes_name_the_place(change: str, words: str, tmp_path: Path) -> None:
    key = change.split(":")[0]
    file = tmp_path / "mine.yaml"
    file.write_text("".join(line + "\n" for line in GOOD.splitlines() if not line.startswith(key)) + change + "\n")
    with pytest.raises(WorkbenchError, match=words) as caught:
        load_prices(file)
    assert "\n" not in str(caught.value) and "mine.yaml" in str(caught.value)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    refuses("no such table; did you mean 'article-a'", load_prices, "article-b")
    refuses("cannot be read", lambda: load_prices(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    refuses("must be a mapping", lambda: load_prices(tmp_path / "list.yaml"))


def test_times_cheaper_is_exact_and_an_example() -> None:
    small = load_prices("article-a").scaled(Fraction(1, 30))
    assert small.example and small.input == Decimal("0.1") and small.says == ()
    assert small.cost(Usage(input=7, output=3)) * 30 == load_prices("article-a").cost(Usage(input=7, output=3))
    refuses("not an exact decimal number", lambda: table(plain="1").scaled(Fraction(1, 3)))


def test_an_amount_is_rounded_only_where_it_is_printed() -> None:
    assert format_money(Fraction(1, 3)) == "0.3333" and format_money(Fraction(12345678, 1000), 2) == "12,345.68"
    third = Prices.from_values({"name": "n", "source": "s", "date": "2026-01-01", "input": "0.1", "output": "0.2"})
    assert third.cost(Usage(input=1)) + third.cost(Usage(output=1)) == Fraction(3, 10**7)


def test_a_machine_by_the_hour() -> None:
    assert cost_per_million(Fraction(36, 10), 1000) == 1  # 3.6 an hour are 0.001 a second, of 1,000 tokens
    for wrong in (lambda: cost_per_million(-1, 5), lambda: cost_per_million(1, 0)):
        with pytest.raises(WorkbenchError):
            wrong()
