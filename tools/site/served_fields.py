"""Make the table of every request field that the server knows: supported, ignored with the reason, or refused with the
reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from workbench.serve.app import load_dialects
from workbench.serve.bodies.fields import Body
from workbench.serve.bodies.parts import Part
from workbench.serve.dialect import Dialect
from workbench.serve.dialects.openai.messages import FIELDS, IGNORED_FIELDS, REFUSED_FIELDS

DONE = "supported"


def served_fields_table(root: Path) -> str:
    """Return the table of fields by name, with the request that each belongs to and how the server treats it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, place, effect in _known():
        rows.setdefault((name, effect), []).append(place)
    lines = ["| field | of | what the server does |", "|---|---|---|"]
    for (name, effect), places in sorted(rows.items()):
        lines.append(f"| `{name}` | {', '.join(dict.fromkeys(places))} | {effect} |")
    return "\n".join(lines)


def _known() -> Iterator[tuple[str, str, str]]:
    """Yield (field, where it stands, effect) of each body, of each object within one, and of OpenAI's messages."""
    dialects: list[Dialect] = [*load_dialects().values()]
    dialects += [each for dialect in dialects for each in dialect.tokenizers()]
    for dialect in dialects:
        yield from _of(dialect.body, f"`{dialect.path}`")
    for part in sorted(Part.__subclasses__(), key=lambda each: each.__name__):
        yield from _of(part, part.__name__)
    for role, names in FIELDS.items():
        yield from ((name, f"a {role} message of a chat", DONE) for name in names)
    yield from ((name, "a message of a chat", "refused, where it says something") for name in REFUSED_FIELDS)
    yield from ((name, "a message of a chat", f"ignored: {reason}") for name, reason in IGNORED_FIELDS.items())


def _of(kind: type[Body], place: str) -> Iterator[tuple[str, str, str]]:
    yield from ((name, place, DONE) for name in kind.carried_out())
    yield from ((name, place, f"ignored: {reason}") for name, reason in kind.IGNORED.items())
    yield from ((name, place, f"refused: {refused.reason}") for name, refused in kind.REFUSED.items())
