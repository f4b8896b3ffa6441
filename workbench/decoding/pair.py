"""Pair a sequence with its second stream: another prompt, followed by the tokens sampled for the first stream.

    first   | its own prompt ......... | a b c |      both are sequences of the scheduler, admitted and preempted
    second  | second_prompt ... | a b c |             together; when both have logits, one token is sampled for both

The second stream has its own pages, some of them from the prefix cache. It ends with the first stream and has no
events.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

from workbench.decoding.method import Advance, Fork, NextRow, TimedToken
from workbench.errors import WorkbenchError
from workbench.request import Request, Sequence
from workbench.sampling.combiners import NamedCombiner, OtherLogits
from workbench.sampling.sampler import Sampler
from workbench.sampling.verify import NO_DRAFT

OWN_ALONE = {  # what the sampled tokens of the first decide
    "filters": (), "sampler": None, "stop": (), "prompt_logprobs": None, "logprobs": None, "response_format": None,
    "constraint": None, "thinking": None,
}  # fmt: skip


class Pair:
    """A sequence and its second stream, with the last row of each until a token is sampled for both."""

    layers: tuple[int, ...] = ()

    def __init__(self, first: Sequence, second: Sequence, sampler: Sampler):
        self.sequences, self.hidden = (first,), (second,)
        self._sampler = sampler
        self._rows: dict[str, NextRow] = {}

    @property
    def is_ready(self) -> bool:
        both = (*self.sequences, *self.hidden)
        return (
            len(self._rows) == 2
            and self.sequences[0].finish_reason is None
            and not any(each.num_new_tokens for each in both)
        )

    def add(self, sequence: Sequence, row: NextRow) -> str:
        self._rows[sequence.request_id] = row._replace(logits=row.logits.clone(), states={})
        return ""

    def advance(self, step: int, now: float, fork: Fork) -> list[Advance]:
        """Sample one token for both streams from their combined rows."""
        (first,), (second,) = self.sequences, self.hidden
        row, beside = self._rows.pop(first.request_id), self._rows.pop(second.request_id)
        others = {first.request_id: OtherLogits(row.early, beside.logits[None])}
        (sampled,) = self._sampler.verify(row.logits[None], [first], [NO_DRAFT], others)
        return [Advance(first, [TimedToken(token, now, step) for token in sampled])]


def second_request(request: Request, combiners: Many[NamedCombiner]) -> Request | None:
    """Return the request of a second stream, if one of the filters in `combiners` needs one; else None.

    Raises:
        WorkbenchError: two filters want a second stream, or the part that returns its prompt fails.
    """
    wanting = [combiner for combiner in combiners if combiner.has_second_stream]
    if not wanting:
        return None
    if len(wanting) > 1:
        names = " and ".join(combiner.path for combiner in wanting)
        raise WorkbenchError(f"filters {names}: a request has one second stream; leave one of them out")
    return replace(
        request, request_id=f"{request.request_id}+second", prompt_ids=wanting[0].second_prompt(request.prompt_ids),
        prompt=None, sampling=request.sampling.model_copy(update=OWN_ALONE), pins=(),
    )  # fmt: skip
