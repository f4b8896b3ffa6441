"""A proposer of the user's own: its settings, what it is given and shown, and the one error where it is wrong."""

from __future__ import annotations

import pytest

import workbench
from tests.engine.tiny import Oracle, layer, model_of, request, runner_of, spec_of
from tests.speculative.parts import HERE, Repeat
from workbench.engine.runner import generate
from workbench.experiment.experiment import Experiment
from workbench.parts import SpeculationTarget
from workbench.sampling import sampler as choose
from workbench.speculative import proposers
from workbench.speculative.config import CustomProposer, parse_speculation
from workbench.testing import check_proposer
from workbench.testing import proposers as kit
from workbench.trace.events import Finished, Verified


def load(name: str, **more):
    return workbench.load("demo-draft", backend="eager", pages=32, speculate={"path": HERE + name, **more})


def test_settings_survive_yaml_and_name_the_part() -> None:
    wanted = CustomProposer(path=HERE + "Repeat", arguments={"times": 3}, num_speculative_tokens=5)
    assert parse_speculation(HERE + "Repeat") == CustomProposer(path=HERE + "Repeat")
    assert parse_speculation({"path": wanted.path, "arguments": {"times": 3}, "num_speculative_tokens": 5}) == wanted
    values = {
        "question": "?",
        "workload": {"kind": "speculation"},
        "speculate": wanted.model_dump(exclude_defaults=True),
    }
    experiment = Experiment.from_values(values, "here")
    assert experiment.speculate == wanted and Experiment.from_yaml(experiment.to_yaml()) == experiment


def test_what_is_shown_is_what_was_verified() -> None:
    """Each row has the target's likeliest tokens given the draft tokens before it, accepted or not."""
    model = model_of(spec_of(layer(), layer(sliding_window=9)))
    verifier = SpeculationTarget(model.spec, None, parse_speculation({"path": HERE + "Repeat"}), None)  # type: ignore[arg-type] (unused)
    proposer = Repeat(verifier)
    runner = runner_of(model, speculator=proposers.Speculator(proposer, 3, model.spec.max_position_embeddings))
    Oracle(runner)
    asked = [request("a", 5, 12), request("b", 9, 7)]
    events = list(runner.stream(asked))
    checks = [e for e in events if isinstance(e, Verified)]
    ends = {e.request_id: e.token_ids for e in events if isinstance(e, Finished)}
    assert ends == {name: end.token_ids for name, end in generate(runner_of(model), asked).items()}
    prompts = {each.request_id: each.prompt_ids for each in asked}
    done = dict.fromkeys(prompts, 0)
    drafts = iter(checks)
    for sequence, draft, accepted, new, rows in proposer.seen:
        name = sequence.request_id
        before = (*prompts[name], *ends[name][: done[name]])
        done[name] += len(new)
        assert ends[name][: done[name]][-len(new) :] == new and len(rows) == 1 + len(draft)
        if len(draft):
            check = next(drafts)
            assert (check.request_id, check.token_ids) == (name, draft.token_ids)
            assert accepted == tuple(range(check.accepted))[: len(new) - 1]
        for place, row in enumerate(rows):
            logits = model.logits((*before, *draft.token_ids[:place]))[-1]
            assert row == tuple(logits.topk(3).indices.tolist())
    assert done == {name: len(tokens) for name, tokens in ends.items()} and any(each.accepted for each in proposer.seen)


def test_nothing_is_computed_that_no_proposer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    inner = proposers._likeliest
    monkeypatch.setattr(proposers, "_likeliest", lambda logits, k: counts.append(k) or inner(logits, k))
    for observed in (0, 1):
        for _ in load("Repeat", arguments={"observed_top_k": observed}).stream("import os\n", max_tokens=4):
            pass
    assert set(counts) == {1}


def test_the_kit_sees_planted_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, tried: str = "") -> list[str]:
        with monkeypatch.context() as patch:
            for law in [each for each in kit.LAWS if tried not in each]:
                patch.delitem(kit.LAWS, law)
            return [law.law for law in check_proposer(HERE + name, examples=1).laws if not law.ok]

    assert broken("Forgetful") == []
    assert broken("Silent") == ["proposes something"]
    assert broken("ClaimsToDraw") == ["sampled tokens are distributed as without drafts"]
    monkeypatch.setattr(kit, "_samples", lambda *_: None)  # whose law was seen above
    assert broken("TooMany", "as requested") != []
    forgets = "forgets a request that has ended"
    assert forgets in broken("Remembers", forgets)

    def takes_all(draft, sample, take):
        return [*map(choose.SampledToken, draft.token_ids), sample(len(draft))]

    monkeypatch.setattr(choose, "follow", takes_all)
    same = "greedy text is the text without drafts, token for token"
    assert same in broken("Forgetful", same)
