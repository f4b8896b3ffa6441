"""Search with beams from Python: `workbench.beam_search(runner, prompt, ...)`."""

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
    """The part of a runner that a search needs: its tokenizer, and events of the requests given to it."""

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
    """Return the best continuations of `prompt` by beam search, best first; other requests of the runner go on
    meanwhile.

    The result equals that of a request whose sampling has `beams` and `n`.

        workbench.beam_search(runner, "def fib(n):", num_beams=4, max_tokens=16)[0].text

    Args:
        runner: the runner to use.
        prompt: text or token ids.
        num_beams: number of beams, and of texts returned.
        max_tokens: the most tokens of a text.
        length_penalty: a text's score is its log-probability / tokens ** length_penalty.
        early_stopping: True stops with as many finished texts as beams. False stops when no beam of the present length
            would beat the worst of them, "never" when none could at any length.

    Raises:
        WorkbenchError: if it cannot run.
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
