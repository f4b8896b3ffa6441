"""`check_sampler` passes every part of ours and, for every law, catches one that breaks it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.refusals import refuses
from tests.sampling import parts
from workbench.sampling.filters import (
    FrequencyPenalty,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from workbench.sampling.samplers import Greedy, RandomSampler
from workbench.testing import check_sampler

OURS = [
    Greedy(), RandomSampler(), Temperature(0.3), Temperature(1e-30), TopK(3), TopP(0.9), TopP(0.01), MinP(0.1),
    MinP(1.0), RepetitionPenalty(1.3), FrequencyPenalty(0.5), PresencePenalty(-0.5), LogitBias(((3, -4.0),)),
]  # fmt: skip


@pytest.mark.parametrize("part", OURS, ids=repr)
def test_our_own_parts_pass(part):
    check_sampler(part, examples=15).raise_if_failed()


@pytest.mark.parametrize("vocab", [2, 61])
def test_small_and_odd_vocabularies(vocab):
    for part in (RandomSampler, TopP(0.9), parts.Alternating, "tests.sampling.parts:halve"):
        check_sampler(part, vocab=vocab, examples=15).raise_if_failed()


@pytest.mark.parametrize(
    ("part", "law", "detail"),
    [
        (parts.Raises, "never raises", "raised KeyError"),
        (parts.OtherType, "shape and type", "torch.float64 for torch.float32"),
        (parts.OtherShape, "shape and type", "returned shape (1, 63) for (1, 64)"),
        (parts.InPlace, "leaves its input as it was", "in place"),
        (parts.RemovesAll, "leaves at least one token", "removed every token"),
        (parts.GivesNaN, "neither NaN", "returned NaN"),
        (parts.Resurrects, "brings no removed token back", "brought removed tokens"),
        (parts.Remembers, "remembers nothing", "after seeing other requests' rows"),
        (parts.LooksAside, "whatever its neighbours", "another answer in a batch with"),
        (parts.SamplerRaises, "never raises", "raised KeyError"),
        (parts.TakesRemoved, "only tokens that are left", "removed"),
        (parts.TakesUnknown, "only tokens that are left", "which is no token"),
        (parts.OwnChance, "same seed and position", ""),
        (parts.StateInside, "untouched by other requests", "keep what must be remembered in the state"),
        (parts.ChangesState, "a function of row, number and state", "changed the state it was given"),
        (parts.SamplerInPlace, "leaves its input as it was", "in place"),
        (42, "is a filter or a sampler", "neither choose() nor __call__()"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_part_that_breaks_a_law_is_caught_by_that_law(part, law, detail):
    report = check_sampler(part, examples=25)
    assert not report.passed
    broken = [found for found in report.laws if law in found.law]
    assert len(broken) == 1 and not broken[0].ok and detail in broken[0].detail
    assert f"BROKEN  {broken[0].law}" in str(report)
    with pytest.raises(AssertionError, match="laws hold"):
        report.raise_if_failed()


def test_the_report_is_words_and_the_same_each_time():
    first, again = (check_sampler("tests.sampling.parts:Resurrects", examples=15) for _ in range(2))
    assert str(first) == str(again)
    assert str(first).startswith("filter tests.sampling.parts:Resurrects: 5 of 6 laws hold\n")


def test_what_cannot_be_built_is_the_users_mistake():
    refuses("LogitBias: could not be built with no arguments", check_sampler, LogitBias)
    assert check_sampler(LogitBias, arguments={"biases": ((1, 2.0),)}, examples=5).passed


def test_naming_the_package_does_not_load_hypothesis():
    code = "import sys, workbench.testing; assert 'hypothesis' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
