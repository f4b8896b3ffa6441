"""Texts and questions of the evidence: halves that never change, sources that are checked, and scores with a floor."""

from __future__ import annotations

import bz2
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.measure.quality import needles as needles_module
from workbench.measure.quality.choices import FLOOR, with_choices
from workbench.measure.quality.corpora import CORPORA, articles, half_of, read_corpus
from workbench.measure.quality.intervals import difference_over_texts
from workbench.measure.quality.needles import NeedleSettings, make_haystacks, measure_needles, needle_summary
from workbench.measure.quality.teacher_forcing import ForcedText, TokenDivergences, append_divergences
from workbench.prompt.tokenization.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(BUNDLED_MODELS["demo"])
assert TOKENIZER is not None
PARAGRAPHS = "\n\n".join(f"paragraph {number} about value and index and the other name of it" for number in range(400))


def test_halves_share_no_text_and_never_change() -> None:
    shape, verdict = (read_corpus(name)[0] for name in ("code-shape", "code-verdict"))
    assert shape and verdict and not shape.keys() & verdict.keys()
    for half, texts in (("shape", shape), ("verdict", verdict)):
        assert {half_of(name) for name in texts} == {half}
    # verdicts were drawn from these: another hash would mix them with the texts that rules were shaped on
    halves = {"shape": ("Anarchism", "Autism", "Ampere"), "verdict": ("A", "Aristotle", "Algorithm")}
    assert all(half_of(name) == half for half, names in halves.items() for name in names)


def test_other_texts_or_no_package_are_one_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "other_texts"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "text.py").write_text("of another version")
    monkeypatch.syspath_prepend(tmp_path)
    other = replace(CORPORA["code"], package="other_texts", pattern="*.py")
    monkeypatch.setitem(CORPORA, "code", other)
    refuses(r"other_texts holds other texts \(sha256 .*pip install other_texts==", read_corpus, "code-shape")
    monkeypatch.setitem(CORPORA, "code", replace(other, package="no_such_texts"))
    refuses("no_such_texts is not installed; pip install no_such_texts==", read_corpus, "code-shape")


def test_an_article_is_its_prose() -> None:
    kept = "The [[old town|town]] {{of {{two}} templates}}is '''old'''<ref>says [[who]]</ref>." + " It is." * 40
    page = f"<title>Town</title><ns>0</ns><text>{{|\n| a table\n|}}\n== Heading ==\n{kept}\n* a list\n</text>"
    (text,) = articles({"dump": bz2.compress(page.encode())}).values()
    assert text == "The town is old." + " It is." * 40


def answered(texts: list[ForcedText], score) -> float:
    """Return the share of right choices of a model whose logits of token i are `score(text, i)`, of [vocab]."""
    places = TokenDivergences()
    for number, text in enumerate(texts):
        for place in range(text.first_scored, len(text.ids)):
            row, ids = score(text, place)[None], torch.tensor([text.ids[place]])
            append_divergences(places, number, place, row, row, ids, text.rivals)
    return places.summary(1)["choices_right"]


def test_choices_reward_the_place_and_nothing_else() -> None:
    assert TOKENIZER is not None
    draw = random.Random(0)
    words = ["value", "index", "name", "other", "item", "line", "node", "self", "type", "data"]
    texts = [" ".join(draw.choices(words, weights=range(1, 11), k=300)) for _ in range(12)]
    forced = [ForcedText(tuple(ids), 8, len(ids) - 1) for ids in map(TOKENIZER.encode, texts)]
    asked = with_choices(TOKENIZER, forced, 60, seed=0)
    assert asked == with_choices(TOKENIZER, forced, 60, seed=0) != with_choices(TOKENIZER, forced, 60, seed=1)
    count = sum(len(text.rivals) for text in asked)
    assert count > 400 and all(text.ids[place] not in wrong for text in asked for place, wrong in text.rivals.items())
    vocab = 1 + max(max(text.ids) for text in asked)
    assert answered(asked, lambda text, place: torch.eye(vocab)[text.ids[place]]) == 1
    frequency = torch.bincount(torch.tensor([token for text in asked for token in text.ids]), minlength=vocab).float()
    frequency += torch.rand(vocab, generator=torch.Generator().manual_seed(0)) / 2  # no ties
    constant = answered(asked, lambda text, place: frequency)
    assert abs(constant - FLOOR) < 4 * math.sqrt(FLOOR * (1 - FLOOR) / count)


