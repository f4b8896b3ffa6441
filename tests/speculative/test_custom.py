"""A proposer of the user's own: its settings, what it is given and shown, and the one error where it is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

import workbench
from tests.engine.tiny import Oracle, layer, model_of, request, runner_of, spec_of
from workbench.engine.config import EngineConfig
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.parts import NO_DRAFT, Draft, Proposer, SpeculationTarget, Verification
from workbench.sampling import sampler as choose
from workbench.speculative import proposers
from workbench.speculative.config import CustomProposer, parse_speculation
from workbench.testing import check_proposer
from workbench.testing import proposers as kit
from workbench.trace.events import Finished, Verified

HERE = "tests.speculative.test_custom:"


@dataclass
class Repeat(Proposer):
    """Propose the last token again, and keep what is shown."""

    target: SpeculationTarget
    times: int = 2
    observed_top_k: int = 3
    seen: list[Verification] = field(default_factory=list)

    def propose(self, sequences, counts):
        return [Draft((each.token_ids[-1],) * min(self.times, n)) for each, n in zip(sequences, counts, strict=True)]

    def observe(self, verifications):
        self.seen += verifications


class Forgetful(Repeat):
    def observe(self, verifications):
        pass


class TooMany(Repeat):
    def propose(self, sequences, counts):
        return [Draft((1,) * (count + 1)) for count in counts]


class NoSuchToken(Repeat):
    def propose(self, sequences, counts):
        return [Draft((99999,)) for _ in counts]


class OneShort(Repeat):
    def propose(self, sequences, counts):
        return [NO_DRAFT for _ in counts][1:]


class Breaks(Repeat):
    def observe(self, verifications):
        raise ValueError("no more")


class Silent(Forgetful):
    def propose(self, sequences, counts):
        return [NO_DRAFT for _ in counts]


class Unshown(Proposer):
    def __init__(self, target):
        self.observed_top_k = 1

    def propose(self, sequences, counts):
        return [NO_DRAFT for _ in sequences]


class NoProposer:
    def __init__(self, target):
        pass


class Remembers(Forgetful):
    """A planted bug: state of a request outlives it."""

    def __init__(self, target):
        super().__init__(target)
        self.kept: dict[str, int] = {}

    def propose(self, sequences, counts):
        for each in sequences:
            self.kept[each.request_id] = self.kept.get(each.request_id, 0) + 1
        return super().propose(sequences, counts)


class ClaimsToDraw(Forgetful):
    """A planted bug: proposes the likeliest token of a draft model, with probabilities as if it had been drawn."""

    def __init__(self, target):
        super().__init__(target)
        self.inner = target.draft_model(model="demo-draft", num_speculative_tokens=1)

    def propose(self, sequences, counts):
        drafts = self.inner.propose(sequences, [min(1, count) for count in counts])
        return [
            each
            if each.probabilities is None
            else Draft(tuple(each.probabilities.argmax(-1).tolist()), each.probabilities)
            for each in drafts
        ]

    def forget(self, request_id):
        self.inner.forget(request_id)


def load(name: str, **more):
    return workbench.load("demo-draft", backend="eager", pages=32, speculate={"path": HERE + name, **more})


def test_settings_survive_yaml_and_name_the_part() -> None:
    wanted = CustomProposer(path=HERE + "Repeat", arguments={"times": 3}, num_speculative_tokens=5)
    assert parse_speculation(HERE + "Repeat") == CustomProposer(path=HERE + "Repeat")
    assert parse_speculation({"path": wanted.path, "arguments": {"times": 3}, "num_speculative_tokens": 5}) == wanted
    config = EngineConfig.build("demo", speculate=wanted)
    assert EngineConfig.model_validate(config.model_dump(mode="json")) == config
    values = {
        "question": "?",
        "workload": {"kind": "speculation"},
        "speculate": wanted.model_dump(exclude_defaults=True),
    }
    experiment = Experiment.from_values(values, "here")
    assert experiment.speculate == wanted and Experiment.from_yaml(experiment.to_yaml()) == experiment


@pytest.mark.parametrize(
    ("speculate", "words"),
    [
        ({"path": HERE + "Repeat", "arguments": {"tiems": 3}}, "Repeat: could not be built with tiems=3"),
        ({"path": HERE + "Missing"}, "has no 'Missing'"),
        ({"path": HERE + "NoProposer"}, r"has no propose\(sequences, counts\)"),
        ({"path": HERE + "HERE"}, "must be a class"),
        ({"path": HERE + "Unshown"}, "has both observed_top_k and observe"),
        ({"path": HERE + "Repeat", "arguments": {"observed_top_k": 5000}}, "within 0 and the vocabulary's 4096"),
        ({"path": HERE + "Repeat", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"path": HERE + "Repeat", "min_ngram": 2}, "min_ngram"),
    ],
)
def test_what_cannot_be_is_one_error(speculate, words: str) -> None:
    with pytest.raises(WorkbenchError, match=words) as caught:
        workbench.load("demo-draft", backend="eager", pages=32, speculate=speculate)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TooMany", "proposed 5 tokens where at most 4 are wanted"),
        ("NoSuchToken", "proposed token 99999, which is none of the 4096"),
        ("OneShort", "returned 0 drafts for 1 sequences"),
        ("Breaks", "ValueError: no more"),
    ],
)
def test_a_proposer_that_errs_ends_its_requests_and_no_others(name: str, words: str) -> None:
    runner = load(name)
    (end,) = [e for e in runner.stream("import os\n", max_tokens=8, temperature=0) if isinstance(e, Finished)]
    assert end.reason == "error" and words in end.error
    runner.set_speculator(None)
    (end,) = [e for e in runner.stream("import os\n", max_tokens=8, temperature=0) if isinstance(e, Finished)]
    assert end.reason == "length" and all(pool.num_used == 0 for pool in runner.scheduler.pools)


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
    assert broken("TooMany", "as are wanted") != []
    forgets = "forgets a request that has ended"
    assert forgets in broken("Remembers", forgets)

    def takes_all(draft, rows, largest, tokens):
        return [*map(choose.SampledToken, draft.token_ids), choose.SampledToken(tokens[rows[-1]])]

    monkeypatch.setattr(choose, "_greedy", takes_all)
    same = "greedy text is the text without drafts, token for token"
    assert same in broken("Forgetful", same)
