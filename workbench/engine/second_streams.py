"""Pair a sequence with its second stream: another prompt, followed by the tokens that are sampled for the first.

    first   | its own prompt ......... | a b c |      both are sequences of the scheduler, admitted and preempted
    second  | second_prompt ... | a b c |             together; when both have logits, one token is sampled for both

The second stream has pages of its own, found in the prefix cache where others computed them. It ends with the first,
and no event speaks of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import Request, Sequence
from workbench.sampling.combiners import NamedCombiner, OtherLogits
from workbench.scheduler.plan import StepPlan

OWN_ALONE = {  # what the sampled tokens of the first decide
    "filters": (), "sampler": None, "stop": (), "prompt_logprobs": None, "logprobs": None, "response_format": None,
    "thinking": None,
}  # fmt: skip


@dataclass
class StreamPair:
    """A sequence and its second stream, with the logits [vocab] that each had last, until a token is sampled."""

    first: Sequence
    second: Sequence
    early: dict[int, Tensor] = field(default_factory=dict)  # of the first, by layer: [1, vocab]
    _rows: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> tuple[Sequence, Sequence]:
        return self.first, self.second

    @property
    def ready(self) -> bool:
        """Return whether both have computed what they know."""
        return len(self._rows) == 2 and not any(each.num_uncomputed_tokens for each in self.sequences)

    def add_logits(self, sequence: Sequence, logits: Tensor, early: dict[int, Tensor]) -> None:
        """Keep the logits [vocab] after the text of one of both, and of the first those of early layers."""
        self._rows[sequence.request_id] = logits.clone()
        if sequence is self.first:
            self.early = early

    def pop_logits(self) -> tuple[Tensor, OtherLogits]:
        """Return the first's logits [vocab] and the others that are combined with them; forget both."""
        first, second = (self._rows.pop(each.request_id) for each in self.sequences)
        return first, OtherLogits(self.early, second[None])


class StreamPairs(dict[str, StreamPair]):
    """Pairs by the id of each of their sequences."""

    def add(self, pair: StreamPair) -> None:
        self.update({each.request_id: pair for each in pair.sequences})

    def together(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Return both of a pair, or the sequence alone."""
        pair = self.get(sequence.request_id)
        return (sequence,) if pair is None else pair.sequences

    def is_hidden(self, request_id: str) -> bool:
        """Return whether this is a second stream."""
        pair = self.get(request_id)
        return pair is not None and pair.second.request_id == request_id

    def ready(self, plan: StepPlan) -> list[StreamPair]:
        """Return pairs both of which have logits after `plan`."""
        met = {id(pair): pair for span in plan.spans if (pair := self.get(span.sequence.request_id)) is not None}
        return [pair for pair in met.values() if pair.ready and pair.first.finish_reason is None]


def second_request(request: Request, combiners: Many[NamedCombiner]) -> Request | None:
    """Return the request of a second stream, if one of the filters wants it.

    Raises:
        WorkbenchError: two filters want one, or the part that names its prompt fails.
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
