"""Run a beam search from Python: `workbench.beam_search(runner, prompt, ...)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

from workbench.decoding.beams import BeamHypothesis
from workbench.engine import inputs as intake
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import FinishReason, Request
from workbench.trace.events import Decoded, Event, Finished

EarlyStopping = bool | Literal["never"]


class EventStream(Protocol):
    """The part of a runner that a beam search needs: its tokenizer, and the method that streams the events of
    requests.
    """

    tokenizer: Tokenizer | None

    def stream(self, requests: list[Request]) -> Iterator[Event]: ...


def beam_search(
    runner: EventStream,
    prompt: str | Iterable[int],
    num_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    *,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    request_id: str = "beams",
) -> list[BeamHypothesis]:
    """Return the best continuations of `prompt` by beam search, best first. The runner continues its other requests in
    the meantime.

    The result equals that of a request with the sampling parameters `beams` and `n`.

        workbench.beam_search(runner, "def fib(n):", num_beams=4, max_tokens=16)[0].text

    Args:
        runner: the runner to use.
        prompt: text or token ids.
        num_beams: number of beams, and of texts returned.
        max_tokens: maximum number of tokens of a text.
        length_penalty: a text's score is log-probability / number of tokens ** length_penalty.
        early_stopping: True stops once there are `num_beams` finished texts. False stops when no beam would beat the
            worst of them at the present length, "never" when none could at any length.

    Raises:
        WorkbenchError: if the search cannot run.
    """
    sampling = intake.parse_sampling({
        "beams": num_beams, "n": num_beams, "max_tokens": max_tokens, "length_penalty": length_penalty,
        "early_stopping": early_stopping, "stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos,
    })  # fmt: skip
    if isinstance(prompt, str):
        request = intake.make_request(prompt, runner.tokenizer, sampling, request_id)
    else:
        request = Request(request_id, tuple(prompt), sampling)
    logprobs: dict[int, list[float]] = {}
    hypotheses: dict[int, BeamHypothesis] = {}
    for event in runner.stream([request]):
        if isinstance(event, Decoded) and event.logprob is not None:
            logprobs.setdefault(event.sample, []).append(event.logprob)
        elif isinstance(event, Finished):
            if event.reason == FinishReason.NOT_CHOSEN:
                continue  # a vocabulary smaller than the beams
            if event.score is None:
                raise WorkbenchError(event.error or f"beam search: {event.reason}")
            beam_logprobs = tuple(logprobs.get(event.sample, ()))
            hypotheses[event.sample] = BeamHypothesis(event.token_ids, beam_logprobs, event.score, event.output_text)
    return [hypotheses[number] for number in sorted(hypotheses)]
