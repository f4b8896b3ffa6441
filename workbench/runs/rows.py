"""Read runs as rows of JSON texts, from which SQL builds columns.

The row of a damaged run has its intact parts, and `state` names the damage. Converting experiment.yaml to JSON is a
hundred times as fast as with a full YAML parser, because ten thousand experiments differ in few lines: the text is
split at each key (`yaml_text.write` puts one setting on a line), and every distinct piece is parsed once.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.files import MAX_DEPTH, UnreadableText, read_json, read_json_object, read_yaml
from workbench.runs.condition import MANIFEST, MARKER, describe_unfinished
from workbench.runs.folder import finite_json
from workbench.runs.locations import RunLocation, read_text

KEY_START = re.compile(r"\n(?=[A-Za-z_])")  # only a key starts there: continuation lines are indented, or list items
SECTION = re.compile(r"([A-Za-z_]\w*):((?:\n  [^\n]*)+)")
SECTION_KEY = re.compile(r"\n  [A-Za-z_]\w*:")
NUMBER = re.compile(r"([A-Za-z_]\w*): (-?(?:0|[1-9]\d{0,40})(?:\.\d{1,40})?)")  # equal in YAML and JSON
ParsedPieces = dict[str, str | None]
VARIANT_NAME_COLUMNS = (
    "peer",
    "operator",
    "case",
    "backend",
    "format",
    "work",
    "batch",
    "depth",
)  # columns that name rows without a variant
COMPLETE = "complete"
POINT, OUTCOME = "point.json", "outcome.json"  # files of a sweep's points


def yaml_to_json(text: str, pieces: ParsedPieces) -> str | None:
    """Convert `text` to one JSON object; None if it is not a YAML mapping. `pieces` caches parsed pieces."""
    members = [_parse_member(piece, pieces) for piece in KEY_START.split(text.removesuffix("\n"))]
    known = [member for member in members if member is not None]
    names = {member.partition('": ')[0] for member in known}  # a duplicate key is invalid
    return "{" + ", ".join(known) + "}" if len(names) == len(members) else None


def _parse_member(piece: str, pieces: ParsedPieces) -> str | None:
    """Return `"key": value` for one key and the lines indented below it."""
    if piece not in pieces:
        pieces[piece] = _parse_section(piece, pieces) or _parse_piece(piece)
    return pieces[piece]


def _parse_section(piece: str, pieces: ParsedPieces) -> str | None:
    """Parse a key with settings indented below it."""
    found = SECTION.fullmatch(piece)
    if not found or not SECTION_KEY.match(found[2]):
        return None
    inside = yaml_to_json(found[2].replace("\n  ", "\n")[1:], pieces)
    return inside and f'"{found[1]}": {inside}'


def _parse_piece(piece: str) -> str | None:
    if found := NUMBER.fullmatch(piece):
        return f'"{found[1]}": {found[2]}'
    try:
        found = read_yaml(piece + "\n")
        if not isinstance(found, dict):
            return None
        return json.dumps(finite_json(found), default=str)[1:-1] or None
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True)
class RunRow:
    """One run or one of its variants; each part of it is JSON text, or None if its file is missing or damaged."""

    run: str
    variant: str | None
    path: str
    state: str
    experiment: str | None
    environment: str | None
    summary: str | None


def run_rows(places: Sequence[RunLocation]) -> list[RunRow]:
    """Return one row per run; JSON files that are not records have none."""
    return [row for row in rows_by_location(places) if row is not None]


def rows_by_location(places: Sequence[RunLocation]) -> list[RunRow | None]:
    """Return the row of each location; None if the location is a JSON file that is not a record."""
    pieces: ParsedPieces = {}
    return [_read_folder(place, pieces) if place.files else _read_record(place, pieces) for place in places]


def _read_folder(place: RunLocation, pieces: ParsedPieces) -> RunRow:
    text = place.read("experiment.yaml")
    experiment = yaml_to_json(text, pieces) if text else None
    if MARKER in place.files:
        state = describe_unfinished(Path(place.path))
    elif MANIFEST not in place.files:
        state = f"incomplete: {MANIFEST} is missing, half of it was copied"
    elif missing := [name for name in ("experiment.yaml", "summary.json") if name not in place.files]:
        state = f"incomplete: {missing[0]} is missing"
    else:
        state = COMPLETE if experiment else "damaged: experiment.yaml cannot be read"
    inside = [_if_object(place.read(name)) for name in ("environment.json", "summary.json")]
    return RunRow(place.name, None, place.path, state, experiment, *inside)


def _if_object(text: str | None) -> str | None:
    """Return `text` if it may be a JSON object; it is validated later, when its keys are read.

    Deeply nested JSON is withheld from DuckDB, because it would invalidate the whole database.
    """
    if text is None:
        return None
    if text[:1] == "{" and text.count("{") + text.count("[") <= MAX_DEPTH:
        return text
    try:
        return text if isinstance(read_json(text), dict) else "not an object"
    except UnreadableText:
        return "not an object"


def _read_record(place: RunLocation, pieces: ParsedPieces) -> RunRow | None:
    """Read a committed record: experiment, environment and summary in one object, or with figures at the top level."""
    text = read_text(place.path) or ""
    outcome = place.path.endswith(f"/{OUTCOME}")
    if not outcome and '"environment"' not in text and text.rstrip().endswith("}"):
        return None  # valid JSON, but not a record
    try:
        record = read_json(text)
    except UnreadableText as error:
        return RunRow(place.name, None, place.path, f"damaged: {error.reason}", None, None, None)
    if outcome:
        return _failed_point(place, record)
    if not isinstance(record, dict) or "environment" not in record:
        return None
    experiment = record.get("experiment", record.get("settings"))
    known = {"experiment", "settings", "environment", "summary"}
    summary = record["summary"] if "summary" in record else {k: v for k, v in record.items() if k not in known}
    question = record.get("question")
    if isinstance(experiment, str) and "\n" not in experiment or not (experiment or question):
        experiment = {"question": place.name.split("-")[0]}  # the name of the script that measured it
    settings = yaml_to_json(experiment, pieces) if isinstance(experiment, str) else json.dumps(experiment or {})
    if question and settings and settings != "{}" and "question" not in (experiment or ()):
        settings = json.dumps({"question": question, **json.loads(settings)})
    texts = [_if_object(json.dumps(part)) for part in (record["environment"], summary)]
    return RunRow(place.name, None, place.path, COMPLETE if settings else "damaged: its experiment", settings, *texts)


def _failed_point(place: RunLocation, outcome: Any) -> RunRow | None:
    """Return a row with the settings and the error of a sweep's point without a run."""
    if not isinstance(outcome, dict) or outcome.get("run") is not None or not outcome.get("error"):
        return None
    folder = place.path.removesuffix(f"/{OUTCOME}")
    experiment = _object(read_text(f"{folder}/{POINT}")).get("experiment")
    name = place.name.removesuffix(OUTCOME).rstrip("/") or folder
    return RunRow(name, None, folder, f"failed: {outcome['error']}", json.dumps(experiment or {}), None, None)


