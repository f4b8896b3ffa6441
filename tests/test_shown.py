"""Values shown in notebooks: all text escaped, nothing loaded from outside, the values unchanged."""

from __future__ import annotations

import csv
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from workbench.claims.claim import Claim, LoadedClaim, Trial
from workbench.display import MAX_TABLE_ROWS, Displayable, Table, format_ranges
from workbench.engine.loaded_model import describe_model
from workbench.experiment.experiment import Experiment
from workbench.model.attention_config import AttentionConfig
from workbench.request import Request, SamplingParameters, Sequence
from workbench.runs.comparison import Comparison
from workbench.settings import non_default_settings
from workbench.trace.events import Finished

ROOT = Path(__file__).resolve().parents[1]
ODD = "<script>alert('&amp;')</script>\n\"x\" | ' \x00 ﷽"


CELLS = ["td", "th"]


def cells_of(page: str) -> list[str]:
    """Return the texts of a page's cells."""
    soup = BeautifulSoup(page, "html.parser", preserve_whitespace_tags=CELLS)  # else a tab alone is read as a space
    return [cell.get_text() for cell in soup(CELLS)]


def tags_of(page: str) -> set[str]:
    return {tag.name for tag in BeautifulSoup(page, "html.parser")(True)}


words = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\x00"), max_size=20)


@given(st.lists(st.tuples(words, words, words), max_size=5), words, words)
def test_every_cell_comes_out_of_the_page_as_it_went_in(rows: list, title: str, note: str) -> None:
    page = Table(title, rows, ("a", "<b>", "c"), note, collapsed=((title, note),)).html()
    assert cells_of(page) == ["a", "<b>", "c"] * bool(rows) + [cell for row in rows for cell in row]
    known = {"div", "style", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"}
    assert tags_of(page) <= known


any_text = st.text(st.characters(blacklist_categories=("Cs",)) | st.sampled_from("\\|\r\n\t,\"'`<&-:"), max_size=12)
any_rows = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(any_text, min_size=n, max_size=n), min_size=1, max_size=5)
)


@given(any_rows)
def test_every_text_is_read_back_from_csv(rows: list[list[str]]) -> None:
    assert list(csv.reader(io.StringIO(Table("", rows[1:], rows[0]).csv(), newline=""))) == rows


def test_values_of_csv_are_not_rounded() -> None:
    text = Table.from_dicts([{"a": 0.1 + 0.2, "b": None}, {"c": float("nan"), "a": 10**9}]).csv()
    assert text == "a,b,c\n0.30000000000000004,,\n1000000000,,\n"


def markdown_of(rows: list[list[str]], title: str = "") -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(Table(title, rows[1:], rows[0]).markdown())


@given(any_rows, any_text)
def test_no_text_breaks_a_table_of_markdown(rows: list[list[str]], title: str) -> None:
    kinds = [token.type for token in markdown_of(rows, " ".join(title.split()))]
    assert kinds.count("table_open") == 1 and kinds[-1] == "table_close"
    assert kinds.count("tr_open") == len(rows)
    assert kinds.count("th_open") == len(rows[0]) and kinds.count("td_open") == len(rows[0]) * (len(rows) - 1)


@given(any_rows)
def test_plain_words_and_pipes_are_read_back_from_markdown(rows: list[list[str]]) -> None:
    rows = [[re.sub(r"[^a-zA-Z0-9|]", "", cell) for cell in row] for row in rows]
    assert [token.content for token in markdown_of(rows) if token.type == "inline"] == [c for row in rows for c in row]


@given(any_rows)
def test_a_row_is_a_line_of_plain_text(rows: list[list[str]]) -> None:
    text = Table("", rows[1:], rows[0]).text(None)
    assert text.count("\n") == len(rows) >= len(text.splitlines()) - 1


def test_numbers_are_aligned_to_the_right_everywhere() -> None:
    table = Table("", [("a", 0, "1"), ("b", None, "22"), ("c", 12_345.0, "3")], ("name", "number", "text"))
    assert table.numeric == [False, True, False]
    assert Table("", table.rows, table.headings, left=("number",)).numeric == [False, False, True]
    assert table.text().splitlines()[2:] == ["a          0  1", "b             22", "c     12,345  3"]
    assert table.html().count('class="n"') == 4
    assert [column.justify for column in table.rich().columns] == ["left", "right", "left"]


