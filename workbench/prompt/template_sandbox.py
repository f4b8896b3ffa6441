"""Run chat templates in a sandbox that bounds their steps and tracks the origin of every character they write.

Jinja's immutable sandbox keeps a template from reaching other objects. It still allows nested loops, texts that double,
powers, and paddings of a billion characters: `template_bounds` counts their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, reduce, wraps
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from workbench.prompt.template_bounds import (
    NUMBER,
    STEPS_PER_TURN,
    Steps,
    TemplateTooExpensive,
    growth,
    length,
    size,
    spend,
    steps_left,
    turns,
)
from workbench.prompt.traced import TEMPLATE, Traced, follow, follow_format, joined, origin_of, runs_of
from workbench.prompt.traced_json import to_json

REMOVED_FILTERS = ("urlize", "xmlattr", "wordwrap", "pprint", "striptags")  # filters for web pages
REMOVED_METHODS = ("encode", "format_map", "striptags", "to_bytes")  # bytes and codecs: unbounded run time
UNCOUNTED_FILTERS = ("length", "count")
SELECTING_FILTERS = {"attr", "d", "default", "first", "items", "join", "last", "list", "map", "reverse"} | {
    "reject", "rejectattr", "select", "selectattr",
}  # filters that pass items on without reading their contents  # fmt: skip
TURNS, READ, SLICED = "turns", "read", "sliced"  # filters that the environment puts into a template
SCOPES = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to calls
PASSED = (jinja2.Environment, nodes.EvalContext, Context)  # arguments that Jinja adds to filters
BUILT_IN = (str, int, float, list, tuple, dict)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandboxed Jinja environment; templates compiled by `bounded` count their steps and fail beyond a limit."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(joined)  # output of macros and blocks

    def __init__(self, **options: Any):
        super().__init__(optimized=False, finalize=_written, **options)  # count first, fold no constants
        self.literals: list[Traced] = []  # literal texts of the template
        del self.globals["lipsum"]
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {"join": _join, "sum": _sum, "tojson": to_json}
        for name in self.filters.keys() - UNCOUNTED_FILTERS:
            self.filters[name] = _bounded(name, self.filters[name], length if name in SELECTING_FILTERS else size)
        for name, test in self.tests.items():
            if name == "in" or test.__module__ == "_operator":  # a comparison: other tests only look at a type
                self.tests[name] = _bounded(name, test, size)
        self.filters |= {TURNS: turns, READ: _read, SLICED: _sliced}

    def bounded(self, text: str) -> Callable[..., Traced]:
        """Compile the template `text` to a function that returns its output. The function takes the remaining steps
        (see `steps_for`), which it reduces, and the template's variables.

        Raises:
            jinja2.TemplateError: if the text is not a template, or takes too many steps.
        """
        template = self.from_string(_Counted(self).visit(self.parse(text)))

        def render(steps: Steps, /, **variables: Any) -> Traced:
            token = steps_left.set(steps)
            try:
                return joined(template.generate(**variables))
            except RecursionError:
                raise TemplateTooExpensive("it calls itself without end") from None
            finally:
                steps_left.reset(token)

        return render

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REMOVED_METHODS and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str):
            spend(len(obj))
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        operands = (left, *right) if operator == "%" and isinstance(right, tuple) else (left, right)
        spend(STEPS_PER_TURN + sum(map(length, operands)) + growth(operator, operands))
        return _made(super().call_binop(context, operator, left, right), operands, length)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as Jinja calls it)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        owner = owner if isinstance(owner, BUILT_IN) else None
        if args and isinstance(__obj, LoopContext):
            args = (turns(args[0]), *args[1:])
        elif args and isinstance(owner, str) and name == "join":
            args = (list(args[0]), *args[1:])
        named = {name: value for name, value in kwargs.items() if name not in SCOPES}
        operands = [owner, *args, *named.values()]
        spend(STEPS_PER_TURN + length(owner) + growth(name, operands))
        if not isinstance(__obj, Macro) or __obj.catch_varargs or __obj.catch_kwargs:  # these create a tuple or dict
            spend(sum(map(size, operands[1:])))
        return _made(super().call(__context, __obj, *args, **kwargs), operands, size)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None or value.__name__ in REMOVED_METHODS:
            return None
        text = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            return follow_format(text, _Formatter(self).vformat(text, args, kwargs), args, kwargs)

        return formatted


class _Formatter(SandboxedFormatter):
    """A formatter that counts the steps of each field, width included, before writing it."""

    def format_field(self, value: Any, format_spec: str) -> str:
        spend(size(value) + sum(map(int, NUMBER.findall(format_spec))))
        return super().format_field(value, format_spec)


class GenerationTag(Extension):
    """The tag `{% generation %}` ... `{% endgeneration %}`, as in transformers: the text between is generated by the
    model.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> Traced:
        text = caller()
        return Traced(text, ((count, replace(origin, generated=True)) for count, origin in runs_of(text)))