def variant_rows(runs: Sequence[RunRow]) -> Iterator[RunRow]:
    """Yield one row per variant, with the variant's own settings and figures; a run without variants yields the run's
    row."""
    for run in runs:
        summary = _object(run.summary)
        rows = summary.get("rows")
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            yield run
            continue
        experiment = _object(run.experiment)
        about = {name: value for name, value in summary.items() if name not in ("rows", "about", "picture")}
        for row in rows:
            name = variant_name(row)
            settings = apply_variant(experiment, name)
            yield RunRow(run.run, name, run.path, run.state, json.dumps(settings), run.environment,
                      json.dumps({**about, **row}))  # fmt: skip


def variant_name(row: Mapping[str, Any]) -> str:
    return (
        str(row["variant"])
        if "variant" in row
        else " ".join(str(row[key]) for key in VARIANT_NAME_COLUMNS if key in row)
    )


def apply_variant(experiment: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """Return the settings of a variant: the experiment's settings with the variant's changes, without `variants`."""
    settings = copy.deepcopy({name: value for name, value in experiment.items() if name != "variants"})
    variants = experiment.get("variants")
    changes = variants.get(variant) if isinstance(variants, dict) else None
    for path, value in (changes if isinstance(changes, dict) else {}).items():
        *parents, last = path.split(".")
        place = settings
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        place[last] = value
    return settings


def _object(text: str | None) -> dict[str, Any]:
    try:
        return read_json_object(text or "{}")
    except UnreadableText:
        return {}
