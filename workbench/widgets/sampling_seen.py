"""A text with the logits of its positions, and what is to be drawn of one position under some sampling parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError
from workbench.request import SamplingParameters
from workbench.widgets.sampling_picture import Candidate, Sieve

MOST_BYTES = 2**31  # of logits of one text


@dataclass(frozen=True)
class Text:
    """`logits` [token vocab]: the last row is what comes after the whole text, the one before what comes after all but
    its last token, and so on. Position p is the token with p before it."""

    logits: Any = field(repr=False)
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.output_ids)

    @property
    def last(self) -> int:
        return len(self.ids) or len(self.logits)  # of arrays alone nothing is known but their rows

    @property
    def first(self) -> int:
        return self.last - len(self.logits) + 1

    @classmethod
    def of(cls, logits: Any, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()) -> Text:
        """From anything that holds numbers [vocab] or [token vocab]."""
        import torch

        try:
            rows = torch.as_tensor(logits).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise WorkbenchError(f"logits: {error}; give an array [vocab] or [token vocab], or a runner") from None
        rows = rows[None] if rows.ndim == 1 else rows
        if rows.ndim != 2 or not rows.numel() or not rows.is_floating_point():
            given = f"{tuple(rows.shape)} {rows.dtype}"
            raise WorkbenchError(f"logits: {given}; give floating-point numbers [vocab] or [token vocab]")
        text = cls(rows, tuple(map(int, prompt_ids)), tuple(map(int, output_ids)))
        if text.ids and len(rows) > len(text.ids):
            raise WorkbenchError(f"logits: {len(rows)} rows for {len(text.ids)} tokens; a token has one at most")
        wrong = next((token for token in text.ids if not 0 <= token < rows.shape[1]), None)
        if wrong is not None:
            raise WorkbenchError(f"token id {wrong} is outside the vocabulary of {rows.shape[1]} tokens")
        return text

    def history(self, position: int) -> Any:
        from workbench.sampling.filters import History

        return History(self.prompt_ids[:position], self.ids[len(self.prompt_ids) : position])

    def stages(self, position: int, sampling: SamplingParameters) -> Any:
        from workbench.sampling.stages import stages_of

        return stages_of(self.logits[position - self.first], self.history(position), sampling)

    def token(self, position: int) -> int:
        """The token that stands there; -1 after the end."""
        return self.ids[position] if position < len(self.ids) else -1

    def uniforms(self, position: int, seed: int, count: int) -> list[float]:
        """The numbers with which requests of seeds `seed`, `seed + 1`, ... draw this position: samples of one `n`."""
        from workbench.sampling.samplers import uniform

        place = max(0, position - len(self.prompt_ids))
        return [uniform((seed + number) % 2**63, place) for number in range(count)]


@dataclass(frozen=True)
class Seen:
    """All that is drawn of one position."""

    sieves: tuple[Sieve, ...]
    candidates: tuple[Candidate, ...]
    first: tuple[int, float]  # tokens and bits before any filter
    chosen: Candidate | None
    draws: Counter[int] = field(repr=False)


def see(
    text: Text, position: int, sampling: SamplingParameters, draws: int, bars: int, picked: int,
    spell: Callable[[int], str],
) -> Seen:  # fmt: skip
    """`bars` tokens that are likely before or after the filters, the chosen and the picked one; the rest in one."""
    from workbench.sampling.stages import entropy

    found = text.stages(position, sampling)
    before, after = found.model.double().softmax(-1), found.probabilities
    drawn = Counter(found.draw(text.uniforms(position, sampling.seed, draws)))
    shares = [stage.probabilities for stage in found.stages]
    fell = {int(token): number for number, stage in enumerate(found.stages, 1) for token in stage.removed}
    best = before.maximum(after).topk(min(bars, len(before))).indices.tolist()
    chosen = text.token(position)
    named = dict.fromkeys([*best, *(each for each in (chosen, picked) if 0 <= each < len(before))])
    shown = sorted(named, key=lambda token: (-float(before[token]), token))
    candidates = [
        Candidate(
            spell(token), float(before[token]), float(after[token]), fell.get(token, 0), drawn[token],
            tuple(float(share[token]) for share in shares), token, token == chosen, token == picked,
        )
        for token in shown
    ]  # fmt: skip
    if rest := len(before) - len(shown):
        hidden = [float(each.sum() - each[shown].sum()) for each in (before, after, *shares)]
        hidden = [max(0.0, share) for share in hidden]
        others = draws - sum(drawn[token] for token in shown)
        candidates.append(Candidate(f"{rest:,} others", hidden[0], hidden[1], 0, others, tuple(hidden[2:])))
    kept = [1.0, *(stage.kept for stage in found.stages)]
    sieves = tuple(
        Sieve(stage.name, kept[number], stage.kept, stage.left, entropy(shares[number]))
        for number, stage in enumerate(found.stages)
    )
    first = int((found.model > -float("inf")).sum()), entropy(before)
    mine = next((each for each in candidates if each.chosen), None)
    return Seen(sieves, tuple(candidates), first, mine, drawn)
