"""Make questions with the rounds of tool calls that they take and their answers; every result is what the real tool
returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments import chat_phrases as phrases
from experiments.chat_draw import SPELLINGS, Draw
from workbench.agents import demo_tools

TOOLS = {function.__name__: function for function in (demo_tools.calculate, demo_tools.convert, demo_tools.lookup)}
IN_THE_HEAD = ("{a} + {b}", "{a} - {b}", "{a} * {b}")  # with whole numbers, the product by one digit


@dataclass(frozen=True)
class Call:
    """One call of a tool; `result` runs the real tool."""

    name: str
    arguments: dict[str, Any]

    @property
    def result(self) -> str:
        return run_tool(self.name, self.arguments)


@dataclass(frozen=True)
class Exchange:
    """A question, the rounds of calls it takes, and the answer.

    `thoughts` has one text for each round and one for the answer. `wanted` are texts that a right answer contains.
    """

    kind: str
    question: str
    rounds: tuple[tuple[Call, ...], ...]
    answer: str
    wanted: tuple[str, ...]
    thoughts: tuple[str, ...]

    @property
    def tools(self) -> set[str]:
        return {call.name for calls in self.rounds for call in calls}


def run_tool(name: str, arguments: dict[str, Any]) -> str:
    """Return a tool's result, or its error as the text that the model reads."""
    try:
        return TOOLS[name](**arguments)
    except ValueError as error:
        return f"error: {error}"


def calculation(expression: str) -> Call:
    return Call("calculate", {"expression": expression})


def conversion(value: str, unit: str, to: str) -> Call:
    return Call("convert", {"value": float(value) if "." in value else int(value), "unit": unit, "to": to})


def search(name: str) -> Call:
    return Call("lookup", {"name": name})


def failed(result: str) -> bool:
    return result.startswith("error: ")


def direct(kind: str, question: str, answer: str, thought: str, wanted: tuple[str, ...] | None = None) -> Exchange:
    """Return an exchange without tool calls."""
    return Exchange(kind, question, (), answer, (answer,) if wanted is None else wanted, (thought,))


def arithmetic(draw: Draw, expressions: Sequence[str] = tuple(sorted(phrases.ARITHMETIC))) -> tuple[str, str, str]:
    """Return a frame for a question, one of the expressions in words, and the same expression in digits."""
    expression = draw.choice(expressions)
    frame, words = draw.nested(phrases.ASK, phrases.ARITHMETIC[expression])
    values = {name: draw.number(decimals=True) for name in "abc"} | {"s": str(draw.rng.randint(2, 5))}
    values["p"] = draw.number(2)
    if "/ {b}" in expression and not draw.chance(0.4):  # mostly without a remainder
        values["b"] = draw.number(2)
        multiples = (str(int(values["b"]) * draw.rng.randint(2, 300)) for _ in range(200))
        values["a"] = next(filter(draw.allows, multiples), values["a"])
    if "/ {b}" in expression and draw.chance(0.06):
        values["b"] = "0"
    if "**" in expression:
        values["a"] = draw.number(3)
    return frame, words.format(**values), expression.format(**values)


def hard_calculation(draw: Draw) -> Exchange:
    """Return an exchange with a calculation that is too hard to do in the head, and is always done by the
    calculator."""
    frame, words, expression = arithmetic(
        draw, [each for each in sorted(phrases.ARITHMETIC) if each not in IN_THE_HEAD]
    )
    return calculated("calculate", frame.format(words), expression, False)


def calculate_exchange(draw: Draw, brief: bool) -> Exchange:
    frame, words, expression = arithmetic(draw)
    return calculated("calculate", frame.format(words), expression, brief)


def calculated(kind: str, question: str, expression: str, brief: bool, after: str = "") -> Exchange:
    call = calculation(expression)
    result = call.result
    if failed(result):
        reason = result.removeprefix("error: ")
        return Exchange(
            kind, question, ((call,),), f"That has no result: {reason}.", (reason,), _thoughts(call, result)
        )
    answer = result if brief else f"{result} {after}." if after else f"{expression} = {result}."
    return Exchange(kind, question, ((call,),), answer, (result,), _thoughts(call, result))


