"""Generated code with an identifier to copy: where it stands, and what models that can copy, or cannot, get for it."""

from __future__ import annotations

import math

import pytest

from workbench.engine.load import load
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.measure.quality import copying as copying_module
from workbench.measure.quality.copying import generate_snippets, mean_by_depth, measure_copying
from workbench.prompt.tokenization.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(BUNDLED_MODELS["demo"])
assert TOKENIZER is not None
DEPTHS = (0.0, 0.5, 1.0)
SNIPPETS = generate_snippets(TOKENIZER, 3, 400, DEPTHS, seed=0)


def test_the_name_stands_at_its_distance_and_at_the_end() -> None:
    assert TOKENIZER is not None
    assert len(SNIPPETS) == 3 * (1 + len(DEPTHS))
    for snippet in SNIPPETS:
        ids, first = snippet.text.ids, snippet.text.first_scored
        name = ids[first:]
        assert len(ids) <= 400 and len(name) > 2
        if snippet.distance is None:
            assert TOKENIZER.decode(name)[1:] not in TOKENIZER.decode(ids[:first])
        else:
            at = first - snippet.distance
            assert ids[at : at + len(name)] == name
            assert f"self{TOKENIZER.decode(name)} = 7\n" in TOKENIZER.decode(ids)
    distances = [each.distance for each in SNIPPETS if each.distance is not None and each.name == 0]
    assert distances == sorted(distances, reverse=True) and distances[0] > 300 and distances[-1] < 40


def test_the_text_reads_as_the_tokenizer_reads_it() -> None:
    assert TOKENIZER is not None
    for snippet in SNIPPETS:
        assert TOKENIZER.encode(TOKENIZER.decode(snippet.text.ids)) == list(snippet.text.ids)


def test_seeds_are_kept_and_differ() -> None:
    assert TOKENIZER is not None
    assert generate_snippets(TOKENIZER, 3, 400, DEPTHS, seed=0) == SNIPPETS
    assert generate_snippets(TOKENIZER, 3, 400, DEPTHS, seed=1) != SNIPPETS


def test_the_demo_model_copies_what_stands_near() -> None:
    rows = mean_by_depth(measure_copying(load("demo", backend="eager", dtype="float32"), SNIPPETS))
    assert rows[1.0]["gain"] > 1.0 and rows[1.0]["copied"] > 0.3
    assert rows[1.0]["distance"] < rows[0.5]["distance"] < rows[0.0]["distance"]


def test_a_model_that_cannot_look_back_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that depend on nothing: log-probability with and without the assignment is the same."""

    def blind(runner, texts) -> list[list[tuple[float, bool]]]:
        return [[(-math.log(4096), False)] * (len(text.ids) - text.first_scored) for text in texts]

    monkeypatch.setattr(copying_module, "score_tokens", blind)
    assert all(row["gain"] == pytest.approx(0.0) for row in measure_copying(None, SNIPPETS))  # type: ignore[arg-type]
