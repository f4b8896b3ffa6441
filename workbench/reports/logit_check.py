"""Bound the distance between logits computed now and those of a recorded run, by feeding the recorded tokens through
the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.inputs import truncate_prompt
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.executors.reference import ERROR_FACTOR, ROUNDING_FACTOR
from workbench.executors.select import Backends
from workbench.experiment.build import requests_of, runner_for
from workbench.experiment.experiment import Experiment
from workbench.machine.ceilings import intra_op_threads
from workbench.measure.quality.teacher_forcing import ForcedText, ReferenceLogits
from workbench.progress import discard
from workbench.reports.differences import TokenDifference
from workbench.request import Request, SamplingParameters
from workbench.runs.record import Record
from workbench.trace.recorder import row_name

MAX_TOKENS_CHECKED = 128  # number of tokens checked for each request


@dataclass(frozen=True)
class LogitCheck:
    """The result of checking the logits of one request's recorded tokens.

    `error` is the largest distance of logits computed now from the exact ones. `bound` is the largest distance that a
    computation in this precision may have (executors/reference.py): `ERROR_FACTOR` times the error of the eager
    modules, plus a rounding term. Two runs within the bound differ by at most twice the bound.

    `greedy_shortfall` is the largest difference between the exact best logit and a recorded token's logit (greedy
    sampling only), at most 2 bounds. `divergence_gap` is the exact difference between the logits of the two tokens at
    which the runs diverge. `logprob_error` is the largest distance between recorded log-probabilities and those
    computed now, at most 4 bounds. Each is None if it does not apply or was not recorded.
    """

    request: str
    num_tokens: int
    error: float
    bound: float
    greedy_shortfall: float | None = None
    divergence_gap: float | None = None
    logprob_error: float | None = None

    @property
    def within_bound(self) -> bool:
        return (
            self.error <= self.bound
            and (self.greedy_shortfall or 0.0) <= 2 * self.bound
            and (self.logprob_error or 0.0) <= 4 * self.bound
        )

    @property
    def explained_by_rounding(self) -> bool | None:
        """Return whether rounding explains why the runs diverge; None if they do not diverge, or if tokens are sampled
        at random.
        """
        return None if self.divergence_gap is None else self.divergence_gap <= 2 * self.bound

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "within": self.within_bound, "explained": self.explained_by_rounding}

    def __str__(self) -> str:
        words = (
            f"{self.request}, {self.num_tokens} tokens: logits {self.error:.1e} off at most, {self.bound:.1e} allowed"
        )
        if self.greedy_shortfall is not None:
            words += f"; logits of recorded tokens at most {self.greedy_shortfall:.1e} below the best"
        if self.logprob_error is not None:
            words += f"; recorded log-probabilities at most {self.logprob_error:.1e} from those computed now"
        if self.divergence_gap is not None:
            can = "rounding suffices" if self.explained_by_rounding else "rounding does not explain it"
            words += f"; where the runs diverge, the two logits are {self.divergence_gap:.1e} apart: {can}"
        return words + ("" if self.within_bound else "; NOT within the bound")


def check_logits(
    record: Record, experiment: Experiment, differences: Iterable[TokenDifference] = (), max_requests: int = 2
) -> tuple[LogitCheck, ...]:
    """Check the logits of a record's requests, those with different tokens first.

    Args:
        record: the run whose recorded tokens are fed through the model.
        experiment: the experiment that builds the model.
        differences: the first differing token of each request, if the run was repeated.
        max_requests: the number of requests to check.

    Returns:
        One check for each request checked; none if no request has output.

    Raises:
        WorkbenchError: the model cannot be computed in a higher precision, or its cache evicts tokens.
    """
    if experiment.cache.evict is not None:
        raise WorkbenchError("logits: not checked, because with cache.evict they depend on the prompts' chunks")
    with intra_op_threads(experiment.measure.threads):
        return _check_logits(record, experiment, {each.request: each for each in differences}, max_requests)


def _check_logits(
    record: Record, experiment: Experiment, differ: Mapping[str, TokenDifference], most: int
) -> tuple[LogitCheck, ...]:
    runner = runner_for(experiment, discard)
    try:
        return _checks_by(runner, record, experiment, differ, most)
    finally:
        runner.close()


def _checks_by(
    runner: Runner, record: Record, experiment: Experiment, differ: Mapping[str, TokenDifference], most: int
) -> tuple[LogitCheck, ...]:
    bos_token_ids = runner.tokenizer.bos_token_ids if runner.tokenizer is not None else ()
    requests = requests_of(experiment, runner.tokenizer, runner.model.spec.vocab_size)
    requests_by_id = {request.request_id: request for request in requests}
    rows = [row for row in record.requests.to_pylist() if row["token_ids"] and row["request_id"] in requests_by_id]
    rows.sort(key=lambda row: row_name(row) not in differ)  # a stable sort: other requests keep their order
    names, texts, requests = [], [], []
    for row in rows[:most]:
        request = truncate_prompt(
            requests_by_id[row["request_id"]],
            runner.model.spec.max_position_embeddings,
            experiment.schedule.overflow,
            bos_token_ids,
        )
        names.append(row_name(row))
        texts.append(_text(request, row["token_ids"], differ.get(row_name(row))))
        requests.append(request)
    if not texts:
        return ()
    own = str(runner.model.dtype).removeprefix("torch.")
    higher = "float32" if runner.model.dtype.itemsize < 4 else "float64"
    now = ReferenceLogits.compute(runner, texts)
    plain = (
        now
        if _is_eager(runner.core.backends) and not experiment.batch_invariant and experiment.parallel.tensor == 1
        else _reference_distributions(experiment, texts, own)
    )
    exact = _reference_distributions(experiment, texts, higher)
    logprobs = _logprobs(record)
    return tuple(
        _check_request(names[i], texts[i], requests[i],
                       [each.logits_from(i, texts[i].first_scored, MAX_TOKENS_CHECKED) for each in (now, plain, exact)],
                       torch.finfo(runner.model.dtype).eps, differ.get(names[i]), logprobs.get(names[i], {}))
        for i in range(len(texts))
    )  # fmt: skip


def _text(request: Request, output: list[int], differs: TokenDifference | None) -> ForcedText:
    """Return the text up to the divergence, with at most the last `MAX_TOKENS_CHECKED` tokens of its output."""
    prompt = len(request.prompt_ids)
    end = prompt + (
        min(len(output), MAX_TOKENS_CHECKED) if differs is None or differs.position is None else differs.position + 1
    )
    ids = (*request.prompt_ids, *output)[:end]
    return ForcedText(ids, max(prompt, len(ids) - MAX_TOKENS_CHECKED), prompt)


def _reference_distributions(experiment: Experiment, texts: list[ForcedText], dtype: str) -> ReferenceLogits:
    """Compute the reference logits with the eager modules in one process, in `dtype`."""
    changes = (
        f"model.dtype={dtype}", "backend=eager", "compile=block", "batch_invariant=false", "speculate=none",
        "parallel.tensor=1",
    )  # fmt: skip
    return ReferenceLogits.compute(runner_for(experiment.with_(*changes), discard), texts)


def _is_eager(backends: Backends) -> bool:
    return str(backends) == "eager"


def _check_request(
    name: str,
    text: ForcedText,
    request: Request,
    rows: list[Tensor],
    eps: float,
    differs: TokenDifference | None,
    logprobs: Mapping[int, float],
) -> LogitCheck:
    now, plain, exact = (each.double() for each in rows)
    ids = torch.tensor(text.ids[text.first_scored :])[:, None]
    bound = ERROR_FACTOR * (plain - exact).abs().max().item() + ROUNDING_FACTOR * eps * (1 + exact.abs().max().item())
    gap = parting = None
    if _is_greedy(request.sampling):
        gap = (exact.max(-1).values - exact.gather(-1, ids)[:, 0]).max().item()
        if differs is not None and differs.was is not None and differs.now is not None:
            parting = abs(exact[-1, differs.was] - exact[-1, differs.now]).item()
    current_logprobs = now.log_softmax(-1).gather(-1, ids)[:, 0].tolist()
    first = text.first_scored - text.num_prompt_tokens
    apart = [abs(value - logprobs[first + i]) for i, value in enumerate(current_logprobs) if first + i in logprobs]
    apart = apart if request.sampling.logprobs_of == "model" else []
    error = (now - exact).abs().max().item()
    return LogitCheck(name, len(ids), error, bound, gap, parting, max(apart, default=None))


def _is_greedy(sampling: SamplingParameters) -> bool:
    """Return whether sampling always takes the token with the largest logit."""
    plain = SamplingParameters()
    same = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "filters", "sampler", "beams")
    return sampling.temperature == 0 and all(getattr(sampling, each) == getattr(plain, each) for each in same)


def _logprobs(record: Record) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in record.tokens.to_pylist():
        if row["logprob"] is not None and math.isfinite(row["logprob"]):
            found.setdefault(row_name(row), {})[row["index"]] = row["logprob"]
    return found
