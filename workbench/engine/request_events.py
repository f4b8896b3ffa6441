"""Build the first and the last event of a request from its state."""

from __future__ import annotations

from workbench.engine.outputs import NOT_STOPPED, StopChecker
from workbench.request import FinishReason, Request, Sequence
from workbench.trace.events import Finished, Submitted

FINISHED_NORMALLY = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.NOT_CHOSEN)


def submitted_event(request: Request, now: float, arrival: float) -> Submitted:
    """Return the Submitted event of a request submitted at time `now` that arrived at time `arrival`."""
    return Submitted(
        now, request.request_id, prompt_tokens=len(request.prompt_ids), arrival=arrival, cut_tokens=request.cut_tokens,
        tenant=request.tenant, priority=request.priority, deadline=request.deadline,
        generated_tokens=len(request.generated_ids),
    )  # fmt: skip


def finished_event(
    sequence: Sequence, output: StopChecker | None, now: float, reason: FinishReason, error: str, score: float | None
) -> Finished:
    """Return the Finished event of a sequence, with the held-back text.

    Args:
        sequence: the sequence.
        output: its text and stop cause; None if it was never admitted.
        now: the time in seconds.
        reason: the finish reason.
        error: the error message, or None.
        score: the score of a beam.
    """
    ended = output.cause if output is not None and reason in FINISHED_NORMALLY else NOT_STOPPED
    rest = output.finish() if output is not None and reason is not FinishReason.MOVED else ""
    if output is not None and emits_no_tokens(sequence.request):
        rest = output.text
    return Finished(
        now, sequence.request_id, rest, reason=str(reason), error=error, token_ids=tuple(sequence.output_ids),
        output_text=output.text if output is not None else "", prompt_tokens=sequence.prompt_length,
        cached_tokens=sequence.cached_tokens, computed_tokens=sequence.computed_tokens,
        restored_tokens=sequence.restored_tokens, written_tokens=sequence.written_tokens,
        shared_pages=sequence.shared_pages, score=score, ended_by=ended.by, stop_reason=ended.stop,
        thought_text=output.thought_text if output is not None else "",
        thinking_tokens=output.thinking_tokens if output is not None else 0,
        pinned=tuple(sequence.pinned), prompt_logprobs=tuple(sequence.prompt_logprobs or ()),
    )  # fmt: skip


def emits_no_tokens(request: Request) -> bool:
    """Return whether no event is emitted for each token of the request."""
    return request.final_only and request.sampling.logprobs is None
