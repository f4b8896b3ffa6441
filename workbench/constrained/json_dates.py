"""Carry out the formats of dates and times in a JSON Schema: what a reader of RFC 3339 takes, and Python's does too.

The compiler's own admit a second of 60 at any minute, 29 February in every year, the year 0 and fractions without end.
"""

from __future__ import annotations

from typing import Any

LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
DAY = (
    rf"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP}-02-29)"
)
HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{HOUR})"
PATTERNS = {"date": f"^{DAY}$", "time": f"^{TIME}$", "date-time": f"^{DAY}T{TIME}$"}


def carry_out_dates(schema: dict[str, Any]) -> None:
    """Replace a format of one subschema, not of those within it, by its pattern."""
    name = schema.get("format")
    pattern = PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = pattern
    else:
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]
