"""Propose tokens to verify, decide how many, and show a proposer what came of them. Prompt lookup (Saxena 2023)
proposes what followed the same tokens earlier in the text."""

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
    """The outcome of a step for one sequence: its last known token was computed, and the draft after it."""

    sequence: Sequence  # the new tokens included
    draft: Draft  # as it was verified: what did not fit into the step is not in it; empty without a draft
    accepted: tuple[int, ...]  # places in the draft of the accepted tokens
    token_ids: tuple[int, ...]  # new tokens: the accepted ones and the one after them
    # The target's likeliest tokens by the model's own logits, `observed_top_k` of them, the likeliest first: after the
    # last known token, then after each draft token, accepted or not, given the draft tokens before it. Empty for 0.
    top_tokens: tuple[tuple[int, ...], ...] = ()


class Proposer(Protocol):
    """A proposer of up to `counts` tokens for each sequence. It may keep state per request until `forget`.

    Proposals are free: the target's output stays what it is, whatever is proposed, as long as the tokens of a draft
    with probabilities are drawn from them.
    """

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        """Return a draft for each sequence, of at most as many tokens as its count."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request: it has ended, or starts anew."""


class ObservingProposer(Proposer, Protocol):
    """A proposer that is shown every verification of its sequences, steps without a draft included.

    `observed_top_k` is the number of the target's likeliest tokens that it reads at each position: 0 for none, and
    nothing is computed; 1 for the likeliest.
    """

    observed_top_k: int

    def observe(self, verifications: Many[Verification]) -> None: ...


@dataclass
class Speculator:
    """The speculator of a runner: `proposer` chooses tokens, this class their number.

    The number is `num_speculative_tokens`, adapted to acceptance if `length` is adaptive, and never more than the
    request can use.
    """

    proposer: Proposer
    num_speculative_tokens: int
    max_model_len: int
    length: Literal["fixed", "adaptive"] = "fixed"
    accept: Literal["rejection", "match"] = "rejection"
    vocab_size: int | None = None  # drafts are checked against it
    name: str = "the proposer"  # in errors
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
        """Return how many of the target's likeliest tokens the proposer reads at a position; None if it observes
        nothing."""
        return getattr(self.proposer, "observed_top_k", None)

    def observe(
        self,
        plan: StepPlan,
        logits: Tensor,
        drafts: Mapping[str, Draft],
        sampled: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Show the proposer what a step verified, if it wants to know.

        Args:
            plan: the computed plan, after it was committed.
            logits: its rows, [sample, vocab].
            drafts: drafts by request id, which the plan may have cut.
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
        """Refuse drafts that no step could verify (WorkbenchError)."""
        if len(drafts) != len(counts):
            raise WorkbenchError(f"{self.name}: returned {len(drafts)} drafts for {len(counts)} sequences")
        for draft, count in zip(drafts, counts, strict=True):
            if len(draft) > count:
                raise WorkbenchError(f"{self.name}: proposed {len(draft)} tokens where at most {count} are wanted")
            if draft.parents is not None:
                self._check_tree(draft)
            ids = draft.token_ids
            if ids and self.vocab_size is not None and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
                raise WorkbenchError(
                    f"{self.name}: proposed token {wrong}, which is none of the {self.vocab_size} of the vocabulary"
                )

    def _check_tree(self, draft: Draft) -> None:
        parents = draft.parents or ()
        if not self.trees:
            raise WorkbenchError(f"{self.name}: proposed a tree; set speculate.tree: true, on backend eager")
        if draft.probabilities is not None:
            raise WorkbenchError(f"{self.name}: the tokens of a tree are certain; leave its probabilities out")
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
        # The token after the draft needs a position too.
        left = sequence.request.sampling.max_output_tokens - (len(sequence.token_ids) - sequence.prompt_length)
        room = min(left, self.max_model_len - len(sequence.token_ids)) - 1
        return min(self._lengths.get(sequence.request_id, self.num_speculative_tokens), room)

    def clear(self) -> None:
        """Forget every sequence; unfinished ones start anew."""
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
    """Propose from the latest earlier occurrence of the longest run of last tokens, of `max_ngram` down to
    `min_ngram` tokens."""

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
                period = len(ids) - place  # what is copied may run on into the copy itself
                return Draft(tuple(ids[place + i % period] for i in range(count)))
        return Draft()


@dataclass
class _NgramIndex:
    """The position after the latest occurrence of each n-gram, except those that end with the text's last token."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    known: int = 0  # places up to here are entered

    def extend(self, ids: list[int], min_ngram: int, max_ngram: int) -> None:
        for place in range(self.known + 1, len(ids)):
            for length in range(min_ngram, min(max_ngram, place) + 1):
                self.after[tuple(ids[place - length : place])] = place
        self.known = max(self.known, len(ids) - 1)
