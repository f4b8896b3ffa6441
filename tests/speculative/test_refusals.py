"""Settings of speculation that are refused when loaded, parts that end their own requests, and what survives YAML."""

from __future__ import annotations

from typing import Any

import pytest

import workbench
from tests.helpers.refusals import refuses
from tests.speculative.parts import HERE
from workbench.engine.config import EngineConfig
from workbench.speculative.config import parse_speculation
from workbench.trace.events import Finished

TREE = {"path": HERE + "Twice", "tree": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculate": {"path": HERE + "Repeat", "arguments": {"tiems": 3}}}, "Repeat: could not be built with tiems=3"),
    ({"speculate": {"path": HERE + "Missing"}}, "has no 'Missing'"),
    ({"speculate": {"path": HERE + "NoProposer"}}, r"has no propose\(sequences, counts\)"),
    ({"speculate": {"path": HERE + "HERE"}}, "must be a class"),
    ({"speculate": {"path": HERE + "Unshown"}}, "needs both observed_top_k and observe"),
    ({"speculate": {"path": HERE + "Repeat", "arguments": {"observed_top_k": 5000}}}, "to the vocabulary's 4096"),
    ({"speculate": {"path": HERE + "Repeat", "num_speculative_tokens": 0}}, "num_speculative_tokens"),
    ({"speculate": {"path": HERE + "Repeat", "min_ngram": 2}}, "min_ngram"),
    ({"backend": "mlir"}, "backend 'mlir' cannot verify trees of drafts: .*backend eager supports trees"),
    ({"backend": "inductor"}, "backend 'inductor' cannot verify trees of drafts"),
    ({"cache": "int8"}, "trees of drafts: layer 0 has int8.*dense keys and values"),
    ({"cache": {"codec": "tests.engine.tiny:Halved"}}, "trees of drafts: layer 0 has"),
    ({"backend": "auto", "batch_invariant": True}, "trees of drafts"),
    ({"evict": {"kind": "window", "budget": 64}}, "not with cache.evict"),
    ({"speculate": {**TREE, "length": "adaptive"}}, "length adaptive counts tokens of a chain"),
    *(({"speculate": {"kind": "draft", **draft}}, words) for draft, words in (
        ({"model": "demo-draft", "layers": [0]}, "set model: target"),
        ({"model": "target", "layers": [0, 0]}, r"layers must ascend, each named once, not \[0, 0\]"),
        ({"model": "target", "layers": []}, "layers"),
        ({"model": "target", "layers": [0, 9]}, "layer 9 of .*, whose layers are 0 to 2"),
        ({"model": "target", "dtype": "float32"}, "leave dtype and backend out"),
        ({"confidence_threshold": 0.5, "stop": {"path": HERE + "never"}}, "leave one out"),
        ({"stop": {"path": HERE + "missing"}}, "has no 'missing'"),
        ({"stop": {"path": HERE + "one_argument"}}, r"must take \(probabilities, request_ids\)"),
    )),
]  # fmt: skip


def settings_of(more: dict[str, Any]) -> dict[str, Any]:
    return {"backend": "eager", "pages": 32, "speculate": TREE, **more}


@pytest.mark.parametrize(("more", "words"), REFUSED)
def test_what_cannot_speculate_is_refused_when_it_is_loaded(more: dict[str, Any], words: str) -> None:
    refuses(words, workbench.load, "demo-draft", **settings_of(more))


@pytest.mark.parametrize(
    ("speculate", "words"),
    [
        ({"path": HERE + "TooMany"}, "proposed 5 tokens, but at most 4 are allowed"),
        ({"path": HERE + "NoSuchToken"}, "proposed token 99999; the vocabulary has 4096 tokens"),
        ({"path": HERE + "OneShort"}, "returned 0 drafts for 1 sequences"),
        ({"path": HERE + "Breaks"}, "ValueError: no more"),
        ({**TREE, "path": HERE + "Cyclic"}, "parents (1, 0) of 2 tokens"),
        ({"path": HERE + "Twice"}, "set speculate.tree: true"),
        ({"kind": "draft", "model": "target", "stop": {"path": HERE + "wrong_shape"}}, "must be [row] of torch.bool"),
    ],
)
def test_what_errs_ends_its_requests_and_no_others(speculate: dict[str, Any], words: str) -> None:
    runner = workbench.load("demo-draft", **settings_of({"speculate": speculate}))
    ends = []
    for _ in range(2):
        ends += [e for e in runner.stream("import os\n", max_tokens=8, temperature=0) if isinstance(e, Finished)]
        runner.core.set_speculator(None)
    assert [end.reason for end in ends] == ["error", "length"] and words in ends[0].error
    assert all(pool.num_used == 0 for pool in runner.scheduler.pools)


@pytest.mark.parametrize(
    "speculate",
    [
        {"path": HERE + "Repeat", "arguments": {"times": 3}, "num_speculative_tokens": 5},
        {**TREE, "num_speculative_tokens": 9},
        {"kind": "draft", "model": "target", "layers": [0, 2], "stop": {"path": HERE + "never"}},
    ],
)
def test_settings_survive_yaml(speculate: dict[str, Any]) -> None:
    config = EngineConfig.build("demo", speculate=speculate)
    assert config.speculate == parse_speculation(speculate)
    assert EngineConfig.model_validate(config.model_dump(mode="json")) == config