def _thoughts(call: Call, result: str) -> tuple[str, str]:
    if call.name == "calculate":
        before = f"To calculate: {call.arguments['expression']}."
    elif call.name == "convert":
        before = f"To convert: {call.arguments['value']} {call.arguments['unit']} to {call.arguments['to']}."
    else:
        before = f"To look up: {call.arguments['name']}."
    return before, "The tool failed." if failed(result) else "The result is there."


def story_exchange(draw: Draw, brief: bool) -> Exchange:
    expression = draw.choice(sorted(phrases.STORIES))
    numbers = [draw.number(3), draw.number(3)]
    if "-" in expression:
        numbers.sort(key=int, reverse=True)
    things = draw.choice(phrases.THINGS)
    values = {"a": numbers[0], "b": numbers[1], "who": draw.choice(phrases.WHO), "things": things}
    question = draw.phrase(phrases.STORIES[expression]).format(**values)
    return calculated("story", question, expression.format(**values), brief, things)


def convert_exchange(draw: Draw, brief: bool) -> Exchange:
    unit, to = draw.units()
    value = draw.number(decimals=True)
    if draw.chance(0.05):  # a unit of another measure
        to = draw.choice(sorted(set().union(*SPELLINGS.values())))
    return converted(draw.phrase(phrases.CONVERT).format(v=value, u=unit, t=to), value, unit, to, brief)


def converted(question: str, value: str, unit: str, to: str, brief: bool) -> Exchange:
    call = conversion(value, unit, to)
    result = call.result
    if failed(result):
        reason = result.removeprefix("error: ")
        answer, wanted = f"That has no result: {reason}.", (reason,)
    else:
        answer, wanted = result if brief else f"{value} {unit} = {result} {to}.", (result,)
    return Exchange("convert", question, ((call,),), answer, wanted, _thoughts(call, result))


def lookup_exchange(draw: Draw, brief: bool) -> Exchange:
    name = draw.function()
    if draw.chance(0.06):
        module, function = name.rsplit(".", 1)
        name = f"{module}.{function[: len(function) // 2]}{draw.choice(('ette', 'ify', 'zz', 'oo'))}"
    written = draw.choice(phrases.NAMES).format(name)
    return looked_up(draw.phrase(phrases.LOOKUP).format(f=written), name, brief)


def looked_up(question: str, name: str, brief: bool) -> Exchange:
    call = search(name)
    result = call.result
    answer, wanted = result if brief else f"{name}: {result}", (result,)
    if failed(result):
        answer, wanted = f"That has no result: {result.removeprefix('error: ')}.", (result.removeprefix("error: "),)
    return Exchange("lookup", question, ((call,),), answer, wanted, _thoughts(call, result))


def parallel_exchange(draw: Draw, brief: bool) -> Exchange:
    """Return an exchange with two questions of one kind in one message, answered by two calls in one round."""
    if draw.chance(0.5):
        names = [draw.function(), draw.function()]
        f, g = (draw.choice(phrases.NAMES[:3]).format(name) for name in names)
        calls = tuple(map(search, names))
        lines = [f"{name}: {call.result}" for name, call in zip(names, calls, strict=True)]
        question = draw.phrase(phrases.LOOKUP_TWO).format(f=f, g=g)
    else:
        drawn = [arithmetic(draw) for _ in range(2)]
        while any(failed(calculation(expression).result) for *_, expression in drawn):
            drawn = [arithmetic(draw) for _ in range(2)]
        calls = tuple(calculation(expression) for *_, expression in drawn)
        lines = [f"{call.arguments['expression']} = {call.result}" for call in calls]
        question = draw.phrase(phrases.TWO).format(*(words for _, words, _ in drawn))
    results = tuple(call.result for call in calls)
    answer = "\n".join(results if brief else lines)
    what = "look up" if calls[0].name == "lookup" else "calculate"
    return Exchange(
        "parallel", question, (calls,), answer, results, (f"Two things to {what}.", "Both results are there.")
    )


