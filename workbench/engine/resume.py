"""Go on with a request after tokens that another engine sampled for it, as if nothing had come between.

    prompt_ids | generated_ids, never emitted again | tokens to sample |
               ^ computed as after a preemption      ^ same place in the random stream, same penalties, same limits

The engine that sampled them may be gone, or may have handed the request over. All that a token depends on is taken up
from the tokens alone: the detokenizer's held-back characters and stop strings that cross the seam, the thought, the
grammar. The prefix cache gives what it has of both prompt and generated tokens.
"""

from __future__ import annotations

from workbench.constrained.constraint import Constraint
from workbench.engine.outputs import StopChecker
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Request


def why_not_resumable(request: Request) -> str | None:
    """Return why a request cannot go on after some of its tokens; None where it can.

    Beams and the samples of best_of > n emit nothing before their end, so they can be submitted anew instead.
    """
    sampling = request.sampling
    if sampling.beams:
        return "beams cannot be resumed after some tokens; submit the request anew, nothing of it was emitted"
    if sampling.num_sequences > sampling.n:
        return "best_of > n cannot be resumed after some tokens; submit the request anew, nothing of it was emitted"
    if sampling.sampler is not None:
        path = sampling.sampler.path
        return f"sampler {path} cannot be resumed after some tokens: its state is its own, and was not kept"
    return None


def check_resumable(request: Request, vocab_size: int) -> None:
    """Refuse generated tokens that no sequence can go on after (WorkbenchError)."""
    ids = request.generated_ids
    if not ids:
        return
    why = why_not_resumable(request)
    if not why and request.sampling.n > 1:
        why = f"generated_ids are of one sample, and n is {request.sampling.n}: resume each sample alone"
    wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
    if not why and wrong:
        why = f"generated_ids has token id {wrong[0]!r}, the vocabulary is 0..{vocab_size - 1}"
    if why:
        raise WorkbenchError(f"request {request.request_id}: {why}")


def resume(request: Request, output: StopChecker, constraint: Constraint | None) -> FinishReason | None:
    """Take up what came of `generated_ids`: text, stop strings, limits, thought and grammar.

    Args:
        request: a request with generated tokens.
        output: its stop checker, without any token yet.
        constraint: its constraint, without any token yet; None where it has none.

    Returns:
        the finish reason, where the last of the tokens ended the request; then nothing is left to compute.

    Raises:
        WorkbenchError: for tokens that this request could not have had.
    """
    name, ended = request.request_id, None
    for place, token in enumerate(request.generated_ids):
        if ended is not None:
            raise WorkbenchError(
                f"request {name}: generated_ids goes on after its end ({output.cause.by}, {place} tokens)"
            )
        taken, reason = (token, None) if constraint is None else constraint.advance(token)
        if taken != token:
            raise WorkbenchError(f"request {name}: generated_ids: token {token} at place {place} leaves no end")
        _, ended = output.push(token, reason)
    return ended
