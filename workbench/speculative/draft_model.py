"""Propose tokens by a small draft model; its KV cache follows the tokens that the target accepted.

On the backend mlir, one call of compiled code proposes several tokens for every sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_kernels.decode_step import DecodeSteps
from workbench.errors import WorkbenchError
from workbench.executors.contention import StepThreads
from workbench.executors.packing import bucket_for
from workbench.executors.programs.decode_step import check_mlir_step, step_shape, step_tensors
from workbench.executors.step_runner import StepRunner
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.store import KVStore
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.request import Request, Sequence
from workbench.sampling.filters import Filter, History, Temperature
from workbench.sampling.samplers import RandomSampler, sample_categorical, uniform
from workbench.sampling.sampling_state import SamplingState, build_sampling_state
from workbench.sampling.verify import DRAFT_STREAM, NO_DRAFT, Draft
from workbench.scheduler.plan import Span, StepPlan
from workbench.speculative.proposers import Verification


class Drawing(NamedTuple):
    """The random numbers that draw a sequence's draft tokens. Each number in [0, 1) draws one token from the softmax of
    the logits divided by `temperature`.
    """

    temperature: float
    uniforms: list[float]


class MultiStep(Protocol):
    """A function that runs several decode steps in one call, and returns `steps` tokens for each sequence.

    The tokens follow each sequence's next token to be computed. The first ones are `known`; the others are the most
    likely tokens, or drawn if the sequence has a `Drawing`. A sequence's tokens end early at low confidence (see
    `DraftModelProposer`). If any token is drawn, the logits of the steps [step, sequence, vocab] are returned too; they
    are valid until the next call.
    """

    def __call__(
        self, sequences: Many[Sequence], steps: int, known: Many[Many[int]], draws: Many[Drawing | None], /
    ) -> tuple[list[list[int]], Tensor]: ...


class StopRule(Protocol):
    """A rule that ends drafts at low confidence: called before each draft token is chosen.

    Its arguments are the draft's distribution of that token for each sequence, after the request's filters [row,
    vocab], and the request ids of the rows. It returns a bool for each row: whether the draft ends before the token. It
    may also observe verifications by the two members of `ObservingProposer`.
    """

    def __call__(self, probabilities: Tensor, request_ids: Many[str], /) -> Tensor: ...


@dataclass
class DraftModelProposer:
    """Propose the tokens of a draft model for the target's sequences. Each request's sampling parameters choose them:
    the most likely token if greedy, otherwise a draw from the draft's logits after the request's filters.

    `kv_cache_manager` owns the pages that `executor` computes on. If pages run out, a sequence gets no draft. With
    `common_random_numbers` a token is drawn with the same random number that the target will use, so that both tend to
    agree.

    A draft ends before the first position where the probability of the draft's most likely token, after the request's
    filters, is below `confidence_threshold`, or where `stop` returns True. Outputs keep their distribution: whether a
    position is proposed depends only on the earlier tokens, so a proposed token has exactly the distribution that it is
    verified with. (Dropping a token because *that token* was unlikely would be wrong: the remaining tokens would no
    longer have this distribution.)
    """

    spec: ModelSpec
    executor: StepRunner
    kv_cache_manager: KVCacheManager
    max_num_batched_tokens: int  # maximum tokens of a step
    common_random_numbers: bool = False
    confidence_threshold: float = 0.0
    multi_step: MultiStep | None = None
    stop: StopRule | None = None
    _followed: dict[str, _DraftSequence] = field(default_factory=dict, repr=False)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        wanted = {
            sequence.request_id: min(count, self.spec.max_position_embeddings - len(sequence.token_ids))
            for sequence, count in zip(sequences, counts, strict=True)
        }
        followed = [self._follow(sequence) for sequence in sequences if wanted[sequence.request_id] > 0]
        together = self.multi_step is not None and all(each.plainly for each in followed)
        mine = self._catch_up(followed, wanted, 2 if together else 1)
        if together and mine:
            self._at_once(mine, wanted)
        else:
            self._one_by_one(mine, wanted)
        drafts = {each.name: each.draft() for each in mine}
        return [drafts.get(sequence.request_id, NO_DRAFT) for sequence in sequences]

    @property
    def observed_top_k(self) -> int | None:
        """Return the `observed_top_k` of `stop`; None if it does not observe."""
        return getattr(self.stop, "observed_top_k", None)

    def observe(self, verifications: Many[Verification]) -> None:
        self.stop.observe(verifications)  # type: ignore[union-attr] (called where it has observed_top_k alone)

    def forget(self, request_id: str) -> None:
        if callable(forget := getattr(self.stop, "forget", None)):
            forget(request_id)
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            self.kv_cache_manager.free(followed.own)

    def _follow(self, sequence: Sequence) -> _DraftSequence:
        """Return the draft's sequence, updated to the target's tokens."""
        each = self._followed.get(sequence.request_id)
        if each is None:
            own = Sequence.from_request(
                Request(sequence.request_id, sequence.request.prompt_ids), sequence.arrival_index
            )
            own.length_limit = sequence.length_limit
            own.pages = tuple([] for _ in self.kv_cache_manager.pools)
            each = self._followed[sequence.request_id] = _DraftSequence(
                own, build_sampling_state(sequence.request, self.spec.vocab_size)
            )
        each.sync(sequence.token_ids)
        self.kv_cache_manager.update_after_step(each.own)
        return each

    def _one_by_one(self, mine: list[_DraftSequence], wanted: Mapping[str, int]) -> None:
        for place in range(max((wanted[each.name] for each in mine), default=0)):
            ready = [each for each in mine if wanted[each.name] > place and not each.unsure]
            if not ready:
                break
            plan = StepPlan(0, tuple(Span(each.own, each.own.num_computed_tokens, 1, True) for each in ready))
            self._choose(ready, self.executor.forward(plan))
            for each in ready:
                each.own.num_computed_tokens += 1

    def _at_once(self, mine: list[_DraftSequence], wanted: Mapping[str, int]) -> None:
        """Draft all tokens in one call; every sequence starts as many tokens back as the one furthest behind
        (recomputing known tokens does not change results).
        """
        assert self.multi_step is not None
        back = max(each.own.num_new_tokens for each in mine)
        for each in mine:
            each.own.num_computed_tokens = max(0, each.known - back)
        back = min(each.own.num_new_tokens for each in mine)  # fewer if a text is even shorter
        for each in mine:
            each.own.num_computed_tokens = each.known - back
        known = [each.own.token_ids[each.known - back + 1 :] for each in mine]
        steps = back - 1 + max(wanted[each.name] for each in mine)
        steps = min(steps, *(self.spec.max_position_embeddings - each.own.num_computed_tokens for each in mine))
        draws = [each.drawing(back, steps, self._use) for each in mine]
        found, logits = self.multi_step([each.own for each in mine], steps, known, draws)
        for row, (each, tokens) in enumerate(zip(mine, found, strict=True)):
            drafted = tokens[back - 1 : back - 1 + wanted[each.name]]
            if each.draws and drafted:
                each.drawn_from(logits[back - 1 : back - 1 + len(drafted), row])
            each.own.token_ids += drafted
            # If it ended at low confidence, its last token was computed to find that out.
            unsure = len(tokens) < min(steps, back - 1 + wanted[each.name])
            each.own.num_computed_tokens = len(each.own.token_ids) - (not unsure)

    def _catch_up(self, followed: list[_DraftSequence], wanted: Mapping[str, int], last: int) -> list[_DraftSequence]:
        """Compute all but `last` known tokens, and return the sequences with pages for their drafts; others free their
        pages.
        """
        asked = {each.name for each in followed}
        while True:
            for each in list(followed):
                if not self._allocate(each.own, wanted[each.name] - 1, asked):
                    followed.remove(each)
                    self.forget(each.name)
            left, spans = self.max_num_batched_tokens, []
            for own in (each.own for each in followed):
                if own.num_new_tokens > last and (length := min(own.num_new_tokens - 1, left)):
                    spans.append(Span(own, own.num_computed_tokens, length, False))
                    left -= length
            if not spans:
                return followed
            self.executor.forward(StepPlan(0, tuple(sorted(spans, key=lambda span: span.length > 1))))
            for span in spans:
                span.sequence.num_computed_tokens = span.end
                self.kv_cache_manager.update_after_step(span.sequence)

    def _allocate(self, own: Sequence, more: int, asked: set[str]) -> bool:
        """Allocate pages for the next step with `more` draft tokens, if needed by freeing sequences that are not in
        `asked`; return success.
        """
        while (missing := self.kv_cache_manager.pages_to_allocate(own, more)) is not None:
            if self.kv_cache_manager.first_exhausted_group(missing) is None:
                self.kv_cache_manager.allocate(own, more)
                return True
            idle = next((name for name in self._followed if name not in asked), None)
            if idle is None:
                return False
            self.forget(idle)
        return True

    @property
    def _use(self) -> bytes:
        return b"" if self.common_random_numbers else DRAFT_STREAM

    def _choose(self, ready: list[_DraftSequence], logits: Tensor) -> None:
        """Append a token to each sequence, and record the probabilities it was drawn from; sequences with low
        confidence get none.
        """
        groups: dict[tuple[Filter, ...], list[int]] = {}
        for row, each in enumerate(ready):
            groups.setdefault(each.sampling_state.filters, []).append(row)
        for filters, rows in groups.items():
            left = (logits if len(rows) == len(ready) else logits[rows]).float()
            for rule in filters:
                left = rule(left, [ready[row].history for row in rows])
            if self.confidence_threshold or self.stop is not None:
                ends = self._ends(left.double().softmax(-1), [ready[row].name for row in rows])
                for row, unsure in zip(rows, ends, strict=True):
                    ready[row].unsure = unsure
                if not (sure := [place for place, row in enumerate(rows) if not ready[row].unsure]):
                    continue
                if len(sure) < len(rows):
                    left, rows = left[sure], [rows[place] for place in sure]
            drawing = [place for place, row in enumerate(rows) if ready[row].draws]
            tokens = left.argmax(-1).tolist() if len(drawing) < len(rows) else [0] * len(rows)
            if drawing:
                chances = (left if len(drawing) == len(rows) else left[drawing]).double().softmax(-1)
                found = sample_categorical(chances, [ready[rows[place]].uniform(self._use) for place in drawing])
                for place, token, row in zip(drawing, found, chances, strict=True):
                    tokens[place] = token
                    ready[rows[place]].chances.append(row)
            for row, token in zip(rows, tokens, strict=True):
                ready[row].own.token_ids.append(token)

    def _ends(self, probabilities: Tensor, names: list[str]) -> list[bool]:
        """Return whether each row's draft ends before the token of `probabilities` [row, vocab]."""
        if self.stop is None:
            return [not each >= self.confidence_threshold for each in probabilities.amax(-1).tolist()]
        found = self.stop(probabilities, names)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != (len(names),):
            what = f"{list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise WorkbenchError(f"speculate.stop: returned {what} for {len(names)} rows, must be [row] of torch.bool")
        return found.tolist()