def test_needles_reward_reading_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOKENIZER is not None
    settings = NeedleSettings(texts=3, each=5)
    pairs = make_haystacks(TOKENIZER, {"a": PARAGRAPHS}, settings, 900, seed=0)
    assert pairs == make_haystacks(TOKENIZER, {"a": PARAGRAPHS}, settings, 900, seed=0)
    planted, plain = ([pair[side] for pair in pairs] for side in (0, 1))
    assert all(len(each.text.ids) <= 900 for each in planted)

    def read(runner, texts: list[ForcedText]) -> list[list[tuple[float, bool]]]:
        """Score like a model that finds an answer if it stands in the text."""
        scores = []
        for each, text in zip(planted if texts[0] is planted[0].text else plain, texts, strict=True):
            body = TOKENIZER.decode(text.ids[: text.first_scored])  # type: ignore[union-attr]
            likely = [False] * (len(text.ids) - text.first_scored)
            for needle, answer in zip(each.needles, each.answers, strict=True):
                tokens = text.ids[text.first_scored :][answer]
                assert TOKENIZER.decode(tokens).strip() == needle.answer  # type: ignore[union-attr]
                likely[answer] = [needle.answer in body] * len(tokens)
            scores.append([(0.0, each) for each in likely])
        return scores

    monkeypatch.setattr(needles_module, "score_tokens", read)
    rows, floor = (measure_needles(None, side) for side in (planted, plain))  # type: ignore[arg-type]
    found = needle_summary(rows, floor)
    assert found["needle_questions"] == 15
    assert found["needles_right"] == 1 and found["needles_floor"] == 0
    assert found["needles"]["depth"] == {str(depth): 1 for depth in (0.0, 0.25, 0.5, 0.75, 1.0)}
    assert found["needles"]["kind"] == {"name": 1, "number": 1, "sentence": 1}
    for each in planted:
        body = TOKENIZER.decode(each.text.ids[: each.text.first_scored])
        places = [body.index(needle.fact) for needle in each.needles]
        assert places == sorted(places)
    refuses("paragraphs fit between", make_haystacks, TOKENIZER, {"a": "short"}, settings, 900, 0)


VALUES = st.lists(st.tuples(st.integers(0, 5), st.floats(-10, 10), st.floats(0.5, 2)), min_size=2, max_size=40)


@given(VALUES)
def test_a_difference_and_its_opposite_have_the_same_interval(values: list[tuple[int, float, float]]) -> None:
    texts, differences, weights = zip(*values, strict=True)
    found = difference_over_texts(texts, differences, weights)
    opposite = difference_over_texts(texts, [-each for each in differences], weights)
    assert found["mean"] == pytest.approx(sum(differences) / sum(weights)) == pytest.approx(-opposite["mean"])
    if "low" in found:
        assert (found["low"], found["high"]) == pytest.approx((-opposite["high"], -opposite["low"]), abs=1e-9)
        assert found["detectable"] == pytest.approx(opposite["detectable"], abs=1e-9)
    assert ("low" in found) == (len(set(texts)) > 1)


def test_an_interval_covers_and_shrinks_with_the_texts() -> None:
    draw, covered, detectable = random.Random(0), {25: 0, 100: 0}, {25: 0.0, 100: 0.0}
    for _ in range(100):
        for n in covered:
            found = difference_over_texts(range(n), [draw.gauss(1, 1) for _ in range(n)], [1.0] * n)
            covered[n] += found["low"] <= 1 <= found["high"]
            detectable[n] += found["detectable"] / 100
    assert min(covered.values()) >= 88  # of 100, where 95 are expected
    assert detectable[25] / detectable[100] == pytest.approx(2, rel=0.1)
    assert detectable[100] == pytest.approx(2.8 / 10, rel=0.1)
