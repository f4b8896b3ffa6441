"""Propose draft tokens, choose their number, and report verifications to a proposer. Prompt lookup (Saxena 2023)
proposes the tokens that followed the same n-gram earlier in the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.request import Sequence
from workbench.sampling.verify import NO_DRAFT, Draft
from workbench.scheduler.plan import StepPlan


class Verification(NamedTuple):
    """The outcome of verifying one sequence in a step, which computed its last known token and the draft after it."""

    sequence: Sequence  # all tokens, new ones included
    draft: Draft  # the verified draft, without tokens that did not fit into the step; empty if there was none
    accepted: tuple[int, ...]  # indices of the accepted tokens in the draft
    token_ids: tuple[int, ...]  # new tokens: the accepted ones and the one after them
    # The target's `observed_top_k` most likely tokens by the model's own logits, most likely first: after the last
    # known token, then after each draft token (accepted or not), given the earlier draft tokens. Empty for 0.
    top_tokens: tuple[tuple[int, ...], ...] = ()


class Proposer(Protocol):
    """A proposer of draft tokens. It may keep state per request until `forget`.

    Proposals never change the target's output (for a draft with probabilities: if its tokens are drawn from them).
    """

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        """Return a draft for each sequence, of at most `counts` tokens."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended or restarts."""


class ObservingProposer(Proposer, Protocol):
    """A proposer that observes the verification of its sequences in every step, also in steps without a draft.

    `observed_top_k` is the number of the target's most likely tokens that it reads at each position; with 0 they are
    not computed.
    """

    observed_top_k: int

    def observe(self, verifications: Many[Verification]) -> None: ...