def sum_exchange(draw: Draw, brief: bool) -> Exchange:
    """Return an exchange that converts two quantities in one round, and adds them in the next."""
    unit, other, to = draw.units(3)
    value, second = draw.number(2), draw.number(2)
    question = draw.phrase(phrases.CONVERT_TWO).format(v=value, u=unit, w=second, x=other, t=to)
    first = (conversion(value, unit, to), conversion(second, other, to))
    expression = f"{first[0].result} + {first[1].result}".replace("+ -", "- ")
    call = calculation(expression)
    answer = call.result if brief else f"{value} {unit} and {second} {other} = {call.result} {to}."
    thoughts = (f"To convert to {to} and add: {value} {unit}, {second} {other}.", "Now add both.", "The sum is there.")
    return Exchange("sum", question, (first, (call,)), answer, (call.result,), thoughts)


def chain_exchange(draw: Draw, brief: bool) -> Exchange:
    """Return an exchange that converts a quantity and then calculates with the result, or the other way round."""
    unit, to = draw.units()
    if draw.chance(0.5):
        value, more = draw.number(3), draw.number(3)
        question = draw.phrase(phrases.CONVERT_THEN).format(v=value, u=unit, t=to, a=more)
        first = conversion(value, unit, to)
        second = calculation(f"{first.result} + {more}")
        thoughts = (_thoughts(first, "")[0], f"Now add {more}.", "The result is there.")
    else:
        frame, words, expression = arithmetic(draw)
        first = calculation(expression)
        while failed(first.result) or len(first.result) > 10 or first.result.startswith(("-", "0")):
            frame, words, expression = arithmetic(draw)
            first = calculation(expression)
        question = draw.phrase(phrases.THEN_CONVERT).replace("{}", words, 1).format(u=unit, t=to)
        second = conversion(first.result, unit, to)
        thoughts = (_thoughts(first, "")[0], f"Now convert from {unit} to {to}.", "The result is there.")
    answer = second.result if brief else f"The result is {second.result} {to}."
    return Exchange("chain", question, ((first,), (second,)), answer, (second.result,), thoughts)


def as_follow_up(exchange: Exchange) -> Exchange:
    return replace(exchange, kind="follow_up")


def worked_out(draw: Draw, brief: bool) -> Exchange:
    """Return an exchange with a small sum, difference or product, worked out without a tool: the thought goes digit by
    digit, from the right."""
    expression = draw.choice(IN_THE_HEAD)
    frame, words = draw.nested(phrases.ASK, phrases.ARITHMETIC[expression])
    a, b = draw.number(5), draw.number(1 if "*" in expression else 5)
    if "-" in expression and int(a) < int(b):
        a, b = b, a
    wanted = calculation(expression.format(a=a, b=b)).result
    thought = f"{columns(a, b, expression[4])}. The result is {wanted}."
    answer = wanted if brief else f"{expression.format(a=a, b=b)} = {wanted}."
    return direct("worked_out", frame.format(words.format(a=a, b=b)), answer, thought, (wanted,))


def columns(a: str, b: str, operation: str) -> str:
    """Return a written calculation by columns, from the right: a sum, a difference (a >= b), or a product with one
    digit.

    Each step has the digits with the carry, their result, and the digits found so far, so that each step needs only the
    step before it.

    >>> columns("847", "96", "+")
    '7+6=13:3, 4+9+1=14:43, 8+0+1=9:943'
    >>> columns("847", "96", "-")
    '7-6=1:1, 14-9=5:51, 8-0-1=7:751'
    >>> columns("847", "6", "*")
    '7*6=42:2, 4*6+4=28:82, 8*6+2=50:5082'
    """
    steps, carry, found = [], 0, ""
    size = len(a) if operation == "*" else max(len(a), len(b))
    for place in range(1, size + 1):
        digit = int(a.zfill(size)[-place])
        other = int(b) if operation == "*" else int(b.zfill(size)[-place])
        carried = f"{'-' if operation == '-' else '+'}{carry}" if carry else ""
        if operation == "-":
            borrow = 10 if digit - other - carry < 0 else 0
            digit, total = digit + borrow, digit + borrow - other - carry
            carry = borrow // 10
        else:
            total = (digit * other if operation == "*" else digit + other) + carry
            carry = total // 10
        found = (str(total) if place == size else str(total % 10)) + found
        steps.append(f"{digit}{operation}{other}{carried}={total}:{found}")
    return ", ".join(steps)
