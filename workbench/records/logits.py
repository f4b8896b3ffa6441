"""Bound the distance of today's logits from a record's: its tokens are fed through the model again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.exact import ROOM, ROUNDINGS
from workbench.engine.intake import fit
from workbench.engine.lanes import Lanes
from workbench.engine.patience import to_nobody
from workbench.errors import WorkbenchError
from workbench.records.differences import TokenDifference
from workbench.request import Request, SamplingParameters
from workbench.study.divergence import Distributions
from workbench.study.experiment import Experiment
from workbench.study.forced import Text
from workbench.study.record import Record
from workbench.study.run import runner_for, threads
from workbench.study.workload import requests_of
from workbench.trace.recorder import row_name

PLACES = 128  # tokens checked of a request


@dataclass(frozen=True)
class Logits:
    """The check of one request's recorded tokens.

    `error` is the largest distance of today's logits from the exact ones. `bound` is the largest distance that any
    computation in this precision may have (engine/exact.py): `ROOM` times the error of the eager modules, plus a
    rounding. Two runs that both keep to the bound are at most twice that apart.

    `greedy_shortfall` is the most by which a recorded token's logit falls below the exact best (greedy sampling only),
    at most 2 bounds. `divergence_gap` is the exact distance between the two tokens at which the runs diverge.
    `logprob_error` is the largest distance of recorded log-probabilities from today's, at most 4 bounds. None: does not
    apply, or was not recorded.
    """

    request: str
    places: int
    error: float
    bound: float
    gap: float | None = None
    parting: float | None = None
    logprob: float | None = None

    @property
    def within(self) -> bool:
        return (
            self.error <= self.bound
            and (self.gap or 0.0) <= 2 * self.bound
            and (self.logprob or 0.0) <= 4 * self.bound
        )

    @property
    def explained(self) -> bool | None:
        """Return whether rounding explains the divergence of the runs; None where they agree, or tokens are sampled."""
        return None if self.parting is None else self.parting <= 2 * self.bound

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "within": self.within, "explained": self.explained}

    def __str__(self) -> str:
        words = f"{self.request}, {self.places} tokens: at most {self.error:.1e} from exact, {self.bound:.1e} allowed"
        if self.gap is not None:
            words += f"; recorded tokens at most {self.gap:.1e} below the best"
        if self.logprob is not None:
            words += f"; recorded log-probabilities at most {self.logprob:.1e} from today's"
        if self.parting is not None:
            can = "rounding suffices" if self.explained else "rounding does not suffice"
            words += f"; where the runs part the two tokens are {self.parting:.1e} apart: {can}"
        return words + ("" if self.within else "; NOT within the bound")


def logits(
    record: Record, experiment: Experiment, differ: Iterable[TokenDifference] = (), most: int = 2
) -> tuple[Logits, ...]:
    """Check the logits of a record's requests, first those whose tokens differ.

    Args:
        record: the run whose tokens are fed through the model.
        experiment: builds the model.
        differences: where outputs of a repetition differ, by request.
        max_requests: how many requests are checked.

    Returns:
        One check a request; nothing where no request has output.

    Raises:
        WorkbenchError: the model cannot be computed in a higher precision, or its cache evicts.
    """
    if experiment.cache.evict is not None:
        raise WorkbenchError("logits: with cache.evict what is computed depends on the chunks; not checked")
    with threads(experiment.measure.threads):
        return _logits(record, experiment, {each.request: each for each in differ}, most)


def _logits(
    record: Record, experiment: Experiment, differ: Mapping[str, TokenDifference], most: int
) -> tuple[Logits, ...]:
    runner = runner_for(experiment, to_nobody)
    begin = runner.tokenizer.begin_ids if runner.tokenizer is not None else ()
    requests = requests_of(experiment, runner.tokenizer, runner.model.spec.vocab)
    asked = {request.request_id: request for request in requests}
    rows = [row for row in record.requests.to_pylist() if row["token_ids"] and row["request_id"] in asked]
    rows.sort(key=lambda row: row_name(row) not in differ)  # stable: the others stay in order
    names, texts, requests = [], [], []
    for row in rows[:most]:
        request = fit(asked[row["request_id"]], runner.model.spec.context, experiment.schedule.overflow, begin)
        names.append(row_name(row))
        texts.append(_text(request, row["token_ids"], differ.get(row_name(row))))
        requests.append(request)
    if not texts:
        return ()
    own = str(runner.model.dtype).removeprefix("torch.")
    higher = "float32" if runner.model.dtype.itemsize < 4 else "float64"
    now = Distributions.of(runner, texts)
    plain = now if _is_plain(runner.lanes) and not experiment.batch_invariant else _by(experiment, texts, own)
    exact = _by(experiment, texts, higher)
    logprobs = _logprobs(record)
    return tuple(
        _one(names[i], texts[i], requests[i], [each.at(i, texts[i].first, PLACES) for each in (now, plain, exact)],
             torch.finfo(runner.model.dtype).eps, differ.get(names[i]), logprobs.get(names[i], {}))
        for i in range(len(texts))
    )  # fmt: skip


def _text(request: Request, output: list[int], differs: TokenDifference | None) -> Text:
    """Return the recorded text up to the divergence, and the last `MAX_TOKENS_CHECKED` tokens of its output."""
    prompt = len(request.prompt_ids)
    end = prompt + (min(len(output), PLACES) if differs is None or differs.position is None else differs.position + 1)
    ids = (*request.prompt_ids, *output)[:end]
    return Text(ids, max(prompt, len(ids) - PLACES), prompt)


def _by(experiment: Experiment, texts: list[Text], dtype: str) -> Distributions:
    """Compute the distributions with the eager modules, in `dtype`."""
    changes = (f"model.dtype={dtype}", "lane=eager", "compile=block", "batch_invariant=false", "speculate=none")
    return Distributions.of(runner_for(experiment.with_(*changes), to_nobody), texts)


def _is_plain(lanes: Lanes) -> bool:
    return str(lanes) == "eager"


def _one(
    name: str,
    text: Text,
    request: Request,
    rows: list[Tensor],
    eps: float,
    differs: TokenDifference | None,
    logprobs: Mapping[int, float],
) -> Logits:
    now, plain, exact = (each.double() for each in rows)
    ids = torch.tensor(text.ids[text.first :])[:, None]
    bound = ROOM * (plain - exact).abs().max().item() + ROUNDINGS * eps * (1 + exact.abs().max().item())
    gap = parting = None
    if _greedy(request.sampling):
        gap = (exact.max(-1).values - exact.gather(-1, ids)[:, 0]).max().item()
        if differs is not None and differs.was is not None and differs.now is not None:
            parting = abs(exact[-1, differs.was] - exact[-1, differs.now]).item()
    said = now.log_softmax(-1).gather(-1, ids)[:, 0].tolist()
    first = text.first - text.prefilled
    apart = [abs(value - logprobs[first + i]) for i, value in enumerate(said) if first + i in logprobs]
    apart = apart if request.sampling.logprobs_of == "model" else []
    error = (now - exact).abs().max().item()
    return Logits(name, len(ids), error, bound, gap, parting, max(apart, default=None))


def _greedy(asked: SamplingParameters) -> bool:
    """Return whether the token chosen is the largest logit itself."""
    plain = SamplingParameters()
    same = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "filters", "sampler", "beams")
    return asked.temperature == 0 and all(getattr(asked, each) == getattr(plain, each) for each in same)


def _logprobs(record: Record) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in record.tokens.to_pylist():
        if row["logprob"] is not None and math.isfinite(row["logprob"]):
            found.setdefault(row_name(row), {})[row["index"]] = row["logprob"]
    return found
