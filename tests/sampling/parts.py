"""Users' parts for the tests: right ones and, for each law, one that breaks it."""

from __future__ import annotations

import torch


class Ban:
    def __init__(self, token: int = 0):
        self.token = token

    def __call__(self, logits, histories):
        left = logits.clone()
        left[:, self.token] = -torch.inf
        return left


def halve(logits, histories, by: float = 2.0):
    return logits / by


identity = halve


class Alternating:
    """Takes the largest, then the second largest token in turn; its state is which."""

    def start(self):
        return 0

    def choose(self, logits, uniform, state):
        kept = int((logits > -torch.inf).sum())
        return int(logits.argsort(descending=True, stable=True)[min(state, kept - 1)]), 1 - state


class NotCallable:
    pass


class RaisesWhenBuilt:
    def __init__(self):
        raise RuntimeError("no such table")


class OneArgument:
    def __call__(self, logits):
        return logits


class OnlyStarts:
    def start(self):
        return None


class StartBreaks(Alternating):
    def start(self):
        raise RuntimeError("cannot start")


class Raises:
    def __call__(self, logits, histories):
        raise KeyError("table")


class InPlace:
    def __call__(self, logits, histories):
        logits[:, 0] += 1
        return logits


class RemovesAll:
    def __call__(self, logits, histories):
        return torch.full_like(logits, -torch.inf)


class GivesNaN:
    def __call__(self, logits, histories):
        return logits * torch.nan


class Resurrects:
    def __call__(self, logits, histories):
        return logits.clamp(min=-100.0)


class ResurrectsInPlace:
    def __call__(self, logits, histories):
        return logits.clamp_(min=-100.0)


class OtherType:
    def __call__(self, logits, histories):
        return logits.double()


class OtherShape:
    def __call__(self, logits, histories):
        return logits[:, :-1]


class Remembers:
    def __init__(self):
        self.calls = 0

    def __call__(self, logits, histories):
        self.calls += 1
        return logits * self.calls


class LooksAside:
    def __call__(self, logits, histories):
        return logits - logits.masked_fill(logits == -torch.inf, 0).mean()


class SamplerRaises(Alternating):
    def choose(self, logits, uniform, state):
        raise KeyError("table")


class TakesRemoved(Alternating):
    def choose(self, logits, uniform, state):
        return int(uniform * len(logits)), state


class TakesUnknown(Alternating):
    def choose(self, logits, uniform, state):
        return len(logits), state


class TakesFraction:
    def start(self):
        return 0

    def choose(self, logits, uniform, state):
        return 0.5, state


class OwnChance(Alternating):
    def choose(self, logits, uniform, state):
        return int(torch.multinomial(logits.softmax(-1), 1)), state


class StateInside(Alternating):
    def __init__(self):
        self.turn = 0

    def choose(self, logits, uniform, state):
        token, self.turn = super().choose(logits, uniform, self.turn)
        return token, state


class ChangesState:
    def start(self):
        return [0]

    def choose(self, logits, uniform, state):
        token, state[0] = Alternating().choose(logits, uniform, state[0])
        return token, state


class SamplerInPlace(Alternating):
    def choose(self, logits, uniform, state):
        logits += 1
        return int(logits.argmax()), state
