"""Convert a run's experiment.yaml to JSON a hundred times as fast as a full YAML parser.

Ten thousand experiments differ in few lines. Their text is split where a key begins, as `yaml_text.write` lays it out
(one setting a line), and every distinct piece is parsed once.
"""

from __future__ import annotations

import json
import re

from workbench.files import read_yaml
from workbench.study.run_folder import finite_json

KEY_START = re.compile(r"\n(?=[A-Za-z_])")  # only a key begins there: continuation lines are indented, or a list
SECTION = re.compile(r"([A-Za-z_]\w*):((?:\n  [^\n]*)+)")
SECTION_KEY = re.compile(r"\n  [A-Za-z_]\w*:")
NUMBER = re.compile(r"([A-Za-z_]\w*): (-?(?:0|[1-9]\d{0,40})(?:\.\d{1,40})?)")  # the same number in YAML and JSON
ParsedPieces = dict[str, str | None]


def yaml_to_json(text: str, pieces: ParsedPieces) -> str | None:
    """Return `text` as one JSON object; None where it is no YAML mapping. `pieces` stores what was parsed before."""
    members = [_parse_member(piece, pieces) for piece in KEY_START.split(text.removesuffix("\n"))]
    known = [member for member in members if member is not None]
    names = {member.partition('": ')[0] for member in known}  # a duplicate key is no valid setting
    return "{" + ", ".join(known) + "}" if len(names) == len(members) else None


def _parse_member(piece: str, pieces: ParsedPieces) -> str | None:
    """Return `"key": value` of one key and everything indented below it."""
    if piece not in pieces:
        pieces[piece] = _parse_section(piece, pieces) or _parse_piece(piece)
    return pieces[piece]


def _parse_section(piece: str, pieces: ParsedPieces) -> str | None:
    """Parse a key whose settings are indented below it."""
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
