"""Run chat templates in a sandbox that bounds their work and their output.

Jinja's sandbox keeps a template from reaching out. It allows loops within loops, texts that double, powers, and
paddings of a billion characters. Here each costs units of work before it is done: a turn of a loop and a call cost a
few, a text or list as many as it has characters or items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from workbench.prompt.traced import TEMPLATE, Traced, follow, follow_format, joined, origin_of, runs_of

BASE_UNITS = 500_000  # units that any template may spend
UNITS_PER_CHARACTER = 64  # and for each character of the messages
MAX_CALL_DEPTH = 64  # macros and loops that call themselves
UNITS_PER_TURN = 16  # a turn of a loop, a call
MAX_COUNT = 100_000  # a width or count that a template names, as the sandbox has it for ranges
# No template can write these names of filters.
EACH, JOINED, READ, WRITTEN, LITERAL = "each turn", "joined", "read", "written", "literal"
CONSTANT_COST_FILTERS = {
    "length",
    "count",
    "first",
    "last",
    "default",
    "d",
    "attr",
}  # filters that cost the same for any length
LINEAR_COST_FILTERS = CONSTANT_COST_FILTERS | {
    "list",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "map",
    "items",
    "reverse",
}  # and by length
WIDTH_FILTERS = {
    "center",
    "indent",
    "batch",
    "slice",
    "truncate",
    "tojson",
}  # filters whose numbers say how long a result is
WIDTH_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"}
REMOVED_FILTERS = ("urlize", "xmlattr", "wordwrap", "pprint")  # filters for web pages
SCOPES = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to calls
BUILT_IN = (str, bytes, int, float, list, tuple, dict)

_left: ContextVar[list[int]] = ContextVar("units of work that are left, and how deep calls stand in each other")


class TemplateTooExpensive(jinja2.TemplateRuntimeError):
    """A template that does more work than its messages can need."""


def units_for(characters: int) -> list[int]:
    """Return what messages of this length may cost, however often they are rendered, and the depth of calls."""
    return [BASE_UNITS + UNITS_PER_CHARACTER * characters, 0]


def spend(units: int) -> None:
    left = _left.get()
    left[0] -= units
    if left[0] < 0:
        raise TemplateTooExpensive(
            "it does more than messages of this length can need: loops without end, or texts that only grow"
        )


def size_of(value: Any) -> int:
    """Return how long `value` is by itself."""
    if isinstance(value, int):
        return value.bit_length() // 8
    return len(value) if hasattr(value, "__len__") else 1


def spend_deep(value: Any) -> None:
    """Spend the size of `value` with all that it contains, as often as it contains it."""
    if isinstance(value, str):
        spend(1 + len(value))
        return
    held, most, units = [value], _left.get()[0], 0
    while held and units <= most:
        found = held.pop()
        units += 1 + size_of(found)
        if isinstance(found, dict):
            held += found.keys()
            held += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            held += found
        elif isinstance(found, Namespace):
            held += found._Namespace__attrs.values()  # type: ignore[attr-defined] (Jinja's private attribute)
    spend(units)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates are made and rendered by `bounded`, with their work counted."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(joined)  # what macros and blocks write

    def __init__(self, **options: Any):
        super().__init__(optimized=False, **options)  # nothing is computed before work is counted
        del self.globals["lipsum"]
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {name: _counted(name, found) for name, found in self.filters.items()}
        self.tests |= {name: _counted(name, found) for name, found in self.tests.items()}
        self.filters |= {EACH: _each, JOINED: _joined, READ: _read, WRITTEN: _written, LITERAL: _literal}
        self.filters["join"] = _counted("join", _join)

    def bounded(self, text: str) -> Callable[..., Traced]:
        """Compile `text` to a function from the units left (`units_for`), which it lowers, and variables to the output.

        Raises:
            jinja2.TemplateError: if it is no template, or is too expensive.
        """
        template = self.from_string(_Counting(self).visit(self.parse(text)))

        def render(left: list[int], /, **variables: Any) -> Traced:
            left[1] = 0
            token = _left.set(left)
            try:
                return joined(template.generate(**variables))
            finally:
                _left.reset(token)

        return render

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        self.filters[name] = _counted(name, made)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend(
            UNITS_PER_TURN + _product(left, right)
            if operator == "*"
            else UNITS_PER_TURN + size_of(left) + size_of(right)
        )
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            spend(max(0, right) * left.bit_length())
        if operator == "%" and isinstance(left, str):
            _spend_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as Jinja calls it)
        spend(UNITS_PER_TURN)
        if isinstance(__obj, LoopContext) and args:
            args = (_each(args[0]), *args[1:])
        owner = getattr(__obj, "__self__", None)
        named = {name: value for name, value in kwargs.items() if name not in SCOPES}
        if isinstance(owner, BUILT_IN):
            _spend_method(owner, getattr(__obj, "__name__", ""), args, named)
        left = _left.get()
        left[1] += 1
        if left[1] > MAX_CALL_DEPTH:
            raise TemplateTooExpensive(f"it calls itself more than {MAX_CALL_DEPTH} deep")
        found = super().call(__context, __obj, *args, **kwargs)
        left[1] -= 1
        spend_deep(found) if isinstance(found, list | tuple | dict) else spend(size_of(found))
        return follow(found, (owner, args, named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None

        def counted(*args: Any, **kwargs: Any) -> str:
            _spend_format(str(value.__self__), (*args, *kwargs.values()))
            text = str(made(*args, **kwargs))
            named = args[0] if value.__name__ == "format_map" else kwargs
            return follow_format(value.__self__, str.__str__(text), args, named)

        return counted


class GenerationTag(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, as in transformers: what stands between is the model's to write."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> Traced:
        text = caller()
        return Traced(text, ((length, replace(origin, generated=True)) for length, origin in runs_of(text)))


class _Counting(NodeTransformer):
    """A transformer that counts and follows what Jinja compiles to plain Python: literals, loops, joined texts,
    comparisons, output."""

    def __init__(self, environment: jinja2.Environment):
        self._environment = environment

    def _through(self, node: Any, name: str) -> nodes.Filter:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._through(node.iter, EACH)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [self._through(each, WRITTEN) for each in node.nodes]
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Expr:
        return self._through(node, LITERAL) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Expr:
        return self._through(nodes.Const(node.data, lineno=node.lineno), LITERAL)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return self._through(nodes.List(node.nodes, lineno=node.lineno), JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = self._through(node.expr, READ)
        for operand in node.ops:
            operand.expr = self._through(operand.expr, READ)
        return node

    def _built(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") == "store":  # the names that a loop or an assignment fills
            return node
        return self._through(node, READ)

    visit_List = visit_Tuple = visit_Dict = _built  # noqa: N815 (ast's names)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._through(node, READ) if isinstance(node.arg, nodes.Slice) else node


def _each(items: Iterable[Any]) -> Iterator[Any]:
    """Return the items, each of which costs a turn; a value that is not iterable fails at once."""
    found = iter(items)

    def turns() -> Iterator[Any]:
        for item in found:
            spend(UNITS_PER_TURN)
            yield item

    return turns()


def _read(value: Any) -> Any:
    spend_deep(value)
    return value


def _joined(parts: list[Any]) -> Traced:
    spend_deep(parts)
    return joined(map(_text, parts))


def _written(value: Any) -> Traced:
    spend_deep(value)
    return _text(value)


def _text(value: Any) -> Traced:
    text = str(value)
    return text if isinstance(text, Traced) else Traced(text, origin_of([value]))


@lru_cache(4096)
def _literal(text: str) -> Traced:
    return Traced(text, TEMPLATE)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None) -> Traced:
    """Join as Jinja's filter does."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return (d if isinstance(d, Traced) else Traced(str(d), TEMPLATE)).join(map(_text, value))