@dataclass
class Speculator:
    """The speculator of a runner: `proposer` chooses draft tokens, this class chooses their number.

    The number is `num_speculative_tokens`, adapted to acceptance if `length` is adaptive, and never more than the
    request can use.
    """

    proposer: Proposer
    num_speculative_tokens: int
    max_model_len: int
    length: Literal["fixed", "adaptive"] = "fixed"
    accept: Literal["rejection", "match"] = "rejection"
    vocab_size: int | None = None  # vocabulary size, for checks of drafts
    name: str = "the proposer"  # name in error messages
    trees: bool = False  # whether drafts may be trees
    _lengths: dict[str, int] = field(default_factory=dict, repr=False)
    _known: dict[str, Sequence] = field(default_factory=dict, repr=False)

    def propose(self, running: Iterable[Sequence]) -> dict[str, Draft]:
        """Return a draft for each decoding sequence that has one."""
        self._sweep()
        asked = [sequence for sequence in running if self._count(sequence) > 0]
        if not asked:
            return {}
        self._known.update((sequence.request_id, sequence) for sequence in asked)
        counts = [self._count(sequence) for sequence in asked]
        drafts = self.proposer.propose(asked, counts)
        self._check(drafts, counts)
        return {sequence.request_id: draft for sequence, draft in zip(asked, drafts, strict=True) if len(draft)}

    @property
    def observed_top_k(self) -> int | None:
        """Return how many of the target's most likely tokens the proposer reads at each position; None if it does not
        observe.
        """
        return getattr(self.proposer, "observed_top_k", None)

    def observe(
        self,
        plan: StepPlan,
        logits: Tensor,
        drafts: Mapping[str, Draft],
        sampled: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Report a step's verifications to the proposer, if it observes.

        Args:
            plan: the computed and committed plan.
            logits: its rows, [sample, vocab].
            drafts: drafts by request id; the plan may have cut them.
            sampled: new tokens by request id: the accepted draft tokens and one after them.
        """
        top_k = self.observed_top_k
        if top_k is None:
            return
        likeliest = _likeliest(logits, top_k) if top_k else []
        found, row = [], 0
        for span in plan.spans:
            row += span.num_logits
            sequence, drafted = span.sequence, len(span.draft_token_ids)
            name = sequence.request_id
            if not span.needs_sample or sequence.beams or not sampled.get(name):
                continue
            self._known[name] = sequence
            draft = drafts[name].truncated(drafted) if drafted else NO_DRAFT
            rows = tuple(map(tuple, likeliest[row - 1 - drafted : row])) if top_k else ()
            found.append(Verification(sequence, draft, draft.follow(sampled[name][:-1]), sampled[name], rows))
        if found:
            self.proposer.observe(found)  # type: ignore[attr-defined] (an ObservingProposer)

    def _check(self, drafts: Many[Draft], counts: Many[int]) -> None:
        """Raise WorkbenchError for invalid drafts."""
        if len(drafts) != len(counts):
            raise WorkbenchError(f"{self.name}: returned {len(drafts)} drafts for {len(counts)} sequences")
        for draft, count in zip(drafts, counts, strict=True):
            if len(draft) > count:
                raise WorkbenchError(f"{self.name}: proposed {len(draft)} tokens, but at most {count} are allowed")
            if draft.parents is not None:
                self._check_tree(draft)
            ids = draft.token_ids
            if ids and self.vocab_size is not None and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
                raise WorkbenchError(
                    f"{self.name}: proposed token {wrong}; the vocabulary has {self.vocab_size} tokens"
                )

    def _check_tree(self, draft: Draft) -> None:
        parents = draft.parents or ()
        if not self.trees:
            raise WorkbenchError(f"{self.name}: proposed a tree; set speculate.tree: true, on backend eager")
        if draft.probabilities is not None:
            raise WorkbenchError(f"{self.name}: a tree's tokens have no probabilities; leave them out")
        if len(parents) != len(draft) or any(not -1 <= parent < place for place, parent in enumerate(parents)):
            raise WorkbenchError(
                f"{self.name}: parents {parents} of {len(draft)} tokens; each token has one, -1 or the place of an "
                "earlier token"
            )

    def record_acceptance(self, request_id: str, drafted: int, accepted: int) -> None:
        """Record how many draft tokens of a sequence were accepted."""
        if self.length == "adaptive":
            change = 2 if accepted == drafted else -1
            self._lengths[request_id] = min(
                self.num_speculative_tokens, max(1, self._lengths.get(request_id, self.num_speculative_tokens) + change)
            )

    def _count(self, sequence: Sequence) -> int:
        if not sequence.is_decoding or sequence.beams:
            return 0
        # The token after the draft also needs a position.
        left = sequence.request.sampling.max_output_tokens - (len(sequence.token_ids) - sequence.prompt_length)
        room = min(left, self.max_model_len - len(sequence.token_ids)) - 1
        return min(self._lengths.get(sequence.request_id, self.num_speculative_tokens), room)

    def clear(self) -> None:
        """Forget every sequence; unfinished ones restart."""
        self._forget(list(self._known))

    def _sweep(self) -> None:
        self._forget([name for name, sequence in self._known.items() if sequence.finish_reason is not None])

    def _forget(self, names: list[str]) -> None:
        for name in names:
            del self._known[name]
            self._lengths.pop(name, None)
            self.proposer.forget(name)


def _likeliest(logits: Tensor, count: int) -> list[list[int]]:
    """Return the tokens with the `count` largest logits of each row [sample, vocab], the largest first."""
    if count == 1:
        return logits.argmax(-1, keepdim=True).tolist()
    return logits.topk(min(count, logits.shape[-1]), dim=-1).indices.tolist()


@dataclass
class PromptLookupProposer:
    """Propose the tokens that followed the last tokens of a text where they occurred before: the longest n-gram, of
    `max_ngram` down to `min_ngram` tokens, at its latest earlier occurrence."""

    min_ngram: int
    max_ngram: int
    _seen: dict[str, _NgramIndex] = field(default_factory=dict, repr=False)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def _draft(self, sequence: Sequence, count: int) -> Draft:
        ids = sequence.token_ids
        seen = self._seen.setdefault(sequence.request_id, _NgramIndex())
        seen.extend(ids, self.min_ngram, self.max_ngram)
        for length in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            place = seen.after.get(tuple(ids[-length:]))
            if place is not None:
                period = len(ids) - place  # the copied tokens may overlap the copy itself
                return Draft(tuple(ids[place + i % period] for i in range(count)))
        return Draft()


@dataclass
class _NgramIndex:
    """The position after the latest occurrence of each n-gram, except those that end with the text's last token."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    known: int = 0  # n-grams are indexed up to this position

    def extend(self, ids: list[int], min_ngram: int, max_ngram: int) -> None:
        for place in range(self.known + 1, len(ids)):
            for length in range(min_ngram, min(max_ngram, place) + 1):
                self.after[tuple(ids[place - length : place])] = place
        self.known = max(self.known, len(ids) - 1)
