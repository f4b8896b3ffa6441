"""Laws of the rule language: what it reads, what it decides, and what it refuses."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.experiment.rule import FigureRule

NAMES = ("kl", "copying", "bytes_ratio", "decode_time_ratio")
numbers = st.floats(-1e6, 1e6).map(lambda value: float(f"{value:.6g}"))
comparisons = st.builds("{} {} {:.6g}".format, st.sampled_from(NAMES), st.sampled_from(["<=", "<", ">=", ">"]), numbers)
rules = st.recursive(
    comparisons,
    lambda inner: st.builds(
        lambda word, parts: f" {word} ".join(f"({part})" for part in parts),
        st.sampled_from(["and", "or"]),
        st.lists(inner, min_size=2, max_size=3),
    ),
    max_leaves=6,
)
figures = st.fixed_dictionaries(dict.fromkeys(NAMES, numbers))
ORDER = ("refuted", "holds-with-limits", "holds")


@given(rules, figures)
def test_holds_exactly_where_python_says_so(text: str, found: dict[str, float]) -> None:
    """Python's own meaning of `and` and `or` is the specification of `holds`."""
    held = eval(text, {"__builtins__": {}}, found)  # made here, of names and numbers alone
    assert (FigureRule.parse(text, NAMES).outcome(found) == "holds") == held


@given(st.lists(st.lists(comparisons, min_size=1, max_size=2), min_size=2, max_size=5), figures)
def test_limits_are_where_some_parts_hold(alternatives: list[list[str]], found: dict[str, float]) -> None:
    """The settings fix `bytes_ratio`, which alone is no evidence for a claim."""
    parts = [f"({' or '.join(each)})" for each in alternatives]
    held = [FigureRule.parse(part, NAMES).outcome(found) == "holds" for part in parts]
    every = [each for part in alternatives for each in part if not each.startswith("bytes_ratio")]
    evidence = any(FigureRule.parse(each, NAMES).outcome(found) == "holds" for each in every)
    outcome = FigureRule.parse(" and ".join(parts), NAMES).outcome(found)
    assert outcome == ("holds" if all(held) else "holds-with-limits" if evidence else "refuted")
    best = FigureRule.parse(" or ".join(parts), NAMES).outcome(found)
    assert best == ("holds" if any(held) else "refuted")


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("kl <= 1 and bytes_ratio <= 0.5", "refuted"),
        ("kl <= 1 and (copying >= 2 or bytes_ratio <= 0.5)", "refuted"),
        ("kl <= 1 and (copying >= 0.5 or bytes_ratio <= 0.5)", "holds-with-limits"),
        ("kl <= 3 and bytes_ratio <= 0.1", "holds-with-limits"),
        ("bytes_ratio <= 0.5", "holds"),
        ("bytes_ratio <= 0.5 or kl <= 1", "holds"),
    ],
)
def test_what_the_settings_fix_limits_a_claim_and_holds_none_in_part(text: str, outcome: str) -> None:
    found = {"kl": 2.0, "copying": 1.0, "bytes_ratio": 0.25}
    assert FigureRule.parse(text, NAMES).outcome(found) == outcome


@given(rules, rules, figures)
def test_what_follows_else_limits_a_claim_that_does_not_hold(one: str, other: str, found: dict[str, float]) -> None:
    """Without `else` a rule limits itself; `else refuted` never does."""
    holds, limits = (FigureRule.parse(text).outcome(found) == "holds" for text in (one, other))
    outcome = FigureRule.parse(f"{one} else {other}", NAMES).outcome(found)
    assert outcome == ("holds" if holds else "holds-with-limits" if limits else "refuted")
    assert FigureRule.parse(f"{one} else refuted").outcome(found) == ("holds" if holds else "refuted")


@given(st.sampled_from(["same_bits", "int8.kl_mean"]), st.sampled_from([0, 1, 0.5, 2]))
def test_a_figure_alone_is_true_from_one_on(name: str, value: float) -> None:
    rule = FigureRule.parse(name, [name])
    assert rule.figures == (name,) and (rule.outcome({name: value}) == "holds") == (value >= 1)


@given(rules, rules, figures)
def test_another_alternative_never_lowers_an_outcome(one: str, other: str, found: dict[str, float]) -> None:
    alone = FigureRule.parse(one, NAMES).outcome(found)
    both = FigureRule.parse(f"({one}) or ({other})", NAMES).outcome(found)
    assert ORDER.index(both) >= ORDER.index(alone)


@given(rules, figures)
def test_a_rule_reads_itself_back(text: str, found: dict[str, float]) -> None:
    rule = FigureRule.parse(text, NAMES)
    again = FigureRule.parse(str(rule.part), NAMES)
    assert again.outcome(found) == rule.outcome(found) and set(again.figures) == set(rule.figures)


@given(rules, figures, st.sampled_from([None, float("nan"), float("inf")]))
def test_a_missing_figure_leaves_it_untested(text: str, found: dict[str, float], gone: float | None) -> None:
    rule = FigureRule.parse(text, NAMES)
    for name in NAMES:
        outcome = rule.outcome({**found, name: gone})
        assert (outcome == "not-testable-here") == (name in rule.figures)
        if name in rule.figures:
            assert name in rule.reason({**found, name: gone})


@given(numbers, numbers, numbers)
def test_a_chain_is_one_condition_and_sides_may_be_exchanged(low: float, high: float, value: float) -> None:
    """Beside another condition that fails, it limits a claim where the whole chain holds: one side holds anywhere."""
    chain = FigureRule.parse(f"{low:.6g} <= kl < {high:.6g}", NAMES)
    same = FigureRule.parse(f"kl >= {low:.6g} and {high:.6g} > kl else refuted", NAMES)
    assert chain.figures == same.figures and chain.outcome({"kl": value}) == same.outcome({"kl": value})
    more = FigureRule.parse(f"{chain.text} and copying > 1", NAMES).outcome({"kl": value, "copying": 0})
    assert more == ("holds-with-limits" if low <= value < high else "refuted")


def test_nothing_of_a_rule_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> None:
        raise AssertionError("evaluated")

    parsed = ast.parse
    monkeypatch.setattr("builtins.eval", never)
    monkeypatch.setattr("builtins.exec", never)
    monkeypatch.setattr(ast, "parse", lambda text, mode: parsed(text, mode=mode))
    assert FigureRule.parse("kl <= 1 and copying >= 2", NAMES).outcome({"kl": 1, "copying": 1}) == "holds-with-limits"


def test_the_reason_names_the_figures() -> None:
    rule = FigureRule.parse("kl <= 0.02 and copying >= 0.9", NAMES)
    assert rule.reason({"kl": 0.0104, "copying": 0.5}) == "kl 0.0104, <= 0.02; copying 0.5, not >= 0.9"