@dataclass
class _DraftSequence:
    """A target's sequence in the draft model: `known` tokens, followed by draft tokens sampled from `chances`."""

    own: Sequence
    sampling_state: SamplingState
    known: int = 0
    chances: list[Tensor] = field(default_factory=list)
    unsure: bool = False  # position of the token after the draft

    @property
    def name(self) -> str:
        return self.own.request_id

    @property
    def draws(self) -> bool:
        return isinstance(self.sampling_state.sampler, RandomSampler)

    @property
    def history(self) -> History:
        return History(self.own.request.prompt_ids, self.own.output_ids)

    @property
    def plainly(self) -> bool:
        """Return whether tokens are chosen from logits that are only changed by a temperature."""
        way = self.sampling_state
        return (
            way.sampler is not None and not way.custom_filters and all(isinstance(f, Temperature) for f in way.filters)
        )

    def drawing(self, back: int, steps: int, use: bytes) -> Drawing | None:
        """Return the random numbers for a call of `steps` steps; the first `back` - 1 steps have known tokens."""
        if not self.draws:
            return None
        uniforms = [0.0] * (back - 1) + [self.uniform(use, ahead) for ahead in range(steps - back + 1)]
        return Drawing(self.sampling_state.request.sampling.temperature, uniforms)

    def drawn_from(self, logits: Tensor) -> None:
        """Record the probabilities of the draft tokens, given their `logits` [drafted, vocab]."""
        for rule in self.sampling_state.filters:
            logits = rule(logits, ())
        self.chances = list(logits.double().softmax(-1))

    def sync(self, token_ids: list[int]) -> None:
        """Update to the target's `token_ids`; rejected draft tokens are dropped."""
        own, same = self.own, self.known
        while same < min(len(own.token_ids), len(token_ids)) and own.token_ids[same] == token_ids[same]:
            same += 1
        own.token_ids[same:] = token_ids[same:]
        own.num_computed_tokens = min(own.num_computed_tokens, same, len(token_ids) - 1)
        self.known, self.chances, self.unsure = len(token_ids), [], False

    def uniform(self, use: bytes, ahead: int = 0) -> float:
        position = len(self.own.token_ids) - self.own.prompt_length + ahead
        return uniform(self.sampling_state.request.sampling.seed, position, use)

    def draft(self) -> Draft:
        return Draft(tuple(self.own.token_ids[self.known :]), torch.stack(self.chances) if self.chances else None)