class _Counted(NodeTransformer):
    """An AST transformer that counts operations which Jinja compiles to plain Python, and marks the origin of literals.
    """

    def __init__(self, environment: BoundedEnvironment):
        self._environment = environment

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        node = self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = self._through(node.iter, TURNS)
            case nodes.Compare() | nodes.Operand():
                node.expr = self._through(node.expr, READ)
            case nodes.TemplateData(data=text) | nodes.Const(value=str(text)):
                return self._literal(text, node.lineno)
            case nodes.Concat():
                return self._through(nodes.List(node.nodes, lineno=node.lineno), "join")
            case nodes.Getitem(arg=nodes.Slice()):
                node.node = self._through(node.node, SLICED)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return self._through(node, READ)
        return node

    def _through(self, node: Any, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self._environment)

    def _literal(self, text: str, line: int) -> nodes.Expr:
        """Return a node for a literal text. It is not a filter: `map` could turn message text into a literal with one.
        """
        self._environment.literals.append(Traced(text, TEMPLATE))
        number = nodes.Const(len(self._environment.literals) - 1)
        return nodes.Getitem(nodes.EnvironmentAttribute("literals"), number, "load", lineno=line)


def _bounded(name: str, function: Callable[..., Any], measure: Callable[[Any], int]) -> Callable[..., Any]:
    """Wrap a filter or test so that it counts the values it reads and creates."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        operands = [each for each in (*args, *kwargs.values()) if not isinstance(each, PASSED)]
        spend(STEPS_PER_TURN + sum(map(measure, operands)) + growth(name, operands))
        return _made(function(*args, **kwargs), operands, measure)

    return counted


def _made(value: Any, operands: Any, measure: Callable[[Any], int]) -> Any:
    """Count the result of an operation and return it, with the origin of its operands if it has none."""
    if isinstance(value, GeneratorType):
        return turns(value)
    spend(measure(value))
    return follow(value, operands)


def _read(value: Any) -> Any:
    spend(size(value))
    return value


def _sliced(value: Any) -> Any:
    spend(length(value))
    return value


@jinja2.pass_context
def _written(context: Context, value: Any) -> Traced:
    spend(size(value))
    return _text(value)


def _text(value: Any) -> Traced:
    text = str(value)
    return text if isinstance(text, Traced) else Traced(text, origin_of([value]))


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None) -> Traced:
    """Join as Jinja's filter does."""
    items = list(_items(environment, value, attribute))
    spend(size(items) + len(items) * length(d))
    return (d if isinstance(d, Traced) else Traced(str(d), TEMPLATE)).join(map(_text, items))


@jinja2.pass_environment
def _sum(environment: BoundedEnvironment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Add as Jinja's filter does; each sum of lists is counted."""
    return reduce(partial(environment.call_binop, None, "+"), _items(environment, iterable, attribute), start)


def _items(environment: jinja2.Environment, items: Iterable[Any], attribute: str | int | None) -> Iterable[Any]:
    return items if attribute is None else map(make_attrgetter(environment, attribute), items)
