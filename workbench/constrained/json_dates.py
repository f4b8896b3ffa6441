"""Replace the formats of dates and times in a JSON Schema by patterns that RFC 3339 and Python's parser both accept.

The compiler's own formats admit second 60 in any minute, 29 February in any year, the year 0 and endless fractions.
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
    """Replace `format: date`, `time` or `date-time` in one subschema by a pattern; nested subschemas stay unchanged."""
    name = schema.get("format")
    pattern = PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = pattern
    else:
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]
