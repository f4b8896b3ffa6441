"""Format JSON values for form fields."""

from __future__ import annotations

import json
import sys
from typing import Any

NOT_SET = "not set"


def to_yaml_line(value: Any) -> str:
    """YAML of JSON values that reads back as they are; what cannot be seen in a text is escaped."""
    import yaml

    class OneLine(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    OneLine.add_representer(str, represent)
    options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False}
    return yaml.dump(value, Dumper=OneLine, width=sys.maxsize, **options).strip()


def equal_json(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is not true."""
    return type(one) is type(other) and one == other


def format_value(value: Any) -> str:
    return NOT_SET if value is None else value if isinstance(value, str) else json.dumps(value)
