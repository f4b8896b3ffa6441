"""Count the steps of a chat template, and refuse a template that takes more steps than its messages can need.

Each character or item that an operation reads or creates is one step; a loop iteration, a call or an operator costs
STEPS_PER_TURN more. Steps are counted before an operation runs, so no value is longer than a small multiple of the
remaining steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import jinja2
from jinja2.utils import Namespace

BASE_STEPS = 500_000  # steps allowed for every template
STEPS_PER_CHARACTER = 64  # further steps for each character of the messages
STEPS_PER_TURN = 16
MAX_BITS = 1 << 14  # bits of an integer: the digits that Python prints by default
MULTIPLYING = frozenset(  # operations with a result as long as the product of the operands
    ["batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "translate", "zfill"]
)
CONTAINERS = (list, tuple, set, frozenset, *map(type, ({}.keys(), {}.values(), {}.items())))
NUMBER = re.compile(r"\d+")


class TemplateTooExpensive(jinja2.TemplateRuntimeError):
    """Raised for a template that takes more steps than its messages can need."""


@dataclass
class Steps:
    """The number of steps that a template may still take, in all renderings of the same messages."""

    left: int


steps_left: ContextVar[Steps] = ContextVar("steps that the running template may still take")


def steps_for(characters: int) -> Steps:
    """Return the number of steps, as `Steps`, that a template may take for messages of `characters` characters."""
    return Steps(BASE_STEPS + STEPS_PER_CHARACTER * characters)


def spend(count: int) -> None:
    steps = steps_left.get()
    steps.left -= count
    if steps.left < 0:
        raise TemplateTooExpensive(
            "it does more than messages of this length can need: loops without end, or texts that only grow"
        )


def turns(items: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over `items` that counts each iteration as steps; a value that is not iterable fails
    at once.
    """
    iterator = iter(items)

    def counted() -> Iterator[Any]:
        for item in iterator:
            spend(STEPS_PER_TURN)
            yield item

    return counted()


def length(value: Any) -> int:
    """Return the number of characters or items of a value, without the contents of its items."""
    if not isinstance(value, int):
        return len(value) if hasattr(value, "__len__") else 1
    if value.bit_length() > MAX_BITS:
        raise TemplateTooExpensive(f"it computes a number of more than {MAX_BITS:,} bits")
    return 1


def size(value: Any) -> int:
    """Return the number of characters and items of a value, nested values included each time they occur.

    Raises:
        TemplateTooExpensive: if the number exceeds the remaining steps.
    """
    waiting, total, most = [value], 0, steps_left.get().left
    while waiting:
        item = waiting.pop()
        total += 1 + length(item)
        if total > most:
            spend(total)
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, CONTAINERS):
            waiting += item
        elif isinstance(item, Namespace):
            waiting.append(item._Namespace__attrs)  # type: ignore[attr-defined] (Jinja's private attribute)
    return total


def growth(operation: str, operands: Sequence[Any]) -> int:
    """Return by how much the result of an operation may at most be longer than its operands.

    Args:
        operation: a filter, a method or an operator.
        operands: the value it is applied to, then its arguments.
    """
    match operation, operands:
        case "**", [int(base), int(power)]:
            return base.bit_length() * abs(power)
        case "*", [int(), int()]:
            return 0
        case "*", [sequence, int(count)] | [int(count), sequence]:
            return size(sequence) * abs(count)
        case "replace", [text, old, new, *_]:
            return str(text).count(str(old)) * size(new)
        case "join", [items, separator, *_]:
            return length(items) * length(separator)
        case "%" | "format", [text, *values]:
            return format_growth(str(text), values)
        case _, [value, *rest] if operation in MULTIPLYING:
            return size(value) * prod(max(1, abs(each)) if isinstance(each, int) else size(each) for each in rest)
    return 0


def format_growth(text: str, values: Sequence[Any] = ()) -> int:
    """Return the maximum number of steps that `text % values` can add: each number in the text may be a width, and if
    the text has a `*`, also each number among the values. Each conversion splits the text.
    """
    widths = sum(map(int, NUMBER.findall(text)))
    if "*" in text:
        widths += sum(abs(each) for each in values if isinstance(each, int))
    return text.count("%") * (widths + len(text) + size(values))
