"""Keep a bounded history of plays, and write it as rows to pick from, JSON or CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from workbench import svg
from workbench.display import Table, truncate_text
from workbench.errors import WorkbenchError
from workbench.units import format_seconds
from workbench.widgets.playground.data import PlayedRequest

MAX_ENTRIES = 50
MAX_PROMPT_CHARACTERS = 40
STYLE = (
    ".wb-pic .wb-history{height:150px;overflow:auto}.wb-pic .wb-history table{border-collapse:collapse;width:100%}"
    ".wb-pic .wb-history td,.wb-pic .wb-history th{text-align:left;vertical-align:top;padding:2px 10px 2px 0;"
    "font-size:12px;font-variant-numeric:tabular-nums}.wb-pic .wb-history th{font-weight:500;opacity:.75}"
    ".wb-pic .wb-history [data-key]{cursor:pointer;text-decoration:underline}"
    ".wb-pic .wb-history .s{overflow-wrap:anywhere;min-width:14em}"
    "@media print{.wb-pic .wb-history{height:auto}}"
)
Values = dict[str, Any]


@dataclass(frozen=True)
class PlayedEntry:
    """One play in the history: for each side the `settings` as JSON, and the `figures` (seconds, bytes, tokens) by
    name.

    `difference` is the index of the first token that differs, or None; `compared` is the number of equal tokens before
    it. Both are None for a single side.
    """

    number: int
    prompt: str
    seed: int
    settings: tuple[Values, ...]
    figures: tuple[Mapping[str, float | None], ...]
    difference: int | None = None
    compared: int | None = None
    remark: str = ""  # stopped, failed, or ""


class PlayHistory:
    """The latest plays, newest first, at most `max_entries` of them."""

    def __init__(self, max_entries: int = MAX_ENTRIES):
        self._max_entries, self._num_played = max_entries, 0
        self.entries: list[PlayedEntry] = []

    def add(self, **values: Any) -> PlayedEntry:
        """Add an entry with the given fields; it gets the next number."""
        self._num_played += 1
        entry = PlayedEntry(self._num_played, **values)
        self.entries = [entry, *self.entries][: self._max_entries]
        return entry

    def find(self, number: int) -> PlayedEntry:
        """Return the entry of this number. Raises WorkbenchError for an unknown number."""
        for entry in self.entries:
            if entry.number == number:
                return entry
        known = ", ".join(str(entry.number) for entry in self.entries) or "none"
        raise WorkbenchError(f"no play {number} in the history; there are {known}")

    def as_values(self) -> list[Values]:
        """Return the entries as JSON values."""
        return json.loads(json.dumps([asdict(entry) for entry in self.entries]))

    def json(self) -> str:
        return json.dumps(self.as_values(), indent=1, ensure_ascii=False) + "\n"

    def csv(self) -> str:
        """Return CSV with a row for each entry; a cell holds the settings of one side as JSON."""
        rows = []
        for entry in self.entries:
            row: Values = {name: getattr(entry, name) for name in ("number", "prompt", "seed", "difference", "compared",
                                                                   "remark")}  # fmt: skip
            for n, (settings, figures) in enumerate(zip(entry.settings, entry.figures, strict=True), 1):
                row |= {f"{name}_{n}": value for name, value in figures.items()}
                row[f"settings_{n}"] = json.dumps(settings, sort_keys=True)
            rows.append(row)
        return Table.from_dicts(rows).csv()


def play_figures(played: PlayedRequest) -> dict[str, float | None]:
    """Return the figures of a generation by name: seconds, bytes, tokens; None for an unknown one."""
    return {
        "ttft_s": played.ttft, "tpot_s": played.tpot, "kv_bytes_per_token": played.kv_bytes_per_token,
        "output_tokens": played.num_tokens,
    }  # fmt: skip


def setting_changes(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted path, as (before, after).

    Groups of different kinds, or with different names, count as one setting."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        place = f"{path}.{name}" if path else name
        if one == other and type(one) is type(other):
            continue
        if isinstance(one, dict) and isinstance(other, dict) and _same_group(one, other):
            found |= setting_changes(one, other, place)
        else:
            found[place] = one, other
    return found


def _same_group(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether both groups have the same kind and names, so that their settings can be compared one by one."""
    return one.keys() == other.keys() and one.get("kind") == other.get("kind")


def draw_history(entries: Sequence[PlayedEntry], initial: Mapping[str, Any]) -> str:
    """Draw a row for each play; its button's key is the entry's number. Only settings that differ from `initial`, or
    between two sides, are listed."""
    two = any(len(entry.settings) > 1 for entry in entries)
    heads = ("#", "prompt", "seed", *(("first difference",) if two else ()), "time per token", "settings", "")
    lines = [_row(entry, initial, two, index == 0) for index, entry in enumerate(entries)]
    head = svg.tag("tr", *(svg.tag("th", name or " ") for name in heads))
    if not lines:
        lines = [
            svg.tag("tr", svg.tag("td", "Each play is listed here; pick one to have its settings again.", colspan=9))
        ]
    table = svg.tag("table", svg.tag("thead", head), svg.tag("tbody", *lines))
    return svg.tag("style", STYLE) + svg.tag("div", table, class_="wb-history", data_scroll="history")


def _row(entry: PlayedEntry, initial: Mapping[str, Any], two: bool, first: bool) -> str:
    prompt = truncate_text(" ".join(entry.prompt.split()), MAX_PROMPT_CHARACTERS)
    cells = [str(entry.number), prompt, str(entry.seed)]
    cells += [describe_difference(entry)] if two else []
    cells += [" | ".join(format_seconds(figures.get("tpot_s")) for figures in entry.figures)]
    shown = [svg.tag("td", escape(cell)) for cell in cells]
    shown.append(svg.tag("td", escape(describe_settings(entry, initial)), class_="s"))
    button = svg.tag("span", "restore", data_key=str(entry.number), tabindex=0 if first else -1, role="button",
                     aria_label=f"restore play {entry.number}",
                     data_tip="set its prompt, seed and settings again")  # fmt: skip
    return svg.tag("tr", *shown, svg.tag("td", button))


def describe_difference(entry: PlayedEntry) -> str:
    if entry.remark:
        return entry.remark
    if entry.difference is not None:
        return f"token {entry.difference + 1}"
    return "" if entry.compared is None else f"none in {entry.compared} tokens"


def describe_settings(entry: PlayedEntry, initial: Mapping[str, Any]) -> str:
    """Return the settings that differ: between two sides, as `left | right`, or from the initial ones."""
    if len(entry.settings) == 2:
        changes = setting_changes(*entry.settings)
        return (
            "; ".join(f"{path}: {format_setting(a)} | {format_setting(b)}" for path, (a, b) in changes.items())
            or "equal settings"
        )
    changes = setting_changes(initial, entry.settings[0])
    return (
        "; ".join(f"{path}: {format_setting(b)}" for path, (_, b) in changes.items() if path != "sampling.seed")
        or "initial"
    )


def format_setting(value: Any) -> str:
    """Return a setting's value on one line; for a group of settings with a kind, its kind."""
    if isinstance(value, dict):
        value = value.get("kind", value)
    return truncate_text(value if isinstance(value, str) else json.dumps(value), 40)
