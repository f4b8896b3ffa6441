"""Write plain values as YAML that `workbench.files.read_yaml` reads back as equal values."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic_core import to_jsonable_python

UNICODE_LINE_BREAKS = "\x85\u2028\u2029"  # PyYAML reads these as the end of a line unless they are escaped


def write_yaml(values: Any) -> str:
    """Write `values` in order, one a line. Text of several lines is written as a block where that preserves it."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # write a repeated text twice, without YAML anchors


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if any(end in text for end in UNICODE_LINE_BREAKS) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_data(to_jsonable_python(value)))