def test_text_is_never_markup_and_styles_are_kept_where_they_show() -> None:
    table = Table("[b]t", [("[red]x[/]", Text("bad", style="red"))], ("[i]h", "state"), "[n]")
    console = Console(record=True, width=80, force_terminal=True)
    console.print(table)
    shown = console.export_text(styles=True)
    assert all(words in shown for words in ("[b]t", "[red]x[/]", "[i]h", "[n]", "\x1b[31mbad"))
    assert "| [red]x[/] | bad |" in table.markdown() and "[red]x[/],bad\n" in table.csv()


def test_a_long_table_ends_and_says_so() -> None:
    table = Table("many", [(number, "x") for number in range(1000)])
    assert len(cells_of(table.html())) == 2 * MAX_TABLE_ROWS and f"and {1000 - MAX_TABLE_ROWS} more" in table.html()
    assert len(table.text().splitlines()) == MAX_TABLE_ROWS + 2


def a_claim() -> LoadedClaim:
    trial = Trial(missing="a GPU", rule="times >= 8")
    return LoadedClaim("kv-gqa", ROOT / "a.yaml", Claim(says="so", sources={ODD: ODD}, trials=(trial,)), (trial,), ())


VALUES: dict[str, Any] = {
    "spec": lambda: describe_model(
        "demo", AttentionConfig.parse({"sliding_window": 128, "pattern": ["window", "full"]})
    )[0],
    "experiment": lambda: Experiment(question=ODD, workload={"kind": "prompts", "prompts": (ODD,)}),  # type: ignore[arg-type]
    "sampling": lambda: SamplingParameters(temperature=0.2, stop=(ODD,)),
    "request": lambda: Request(ODD, (1, 2), prompt=ODD, priority=2),
    "finished": lambda: Finished(1.0, ODD, reason="stop", output_text=ODD, token_ids=(1, 2), prompt_tokens=3),
    "comparison": lambda: Comparison(ODD, (), ()),
    "claim": a_claim,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_shows_itself_and_stays_what_it_is(name: str) -> None:
    value, same = VALUES[name](), VALUES[name]()
    page = value._repr_html_()
    assert isinstance(value, Displayable)
    assert not {"script", "link", "iframe", "img"} & tags_of(page) and "<script" not in page
    assert not re.search(r"https?:|url\(", page)
    assert repr(value).startswith(type(value).__name__ + "(") and str(value).strip()
    if name != "claim":
        assert value == same and pickle.loads(pickle.dumps(value)) == value
    if isinstance(value, BaseModel):
        assert type(value).model_validate(value.model_dump()) == value


def test_what_differs_from_the_defaults_is_the_whole_experiment() -> None:
    asked = Experiment.from_values({"question": "?", "workload": {"kind": "prompts", "prompts": ["a"]}})
    assert {path.split(".")[0] for path, _ in non_default_settings(asked)} == {"question", "workload"}
    for file in sorted((ROOT / "experiments").glob("*.yaml")):
        whole = Experiment.from_file(file)
        values: dict[str, Any] = {}
        for path, value in non_default_settings(whole):
            *parents, last = path.split(".", 1 if path.startswith("variants.") else -1)
            place = values
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        assert Experiment.from_values(values) == whole, file.name
        assert whole._repr_html_().index("<details>") < whole._repr_html_().index("<pre>")


def test_layers_that_are_alike_stand_on_one_line() -> None:
    text = str(VALUES["spec"]())
    same = r" +grouped attention: num_heads 4, num_kv_heads 2, head_dim 64"
    assert re.search(rf"layers 0, 2, 4{same}, sliding_window 128", text)
    assert re.search(rf"layers 1, 3, 5{same}; intermediate_size", text)


def test_a_sequence_is_no_value_and_shows_nothing() -> None:
    assert not isinstance(Sequence.from_request(Request("a", (1,)), 0), Displayable)


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    text = format_ranges(sorted(numbers))
    parts = [part.split("-") for part in text.split(", ") if part]
    named = [n for first, *last in parts for n in range(int(first), int(last[0] if last else first) + 1)]
    assert named == sorted(numbers)
    assert len(parts) == sum(n - 1 not in numbers for n in numbers), "neighbours are one range"