class CompiledDraftSteps:
    """A `MultiStep` of compiled code: up to `max_steps` steps in one call, compiled by bucket of rows, on a model's
    weights and a store's pages.

    A row ends before the first token with a probability below `confidence_threshold`; the steps end when all rows have
    ended.
    """

    def __init__(self, model: Transformer, store: KVStore, max_steps: int, confidence_threshold: float = 0.0):
        self.model, self.store, self.max_steps = model, store, max_steps
        self.confidence_threshold = confidence_threshold
        self._steps: dict[tuple[int, bool], DecodeSteps] = {}
        self._threads = StepThreads()

    def __call__(
        self, sequences: Many[Sequence], steps: int, known: Many[Many[int]], draws: Many[Drawing | None]
    ) -> tuple[list[list[int]], Tensor]:
        """Run `steps` steps as described in `MultiStep`; a `known` token never ends a row."""
        bucket = self._of(bucket_for(len(sequences)), self.confidence_threshold > 0 or any(draws))
        count = len(sequences)
        forced = [[row[step] if step < len(row) else -1 for row in known] for step in range(steps)]
        bucket.forced_tokens.numpy()[:steps, :count] = forced
        bucket.ids.numpy()[:count] = [own.token_ids[own.num_computed_tokens] for own in sequences]
        lengths = bucket.lengths.numpy()
        lengths[:count] = [own.num_computed_tokens + 1 for own in sequences]
        lengths[count:] = 1
        for group, table in enumerate(bucket.tables):
            rows = table.numpy()
            rows[count:] = 0
            for row, own in enumerate(sequences):
                pages = own.pages[group]
                rows[row, : len(pages)] = pages
                rows[row, len(pages) :] = 0
        if bucket.weighs:  # a fixed number of threads, since sums of probabilities depend on it
            self._weigh(bucket, steps, draws)
            bucket(steps)
        else:
            self._threads.run(f"drafts {bucket.shape.rows}", lambda threads: bucket(steps, threads), steps)
        chosen = bucket.next_tokens.numpy()[:steps, :count].T.tolist()
        if bucket.weighs:
            chosen = [row[:kept] for row, kept in zip(chosen, bucket.kept.tolist(), strict=False)]
        return chosen, bucket.all_logits

    def _weigh(self, bucket: DecodeSteps, steps: int, draws: Many[Drawing | None]) -> None:
        """Set each row's temperature, random numbers and number of wanted tokens."""
        kept, scale, uniforms = (part.numpy() for part in (bucket.kept, bucket.scale, bucket.uniforms))
        kept[: len(draws)], kept[len(draws) :] = steps, 0
        uniforms[:steps], scale[:] = -1, 1
        for row, drawing in enumerate(draws):
            if drawing is not None:
                scale[row] = 1 / drawing.temperature
                uniforms[:steps, row] = drawing.uniforms

    def _of(self, rows: int, weigh: bool) -> DecodeSteps:
        if (rows, weigh) not in self._steps:
            model, context = self.model, self.model.spec.max_position_embeddings
            check_mlir_step(model, self.store)
            shape = step_shape(model, self.store.page_size, rows, self.store.specs)
            tensors = step_tensors(model, self.store)
            assert model.embedding is not None
            tensors["embedding"] = model.embedding.weight
            for rotary in shape.rotary_dims:
                cos, sin = model.rotary[rotary](torch.arange(context))
                tensors |= {
                    f"all_cos_{rotary}": cos.float().contiguous(),
                    f"all_sin_{rotary}": sin.float().contiguous(),
                }
            self._steps[rows, weigh] = found = DecodeSteps(shape, tensors, self.max_steps, context, weigh)
            if weigh:
                found.threshold[0] = self.confidence_threshold
        return self._steps[rows, weigh]
