"""Decode the rows of a step by the sampler, or by a request's decoding method."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace

from torch import Tensor

from workbench.decoding.beams import Beams
from workbench.decoding.early_logits import EarlyLogits
from workbench.decoding.method import Decoding, NextRow
from workbench.decoding.search import CustomSearch, load_search
from workbench.errors import WorkbenchError
from workbench.executors.early_layers import split_columns
from workbench.request import SamplingParameters, Sequence
from workbench.sampling.combiners import OtherLogits
from workbench.sampling.prompt_logprobs import BadPromptRow, score_prompt
from workbench.sampling.sampler import Sampler
from workbench.sampling.samplers import SampledToken, failed_token
from workbench.sampling.verify import NO_DRAFT, Draft
from workbench.scheduler.plan import Span, StepPlan


class Decodings:
    """The active decoding methods by sequence id; a sequence that the sampler decodes alone has none."""

    def __init__(self) -> None:
        self._methods: dict[str, Decoding] = {}

    def __len__(self) -> int:
        return len(self._methods)

    def add(self, method: Decoding) -> None:
        self._methods |= {each.request_id: method for each in (*method.sequences, *method.hidden)}

    def of(self, sequence: Sequence) -> Decoding | None:
        return self._methods.get(sequence.request_id)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._methods.pop(sequence.request_id, None)

    def visible(self, sequence: Sequence) -> Many[Sequence]:
        """Return the sequences that clients see of the sequence's decoding method; without a method, the sequence
        itself.
        """
        method = self.of(sequence)
        return [sequence] if method is None else method.sequences

    def hidden(self, sequence: Sequence) -> Many[Sequence]:
        """Return the sequences that clients do not see of the sequence's decoding method."""
        method = self.of(sequence)
        return () if method is None else method.hidden

    def is_hidden(self, request_id: str) -> bool:
        method = self._methods.get(request_id)
        return method is not None and any(each.request_id == request_id for each in method.hidden)

    def ready(self, plan: StepPlan) -> list[Decoding]:
        """Return the decoding methods that can advance after `plan`, each once."""
        if not self._methods:
            return []
        methods = (self.of(span.sequence) for span in plan.spans)
        return [each for each in {id(each): each for each in methods if each is not None}.values() if each.is_ready]


class Decoder:
    """The sampler of all requests, and the decoding methods of some."""

    def __init__(self, sampler: Sampler, early_logits: EarlyLogits, vocab_size: int):
        self.sampler, self.early_logits = sampler, early_logits
        self.methods = Decodings()
        self._vocab_size = vocab_size

    def add(self, sequence: Sequence) -> None:
        """Build the sampling state of a request; WorkbenchError if it is invalid."""
        self.sampler.add(sequence)
        self.early_logits.check(self.sampler.combiners_of(sequence.request_id))

    def add_search(
        self, sampling: SamplingParameters, sequences: list[Sequence], end_token_ids: set[int], max_tokens: int
    ) -> None:
        """Start a search whose branches or beams are `sequences`, all of one request; WorkbenchError if its
        user-defined part is invalid.
        """
        if (part := sampling.search) is None:
            self.methods.add(Beams(sampling, sequences, end_token_ids, max_tokens))
            return
        if self.early_logits.problem:
            raise WorkbenchError(f"search {part.path}: {self.early_logits.problem}")
        search, last = load_search(part), self.early_logits.num_layers
        self.methods.add(CustomSearch(search, last, sampling, sequences, end_token_ids, max_tokens))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self.sampler.remove(sequence.request_id)
        self.methods.remove(sequence)

    def prepare(self, plan: StepPlan) -> StepPlan:
        """Start computing the masks of a step, in parallel with its forward pass; return its plan with the layers that
        filters or methods read.
        """
        sampled = [span for span in plan.spans if span.needs_sample]
        self.sampler.start_masks((span.sequence, tuple(span.draft_token_ids)) for span in sampled)
        layers: set[int] = set()
        for span in sampled:
            combiners = self.sampler.combiners_of(span.sequence.request_id)
            layers.update(layer for each in combiners for layer in each.layers)
            if (method := self.methods.of(span.sequence)) is not None:
                layers.update(method.layers)
        return replace(plan, layers=tuple(sorted(layers))) if layers else plan

    def needs_only_largest(self, plan: StepPlan) -> bool:
        """Return whether all rows of the step belong to greedy requests that only need the largest logit."""
        return all(
            span.requested_logits is None
            and self.methods.of(span.sequence) is None
            and self.sampler.is_plain_greedy(span.sequence)
            for span in plan.spans
            if span.num_logits
        )

    def decode(self, plan: StepPlan, logits: Tensor, drafts: Mapping[str, Draft]) -> dict[str, list[SampledToken]]:
        """Choose tokens from a step's logits.

        Sequences with a decoding method get no tokens here: the method stores their rows and advances them together
        after the step. An invalid row fails at once.

        Args:
            plan: the computed plan.
            logits: its rows [sample, vocab], with the states of its layers as further columns.
            drafts: drafts by request id.

        Returns:
            by request id, the accepted draft tokens and one token after them; empty if a token has to wait and its span
            must be computed again.
        """
        choices: dict[str, list[SampledToken]] = {}
        rows, sequences, checked = [], [], []
        others: dict[str, OtherLogits] = {}
        states: dict[int, Tensor] = {}
        if plan.layers:
            logits, states = split_columns(logits, self._vocab_size, plan.layers)
        row = 0
        for span in plan.spans:
            sequence, span_rows = span.sequence, range(row, row := row + span.num_logits)
            if span.requested_logits is not None:  # the span has scored prompt rows
                span_rows, wrong = self._score_prompt(span, logits, span_rows)
                if wrong:
                    choices[sequence.request_id] = [failed_token(wrong)]
                    continue
            if not span.needs_sample:
                continue
            combiners = self.sampler.combiners_of(sequence.request_id)
            early = self.early_logits.of_rows(combiners, states, span_rows) if combiners else {}
            if (method := self.methods.of(sequence)) is not None:
                last = {layer: rows[span_rows.start] for layer, rows in states.items()}
                if wrong := method.add(sequence, NextRow(logits[span_rows.start], last, early)):
                    choices[sequence.request_id] = [failed_token(wrong)]
                continue
            rows += span_rows
            sequences.append(sequence)
            drafted = len(span.draft_token_ids)
            checked.append(drafts[sequence.request_id].truncated(drafted) if drafted else NO_DRAFT)
            if early:
                others[sequence.request_id] = OtherLogits(early)
        if sequences:
            chosen = self.sampler.verify(
                logits if len(rows) == len(logits) else logits[rows], sequences, checked, others
            )
            choices |= {sequence.request_id: each for sequence, each in zip(sequences, chosen, strict=True)}
        return choices

    def _score_prompt(self, span: Span, logits: Tensor, rows: range) -> tuple[range, str]:
        """Store the log-probabilities from a prompt's span; return the remaining rows to sample from, and an error."""
        logprobs, scored = span.sequence.prompt_logprobs, rows[: len(rows) - span.needs_sample]
        assert logprobs is not None
        try:
            logprobs += score_prompt(span.sequence, logits[scored.start : scored.stop])
        except BadPromptRow as bad:
            return rows[:0], str(bad)
        return rows[len(scored) :], ""