def _counted(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test so that it costs what it reads and what it makes."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if not isinstance(each, _UNCOUNTED)]
        spend(UNITS_PER_TURN)
        for value in () if name in CONSTANT_COST_FILTERS else given:
            spend(size_of(value)) if name in LINEAR_COST_FILTERS else spend_deep(value)
        if name in WIDTH_FILTERS:
            _check_numbers(given[1:])
        elif name == "round":
            _check_numbers(given[1:], 400)
        if name == "replace" and len(given) >= 3:
            spend(_replaced(*map(str, given[:3])))
        elif name == "format" and given:
            _spend_format(str(given[0]), tuple(given[1:]))
        elif name == "indent" and given:
            width = given[1] if len(given) > 1 else 4
            spend(str(given[0]).count("\n") * (width if isinstance(width, int) else size_of(width)))
        elif name == "join" and given:
            listed = list(given[0])
            spend_deep(listed)
            args = tuple(listed if each is given[0] else each for each in args)
            spend(len(listed) * sum(size_of(each) for each in given[1:]))
        found = made(*args, **kwargs)
        spend(0 if name in CONSTANT_COST_FILTERS else size_of(found))
        return follow(found, given)

    if hasattr(made, "jinja_pass_arg"):  # whether Jinja hands it the environment or the context first
        counted.jinja_pass_arg = made.jinja_pass_arg  # type: ignore[attr-defined] (Jinja's mark)
    return counted


_UNCOUNTED = (jinja2.Environment, nodes.EvalContext, Context)


def _check_numbers(values: Iterable[Any], largest: int = MAX_COUNT) -> None:
    wrong = next((each for each in values if isinstance(each, int) and abs(each) > largest), None)
    if wrong is not None:
        raise TemplateTooExpensive(f"it asks for a width or count of more than {largest:,}")


def _product(left: Any, right: Any) -> int:
    """Return the size of a product."""
    if isinstance(left, int) and isinstance(right, int):
        return size_of(left) + size_of(right)
    if isinstance(left, int):
        return max(0, left) * size_of(right)
    return size_of(left) * max(0, right) if isinstance(right, int) else 1


def _replaced(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * len(new)


_WIDTHS = re.compile(r"\d+")


def check_widths(format: str) -> str:
    """Return a format whose widths are no larger than any prompt."""
    _check_numbers(int(each[-12:]) for each in _WIDTHS.findall(format))
    return format


def _spend_format(text: str, values: tuple[Any, ...]) -> None:
    """Spend the cost of `%` and `format`, whose widths are in the text or come as values."""
    spend_deep(values)
    check_widths(text)
    if "*" in text or re.search(r"\{[^}]*\{", text):
        _check_numbers(values)
        spend(sum(abs(each) for each in values if isinstance(each, int)) * len(text))
    spend(sum(int(each) for each in _WIDTHS.findall(text)))
    spend(len(text) * max(map(size_of, values), default=0))


def _spend_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Spend the cost of a method of a plain value whose result may be longer than what it reads."""
    given = (*args, *kwargs.values())
    spend(size_of(owner))
    for each in given:
        spend(size_of(each))
    if name in WIDTH_METHODS:
        _check_numbers(given)
    if name == "replace" and len(given) >= 2 and isinstance(owner, str):
        spend(_replaced(owner, str(given[0]), str(given[1])))
    elif name == "expandtabs":
        spend(owner.count("\t" if isinstance(owner, str) else b"\t") * (given[0] if given else 8))
    elif name == "join" and given:
        spend_deep(given[0])
        spend(size_of(owner) * size_of(given[0]))
    elif name == "translate" and given:
        spend_deep(given[0])
        spend(size_of(owner) * max(map(size_of, getattr(given[0], "values", list)()), default=0))
