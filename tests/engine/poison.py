"""Free pages and the null page are NaN before each step: a row that reads one differs from the oracle's."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tests.engine.tiny import VOCAB, Oracle, layer, model_of, request, spec_of
from tests.helpers.recorded import Around
from workbench.engine.runner import Runner
from workbench.request import Request, random_token_ids

WINDOW = 5
MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=WINDOW)))


class Poison(Around):
    """Replaces a runner's executor: before each step every page without an owner becomes NaN."""

    def __init__(self, runner: Runner):
        super().__init__(runner)
        self.runner = runner

    def forward(self, plan):
        for table, pool in enumerate(self.runner.scheduler.pools):
            free = [page for page in range(pool.num_pages + 1) if page == 0 or pool.ref_count(page) == 0]
            for tensor in self.runner.store.page_tensors(table):
                tensor.view(torch.uint8)[free] = 255  # NaN in every type of float
        return self.inner.forward(plan)


def poisoned(runner: Runner) -> Oracle:
    """The oracle over a poisoned cache."""
    Poison(runner)
    return Oracle(runner)


def asked(name: str, shared: int, own: int, most: int, beginning: int = 0, **more) -> Request:
    """A prompt of `shared` tokens that others may have too, and `own` of its own."""
    first = random_token_ids(random.Random(beginning), VOCAB, shared)
    salt = more.pop("cache_salt", "")
    alone = request(name, own, most, **more)
    return replace(alone, prompt_ids=first + alone.prompt_ids, cache_salt=salt)
