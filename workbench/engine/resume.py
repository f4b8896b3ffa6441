"""Resume a request after tokens that another engine sampled for it, with the same results as without the interruption.

    prompt_ids | generated_ids, never emitted again | tokens to sample |
               ^ computed as after a preemption      ^ same position in the random stream, same penalties, same limits

The other engine may be gone, or may have handed the request over. All state is rebuilt from the tokens: held-back
characters of the detokenizer, stop strings that span old and new tokens, the thought, the grammar. The prefix cache is
used for prompt and generated tokens.
"""

from __future__ import annotations

from workbench.constrained.constraint import Constraint
from workbench.engine.outputs import StopChecker
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Request


def why_not_resumable(request: Request) -> str | None:
    """Return the reason why a request cannot be resumed after some of its tokens; None if it can.

    Beams and the samples of best_of > n emit no tokens before their end, so they can be submitted again instead.
    """
    sampling = request.sampling
    if sampling.beams:
        return "beams cannot be resumed after some tokens; submit the request anew, nothing of it was emitted"
    if sampling.num_sequences > sampling.n:
        return "best_of > n cannot be resumed after some tokens; submit the request anew, nothing of it was emitted"
    if sampling.sampler is not None:
        path = sampling.sampler.path
        return f"sampler {path} cannot be resumed after some tokens: its state was not saved"
    return None


def check_resumable(request: Request, vocab_size: int) -> None:
    """Raise WorkbenchError if no sequence can be resumed after the request's generated tokens."""
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
    """Rebuild the state of a request after its `generated_ids`: text, stop strings, limits, thought and grammar.

    Args:
        request: a request with generated tokens.
        output: its stop checker, without tokens so far.
        constraint: its constraint, without tokens so far; None if it has none.

    Returns:
        the finish reason if the last of the tokens ended the request; then no more tokens are computed.

    Raises:
        WorkbenchError: for tokens that this request could not have generated.
    """
    name, ended = request.request_id, None
    for place, token in enumerate(request.generated_ids):
        if ended is not None:
            raise WorkbenchError(
                f"request {name}: generated_ids has tokens after the answer's end ({output.cause.by}, {place} tokens)"
            )
        taken, reason = (token, None) if constraint is None else constraint.advance(token)
        if taken != token:
            raise WorkbenchError(f"request {name}: generated_ids: no complete answer follows token {token} at {place}")
        _, ended = output.push(token, reason)
    return ended
