"""Proposers and rules of the user's own, right ones and such as break a law or a form."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from workbench.parts import NO_DRAFT, Draft, Proposer, SpeculationTarget, Verification

HERE = "tests.speculative.parts:"


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


class Twice(Proposer):
    """Propose a tree of the last token, and of the token after it."""

    def __init__(self, target):
        pass

    def propose(self, sequences, counts):
        return [
            Draft((e.token_ids[-1], e.token_ids[-2], e.token_ids[-1]), None, (-1, -1, 1)) if n >= 3 else NO_DRAFT
            for e, n in zip(sequences, counts, strict=True)
        ]


class Cyclic(Twice):
    def propose(self, sequences, counts):
        return [Draft((1, 2), None, (1, 0)) if count > 1 else NO_DRAFT for count in counts]


def at_once(probabilities, request_ids):
    return torch.ones(len(request_ids), dtype=torch.bool)


def never(probabilities, request_ids):
    assert probabilities.shape[0] == len(request_ids)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(len(request_ids), dtype=torch.float64))
    return torch.zeros(len(request_ids), dtype=torch.bool)


def wrong_shape(probabilities, request_ids):
    return probabilities > 0.5


def one_argument(probabilities):
    return None
