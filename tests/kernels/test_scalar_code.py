"""Traced functions: what a program gives is what the function gives, on tensors, lowered, as MLIR and as Triton; and
bounds over intervals never hide a key that the function shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels.attention_rules import MASK_INPUTS as MASK_INPUTS_OF_HEADS
from compiled_kernels.attention_rules import SCORE_INPUTS, known_rules, rules_of
from compiled_kernels.builder.functions import function, loop, text_of
from compiled_kernels.builder.target import Named, Target
from compiled_kernels.builder.values import counted
from compiled_kernels.masks import ALiBi, AndMask, Causal, ChainedScore, Chunked, ScoreTemperature, SlidingWindow
from compiled_kernels.mlir import compile_text
from compiled_kernels.mlir.invoke import BoundCall
from compiled_kernels.scalar_code.intervals import ranges, reach
from compiled_kernels.scalar_code.lower import lowered
from compiled_kernels.scalar_code.mlir import scalar_code
from compiled_kernels.scalar_code.program import Builder, Program
from compiled_kernels.scalar_code.trace import Untraceable, trace
from tests.helpers.kernels import needs_mlir
from tests.helpers.refusals import kernel_refuses
from tests.thorough import THOROUGH, tries

MASK_INPUTS = MASK_INPUTS_OF_HEADS[:2]  # (query, key)
POSITIONS = 96
QUERIES, KEYS = torch.arange(POSITIONS)[:, None], torch.arange(POSITIONS)[None]


@dataclass(frozen=True)
class Drawn:
    """A drawn function of (query, key), and how it is written."""

    call: Callable[[Tensor, Tensor], Any]
    text: str

    def __call__(self, query: Tensor, key: Tensor) -> Any:
        return self.call(query, key)

    def __repr__(self) -> str:
        return self.text


def joined(symbol: str, function: Callable[..., Any], *parts: Drawn) -> Drawn:
    return Drawn(lambda q, k: function(*(part(q, k) for part in parts)), f"{symbol}({', '.join(map(repr, parts))})")


def constant(number: int) -> Drawn:
    return Drawn(lambda q, k: number, str(number))


INPUTS = st.sampled_from([Drawn(lambda q, k: q, "query"), Drawn(lambda q, k: k, "key")])
SMALL = st.integers(-9, 70).map(constant)
DIVISORS = st.sampled_from([-5, -1, 1, 2, 3, 16, 64]).map(constant)
TABLE = torch.tensor([3, -1, 4, 1, -5, 9])


def steps(functions: dict[str, Callable[..., Any]], *operands: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    """Draw one of the functions, of drawn operands."""
    names = st.sampled_from([*functions])
    return st.builds(lambda name, *parts: joined(name, functions[name], *parts), names, *operands)


def integers(of: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    """Draw a step of integers; the first operand depends on a position."""
    both = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "min": lambda a, b: torch.minimum(a, a * 0 + b)}
    by = {"//": lambda a, b: a // b, "%": lambda a, b: a % b, "fmod": lambda a, b: torch.fmod(a, b),
          "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "*": lambda a, b: a * b}  # fmt: skip
    bits = {"^": lambda a, b: a ^ b, "&": lambda a, b: a & b, "|": lambda a, b: a | b}
    one = {"abs": torch.abs, "neg": torch.neg, "table": lambda each: TABLE[each % 6]}
    where = {"where": lambda x, y, z: torch.where(x > y, y, z)}
    return steps(both, of, of | SMALL) | steps(by, of, DIVISORS) | steps(bits, of, of) | steps(one, of) | steps(
        where, of, of, of
    )  # fmt: skip


NUMBERS = st.recursive(INPUTS, integers, max_leaves=5)
COMPARED = {"<": torch.lt, "<=": torch.le, ">": torch.gt, "==": torch.eq, "!=": torch.ne}
FLOATS = {"log": lambda a: torch.log1p(a.abs().float()) < 2.5, "share": lambda a: a / 7 < 3.2,
          "power": lambda a: torch.exp2(-a.float() / 8) > 0.3, "sqrt": lambda a: a.float().sqrt() < 6.1,
          "log2": lambda a: a.float().log2() < 3.3, "no log": lambda a: ~(torch.log(a.float()) > -5),
          "1/a": lambda a: 1 / a.float() < 0.045, "7/(a-20)": lambda a: 7 / (a - 20) >= 0.3,
          "root": lambda a: a.float() ** 0.3 < 2.9, "cube": lambda a: a.float() ** 3 < 700.0,
          "a^-1": lambda a: a.float() ** -1 < 0.045, "a^9": lambda a: (a.float() / 9) ** 9 < 3000.0,
          "a^-10": lambda a: (a.float() / 9) ** -10 > 0.3}  # fmt: skip
# Of infinity, NaN, integers that wrap round and divisors that may be 0.
NANS = torch.tensor([1.0, torch.nan, 2.0])
UNUSUAL = {"a/inf": lambda a: ~(torch.exp(a.float()) / torch.inf >= 0), "0*inf": lambda a: ~(a.float() * torch.inf < 1),
           "inf-inf": lambda a: ~(torch.exp(a.float()) - torch.exp(a.float() + 1) <= 0),
           "inf%3": lambda a: ~(torch.exp(a.float()) % 3 >= 0), "table": lambda a: ~(NANS[a % 3] > 0),
           "<<": lambda a: (a << 3) < 100, "wraps": lambda a: (a << 59) >= 0, "wraps*": lambda a: a * 2**58 > 5,
           "//0": lambda a: 64 // torch.where(a == 0, 1, a) > 2,
           "int": lambda a: torch.exp(a.clamp(-30, 20).float()).int() < 9}  # fmt: skip


def truths(of: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    both = {"&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
            "or": torch.logical_or, "same": torch.eq}  # fmt: skip
    return steps(both, of, of) | steps({"~": lambda each: ~each}, of) | steps({"where": torch.where}, of, of, of)


LEAVES = steps(COMPARED, NUMBERS, NUMBERS | SMALL) | steps(FLOATS, NUMBERS)
MASKS = st.recursive(LEAVES, truths, max_leaves=4)
ODD_MASKS = st.recursive(LEAVES | steps(UNUSUAL, NUMBERS), truths, max_leaves=3)


@given(MASKS)
def test_a_program_gives_what_the_function_gives(mask: Drawn) -> None:
    program = trace(mask, MASK_INPUTS, "bool")
    wanted = mask(QUERIES, KEYS).expand(POSITIONS, POSITIONS)
    assert Program.parse(program.text) == program
    assert torch.equal(program(query=QUERIES, key=KEYS).expand_as(wanted), wanted)
    assert torch.equal(lowered(program)[0](query=QUERIES, key=KEYS).expand_as(wanted), wanted)


@given(MASKS | ODD_MASKS, st.integers(1, 40), st.integers(1, 40))
def test_bounds_hide_nothing_that_is_shown(mask: Drawn, rows: int, columns: int) -> None:
    program = trace(mask, MASK_INPUTS, "bool")
    wanted, may = mask(QUERIES, KEYS).expand(POSITIONS, POSITIONS), reach(program)
    assert lowered(may)[1] in (32, 64)
    for top in range(0, POSITIONS, rows):
        left = torch.arange(0, POSITIONS, columns)
        bottom, right = min(POSITIONS, top + rows) - 1, (left + columns).clamp(max=POSITIONS) - 1
        ends = {"query_low": torch.tensor(top), "query_high": torch.tensor(bottom), "key_low": left, "key_high": right}
        found = may(**ends).expand(len(left))
        for at, (begin, end) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
            assert found[at] or not wanted[top : bottom + 1, begin : end + 1].any()


@given(NUMBERS)
def test_integers_stay_within_their_ranges(number: Drawn) -> None:
    program = trace(joined("<", torch.lt, number, constant(0)), MASK_INPUTS, "bool")
    values = program.values({"query": QUERIES, "key": KEYS})
    for at, (value, span) in enumerate(zip(values, ranges(program), strict=True)):
        if span is not None:
            assert program.kind(at) == "int" and span[0] <= int(value.min()) and int(value.max()) <= span[1]


@needs_mlir
@settings(max_examples=tries(60), derandomize=not THOROUGH)  # each is compiled: the next run finds the same
@given(MASKS)
def test_mlir_gives_what_the_function_gives(mask: Drawn) -> None:
    program = trace(mask, MASK_INPUTS, "bool")
    wanted = mask(QUERIES, KEYS).expand(POSITIONS, POSITIONS)
    assert torch.equal(by_mlir(program, 0), wanted)
    assert torch.equal(by_mlir(program, 8), wanted)


def by_mlir(program: Program, lanes: int) -> Tensor:
    """Compute a mask by one compiled function, number by number or in vectors."""
    step = max(1, lanes)

    def emit() -> None:
        arguments = [Named("out", f"memref<{POSITIONS}x{POSITIONS}xi32>")]
        with (
            function("mask", arguments, private=False) as given,
            loop(0, POSITIONS) as query,
            loop(0, POSITIONS, step) as key,
        ):
            keys = key.index.broadcast(lanes) + counted(lanes) if lanes else key.index
            seen = scalar_code(program, {"query": query.index, "key": keys}, lanes).to("i32", signed=False)
            if lanes:
                given["out"].store(seen, query.index, key.index)
            else:
                given["out"][query.index, key.index] = seen

    text = text_of(emit)
    out = torch.full((POSITIONS, POSITIONS), 7, dtype=torch.int32)
    kernel = compile_text(text, "mask", level=Target.current().level)
    BoundCall(kernel.address, (out,))()
    return out == 1


SCORES = (
    ALiBi(6), ScoreTemperature(0.1, 16), ChainedScore(ScoreTemperature(0.1, 16), ALiBi(4)),
    lambda score, head, query, key: torch.sigmoid(score) * TABLE.float()[head % 6] - torch.tanh(score) ** 2,
    lambda score, head, query, key: torch.nn.functional.softplus(score).clamp(0.1, 3) + torch.relu(score).sqrt(),
    lambda score, head, query, key: torch.where((head == 1) | (query - key < 4), score, -torch.inf),
)  # fmt: skip


@pytest.mark.parametrize("score", SCORES)
def test_a_score_function_gives_what_it_gives_untraced(score: Any) -> None:
    program = trace(score, SCORE_INPUTS, "float")
    given_ = torch.randn(4, 1, 1), torch.arange(4)[:, None, None], QUERIES, KEYS
    wanted = score(*given_)
    found = program(**dict(zip(("score", "head", "query", "key"), given_, strict=True)))
    torch.testing.assert_close(found, wanted.expand_as(found), rtol=1e-6, atol=1e-6)


def decides(query: Tensor, key: Tensor) -> Tensor:
    if key > 3:
        return key < query
    return key <= query


def sums(query: Tensor, key: Tensor) -> Tensor:
    seen = key < query
    return torch.cumsum(seen, 0) > 0


def in_float64(query: Tensor, key: Tensor) -> Tensor:
    return key.double() < 3


def a_number(query: Tensor, key: Tensor) -> Tensor:
    return query - key


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (decides, r"decides cannot be traced: test_scalar_code.py:\d+ `if key > 3:`: it takes a decision in Python"),
        (sums, r"sums cannot be traced: test_scalar_code.py:\d+ `return torch.cumsum\(seen, 0\) > 0`: cumsum has no"),
        (in_float64, r"test_scalar_code.py:\d+ `return key.double\(\) < 3`: numbers of float64"),
        (a_number, "a_number gives int numbers, must give bool"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_its_line(mask: Any, words: str) -> None:
    with pytest.raises(Untraceable, match=words):
        trace(mask, MASK_INPUTS, "bool")
    kernel_refuses(words, lambda: rules_of(AndMask(Causal(), mask), None, "paged_attention", "mlir"))
    assert known_rules(AndMask(Causal(), mask), None) is None


def test_rules_are_a_window_and_what_else_there_is() -> None:
    plain = rules_of(AndMask(SlidingWindow(64, 4), Chunked(16)), ALiBi(4), "", "")
    assert plain[:2] == (64, 4) and plain.mask and plain.score
    assert rules_of(SlidingWindow(5), None, "", "") == (5, 0, "", "", True)
    nested = rules_of(AndMask(AndMask(SlidingWindow(9), Chunked(16)), Chunked(4)), None, "", "")
    wanted = SlidingWindow(9)(QUERIES, KEYS) & Chunked(4)(QUERIES, KEYS)
    assert nested.sliding_window == 9 and torch.equal(nested.as_mask(2)(QUERIES, KEYS), wanted)
    kernel_refuses("may show the future", lambda: rules_of(lambda query, key: key <= query + 1, None, "", ""))


def of_distance(name: str, shift: int = 0) -> Drawn:
    return Drawn(lambda query, key: {**FLOATS, **UNUSUAL}[name](query - key - shift), name)


@pytest.mark.parametrize("name", [*FLOATS, *UNUSUAL])
@pytest.mark.parametrize("shift", [0, 40])
def test_bounds_know_where_a_function_has_no_value(name: str, shift: int) -> None:
    """Of every page and tile: negative, zero, infinite and what wraps round."""
    mask = of_distance(name, shift)
    wanted, may = mask(QUERIES, KEYS), reach(trace(mask, MASK_INPUTS, "bool"))
    for rows, columns in ((1, 1), (1, 16), (8, 32)):
        top, left = torch.arange(0, POSITIONS, rows)[:, None], torch.arange(0, POSITIONS, columns)
        ends = {"query_low": top, "query_high": top + rows - 1, "key_low": left, "key_high": left + columns - 1}
        shown = wanted.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).any(-1).any(1)
        assert not (shown & ~may(**ends)).any()


@pytest.mark.parametrize("name", ["sqrt", "log2", "root", "<<"])
def test_bounds_still_hide_where_the_function_has_values(name: str) -> None:
    far = {"query_low": 900, "query_high": 901, "key_low": 0, "key_high": 63}
    may = reach(trace(of_distance(name), MASK_INPUTS, "bool"))
    assert not may(**{end: torch.tensor(at) for end, at in far.items()})


def test_nothing_divides_by_zero() -> None:
    """A division by zero would end the process, and numbers beyond a context may be any."""
    builder = Builder(MASK_INPUTS)
    share = builder.add("floordiv", 1, builder.add("sub", 0, builder.constant(5)))
    program, _ = lowered(builder.program(builder.add("eq", share, builder.constant(1))))
    assert program(query=torch.tensor(5), key=torch.tensor(7)).item() is False
