"""A choice of pages in a model: with drafts, chunks and shared prefixes, and what is refused. Its rows: tests/laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import workbench
from tests.engine.own_rules import Bounds
from tests.engine.tiny import Oracle, finals, layer, model_of, request, runner_of, spec_of
from workbench.custom import temporarily_registered
from workbench.errors import WorkbenchError
from workbench.request import CustomPart

SPEC = spec_of(layer(4, 2, pages=CustomPart(path=f"{Bounds.__module__}:Bounds", arguments={"keep": 1})), layer())


@pytest.mark.parametrize(
    "settings", [{"speculate": {"kind": "prompt_lookup"}}, {"max_num_batched_tokens": 11}, {"prefix": "radix"}], ids=str
)
def test_drafts_chunks_and_prefixes_change_no_tokens(settings: dict[str, Any]) -> None:
    """And the tokens are not those of a model that reads all pages."""
    asked = [request("a", 30, 14), request("b", 9, 14), replace(request("a", 30, 14), request_id="again")]
    runner = runner_of(model_of(SPEC), page_size=8, **settings)
    Oracle(runner)
    assert finals(runner, asked) != finals(runner_of(model_of(spec_of(layer(4, 2), layer())), page_size=8), asked)


@pytest.mark.parametrize(
    ("attributes", "settings", "words"),
    [
        ({}, {"page_size": 16}, "cache.page_size 16: layer 0 chooses pages of 8 tokens; set cache.page_size to 8"),
        ({}, {"cache": {"format": "int8", "quant_group": 8}}, "chooses pages by summaries of dense keys"),
        ({}, {"cache": {"evict": {"kind": "window", "budget": 64}}}, "choice of pages"),
        ({}, {"attention": {"sliding_window": 64}}, "pages with a sliding window"),
        ({"summaries": ("median",)}, {}, r"\('median',\); name summaries of a page's keys: one or more of min"),
        ({"summaries": "min"}, {}, "summaries 'min'; name summaries"),
        ({"keep": 0, "__init__": object.__init__}, {}, "keep 0; must be a whole number, 1 or more"),
        ({"summaries": ("min",)}, {}, r"takes .*must take \(query, min\)"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_reason(attributes: dict, settings: dict, words: str) -> None:
    wrong = type("Wrong", (), {**vars(Bounds), **attributes}) if "keep" in attributes else type(
        "Wrong", (Bounds,), attributes)  # fmt: skip
    with temporarily_registered(wrong) as part, pytest.raises(WorkbenchError, match=words):
        attention = {"pages": part, **settings.pop("attention", {})}
        workbench.load("demo", attention=attention, backend="eager", **{"page_size": 8, **settings})
