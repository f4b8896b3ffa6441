"""Every entry is checked by the kit of its kind: a broken part is reported with its law."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import create_autospec

import pytest

from tests.zoo import made
from workbench.claims.laws import check_technique
from workbench.claims.technique import load_zoo


def test_a_part_that_breaks_a_law_is_reported(tmp_path: Path) -> None:
    zoo = made.folder(tmp_path)
    (report,) = check_technique(load_zoo(zoo)["hotter"], examples=20)
    assert report.passed and report.part.endswith("hotter.py:Hotter")
    source = (zoo / "hotter.py").read_text()
    (zoo / "hotter.py").write_text(source.replace("logits * self.times", "logits.mul_(self.times)"))
    (report,) = check_technique(load_zoo(zoo)["hotter"], examples=20)
    broken = [law.law for law in report.laws if not law.ok]
    assert broken == ["leaves its input as it was"]


@pytest.mark.parametrize(
    ("kind", "use", "words"),
    [
        ("attention", "{attention.sliding_window: 8, attention.num_sink_tokens: 2}", "check_attention {'sliding_"),
        ("attention", "{attention.mask: 'experiments/custom_attention.py:Dilated'}", ":Dilated"),
        ("format", "{cache.format: int8, cache.residual_length: 8, cache.quant_group: 8}", "int8"),
        ("eviction", "{cache.evict: {kind: window, budget: 64}}", "check_evict budget=64"),
        ("schedule", "{schedule.policy: shortest_prompt}", "check_policy"),
        ("sampling", "{sampling.top_k: 4}", None),
        (
            "sampling",
            "{sampling.best_of: 4, sampling.ranking: {path: 'experiments/zoo/mbr.py:MinimumRisk'}}",
            "check_ranking",
        ),
        (
            "sampling",
            "{sampling.beams: 4, sampling.search: {path: 'experiments/zoo/contrastive_search.py:ContrastiveSearch'}}",
            "check_search",
        ),
        ("draft", "{speculate: {kind: prompt_lookup}}", "check_proposer"),
    ],
)
def test_each_kind_has_its_kit(
    kind: str, use: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.claims import laws

    asked: list[str] = []
    kits = "check_attention check_kv_format check_evict check_sampler check_policy check_proposer"
    kits += " check_ranking check_search"
    for name in kits.split():
        kit = create_autospec(  # which takes what the kit takes
            getattr(laws, name), side_effect=lambda part, name=name, **more: asked.append(f"{name} {part} {more}")
        )
        monkeypatch.setattr(laws, name, kit)
    rule = {"draft": "steps_ratio <= 1", "schedule": "attainment >= 0.5", "sampling": "loop_ratio <= 1"}
    changes = {"kind": kind, "use": use, "rule": f'"{rule.get(kind, "bytes_ratio <= 1")}"'}
    check_technique(load_zoo(made.folder(tmp_path, **changes))["hotter"], examples=2)
    assert len(asked) == (0 if words is None else 1)
    assert words is None or (words in asked[0] and "'examples': 2" in asked[0])
