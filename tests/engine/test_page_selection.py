"""A choice of pages in a model: the oracle's text on every backend, with drafts, preemption and shared prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workbench
from compiled_kernels import backend_problems
from tests.engine.page_bounds import Bounds
from workbench.custom import temporarily_registered
from workbench.engine import naive
from workbench.errors import WorkbenchError

TEXT = (
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b, c):\n    return a + b + c\n\n\n"
    "def add(a, b, c, d):\n    return a"
)
TOKENS = 24


def text_of(backend: str, part: Any, **settings: Any) -> str:
    runner = workbench.load(
        "demo", attention={"pages": part}, backend=backend, dtype="float32", page_size=8, **settings
    )
    return "".join(event.text for event in runner.stream(TEXT, max_tokens=TOKENS, temperature=0))


@pytest.fixture(scope="module", params=[{}, {"first": 2, "keep": 1}], ids=str)
def expected(request: pytest.FixtureRequest) -> tuple[dict[str, int], str]:
    """Arguments of the part, and the oracle's greedy text, which differs from the plain model's."""
    arguments: dict[str, int] = request.param
    with temporarily_registered(Bounds) as path:
        part = {"path": path, "arguments": arguments}
        runner = workbench.load("demo", attention={"pages": part}, backend="eager", dtype="float32", page_size=8)
        tokenizer = runner.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(TEXT)
        for _ in range(TOKENS):
            ids.append(int(naive.logits(runner.model, torch.tensor(ids))[-1].argmax()))
        chosen = tokenizer.decode(ids)[len(TEXT) :]
    plain = workbench.load("demo", backend="eager", dtype="float32")
    assert chosen != "".join(event.text for event in plain.stream(TEXT, max_tokens=TOKENS, temperature=0))
    return arguments, chosen


@pytest.mark.parametrize(
    "settings", [{}, {"speculate": {"kind": "prompt_lookup"}}, {"max_num_batched_tokens": 11}], ids=str
)
@pytest.mark.parametrize("backend", ["eager", "mlir"])
def test_text_is_the_oracles(backend: str, settings: dict, expected: tuple[dict[str, int], str]) -> None:
    if reason := {str(name): problem for name, problem in backend_problems().items()}[backend]:
        pytest.skip(reason)
    arguments, chosen = expected
    with temporarily_registered(Bounds) as path:
        assert text_of(backend, {"path": path, "arguments": arguments}, **settings) == chosen


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_size": 16}, "cache.page_size 16: layer 0 chooses pages of 8 tokens; set cache.page_size to 8"),
        ({"cache": {"format": "int8", "page_size": 8, "quant_group": 8}}, "chooses pages by summaries of dense keys"),
        ({"cache": {"evict": {"kind": "window", "budget": 64}, "page_size": 8}}, "choice of pages"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_reason(settings: dict, words: str) -> None:
    with temporarily_registered(Bounds) as part, pytest.raises(WorkbenchError, match=words):
        workbench.load("demo", attention={"pages": part}, backend="eager", **settings)


def test_a_window_beside_a_choice_of_pages_is_refused() -> None:
    with temporarily_registered(Bounds) as part, pytest.raises(WorkbenchError, match="pages beside a sliding window"):
        workbench.load("demo", attention={"pages": part, "sliding_window": 64}, backend="eager", page_size=8)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"summaries": ("median",)}, r"\('median',\); name what is kept of a page's keys: one or more of min"),
        ({"summaries": "min"}, "summaries 'min'; name what is kept"),
        ({"keep": 0}, "keep 0; it is a whole number of 1 or more"),
        ({"summaries": ("min",)}, r"takes .*must take \(query, min\)"),
    ],
    ids=str,
)
def test_a_part_that_is_no_choice_is_refused(attributes: dict, words: str) -> None:
    wrong = type("Wrong", (Bounds,), attributes)
    if "keep" in attributes:
        wrong = type("Wrong", (), {**vars(Bounds), "keep": 0, "__init__": object.__init__})
    with temporarily_registered(wrong) as part, pytest.raises(WorkbenchError, match=words):
        workbench.load("demo", attention={"pages": part}, backend="eager", page_size=8)
