"""Plain values as YAML text and back, equal after the round trip; only plain types are read, never objects."""

from __future__ import annotations

from typing import Any

import yaml

LINE_ENDS = "\x85\u2028\u2029"  # PyYAML reads these as the end of a line unless they are escaped


def read(text: str) -> Any:
    """The values in `text`; ValueError, in one line, where it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except _Twice as error:
        raise ValueError(str(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also impossible dates, deep nesting
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def write(values: Any) -> str:
    """`values` in their order, one a line; a text of several lines as a block, wherever that keeps it whole."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Twice(yaml.YAMLError):
    """A key that stands twice in one mapping."""


class _Loader(yaml.SafeLoader):
    """As safe_load, but a key that stands twice is refused, where YAML would keep the last one in silence."""

    def construct_document(self, node: yaml.Node) -> Any:
        _refuse_twice(node, (), set())
        return super().construct_document(node)


def _refuse_twice(node: yaml.Node, path: tuple[str, ...], looked_at: set[int]) -> None:
    if id(node) in looked_at:  # an alias, which may even lead back to where it stands
        return
    looked_at.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_twice(item, (*path, str(index)), looked_at)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        inside = (*path, str(key.value))
        if isinstance(key, yaml.ScalarNode):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise _Twice(f"{'.'.join(inside)} stands twice, in lines {lines[name]} and {line}; leave one of them")
            lines[name] = line
        _refuse_twice(value, inside, looked_at)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # a text that stands twice is written twice


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if any(end in text for end in LINE_ENDS) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
