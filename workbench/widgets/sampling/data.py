"""Hold a text with the logits of its positions, generate it in the background, and compute the figures of one position
under given sampling parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.units import format_bytes
from workbench.widgets.job import Job
from workbench.widgets.sampling.picture import CandidateToken, FilterFigures

MAX_LOGITS_BYTES = 2**31  # limit for the logits of one text


@dataclass(frozen=True)
class TextLogits:
    """A text with `logits` [token vocab] for its last positions.

    The last row predicts the token after the whole text, the row before it predicts the text's last token, and so on.
    Position p is the token with p tokens before it."""

    logits: Any = field(repr=False)
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.output_ids)

    @property
    def last_position(self) -> int:
        return len(self.ids) or len(self.logits)  # without ids only the number of rows is known

    @property
    def first_position(self) -> int:
        return self.last_position - len(self.logits) + 1

    @classmethod
    def from_array(cls, logits: Any, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()) -> TextLogits:
        """Make a text from an array of floating-point numbers [vocab] or [token vocab].

        Raises:
            WorkbenchError: the array has another shape or type, or does not fit the token ids.
        """
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
        from workbench.sampling.filter_trace import trace_filters

        return trace_filters(self.logits[position - self.first_position], self.history(position), sampling)

    def token(self, position: int) -> int:
        """Return the token id at a position, or -1 after the end."""
        return self.ids[position] if position < len(self.ids) else -1

    def uniforms(self, position: int, seed: int, count: int) -> list[float]:
        """Return the uniform numbers that requests with the seeds `seed`, `seed + 1`, ... draw at this position."""
        from workbench.sampling.samplers import uniform

        place = max(0, position - len(self.prompt_ids))
        return [uniform((seed + number) % 2**63, place) for number in range(count)]


class BackgroundCompletion:
    """A prompt that `runner` continues in the background, with growing `ids`; a given `output` replaces the
    generation."""

    def __init__(self, runner: Any, prompt: str | Sequence[int] | None, output: str | Sequence[int] | None):
        if prompt is None:
            raise WorkbenchError("prompt: a runner needs one, as text or token ids")
        self.runner = runner
        self.prompt_ids = self._encoded(prompt)
        self.output_ids = None if output is None else self._encoded(output)
        self.ids: list[int] = []
        self._handle: Any = None
        self._job: Job | None = None

    def begin(
        self,
        sampling: SamplingParameters,
        on_token: Callable[[], None],
        on_end: Callable[[TextLogits | None, str], None],
    ) -> None:
        """Start and return at once; `on_token` is called as `ids` grow, `on_end` with text or None, and an error."""
        from workbench.engine.runner_thread import RunnerThread

        live = RunnerThread.attach(self.runner)
        self.ids = [*self.prompt_ids, *(self.output_ids or ())]
        if self.output_ids is None:
            self._handle = live.submit(Request(live.new_request_id("sampling-explorer"), self.prompt_ids, sampling))

        found: list[TextLogits] = []

        def end(job: Job) -> None:
            on_end(found[0] if found else None, job.error)

        def work(_: Job) -> None:
            found.append(self._followed(live, on_token))

        self._job = Job(work, end, self._stop_request, "sampling explorer")
        self._job.start()

    def stop(self) -> None:
        if self._job is not None:
            self._job.stop()

    def _stop_request(self) -> None:
        if self._handle is not None:
            self._handle.stop()

    @property
    def working(self) -> bool:
        return self._job is not None and not self._job.done

    def wait(self, seconds: float | None) -> None:
        if self._job is not None:
            self._job.wait(seconds)

    def _followed(self, live: Any, news: Callable[[], None]) -> TextLogits:
        for event in self._handle if self.output_ids is None else ():
            if event.kind == "decoded":
                self.ids.append(event.token_id)
                news()
            elif event.kind == "finished" and event.error:
                raise WorkbenchError(event.error)
        if (size := 4 * len(self.ids) * self.runner.model.spec.vocab_size) > MAX_LOGITS_BYTES:
            needed = f"{len(self.ids):,} tokens would take {format_bytes(size)}"
            raise WorkbenchError(f"prompt, max_tokens: the logits of {needed}; look at a shorter text")
        logits = live.call(lambda runner: runner.model.logits(self.ids))
        return TextLogits.from_array(logits, self.ids[: len(self.prompt_ids)], self.ids[len(self.prompt_ids) :])

    def _encoded(self, given: str | Sequence[int]) -> tuple[int, ...]:
        return self.runner.make_requests(given, {})[0].prompt_ids if isinstance(given, str) else tuple(map(int, given))


@dataclass(frozen=True)
class PositionFigures:
    """All figures of one position: the effect of each filter, the candidate tokens, and the number of draws by token
    id."""

    sieves: tuple[FilterFigures, ...]
    candidates: tuple[CandidateToken, ...]
    first: tuple[int, float]  # tokens and bits before any filter
    chosen: CandidateToken | None
    draws: Counter[int] = field(repr=False)


def position_figures(
    text: TextLogits, position: int, sampling: SamplingParameters, draws: int, num_bars: int, picked: int,
    spell: Callable[[int], str],
) -> PositionFigures:  # fmt: skip
    """Return the figures of a position.

    The candidates are the `num_bars` likeliest tokens before or after the filters, the text's own token and the
    `picked` one, and one entry for all others. `draws` is the number of draws; `spell` returns a token's text."""
    from workbench.sampling.filter_trace import entropy_bits

    found = text.stages(position, sampling)
    before, after = found.model.double().softmax(-1), found.probabilities
    drawn = Counter(found.draw(text.uniforms(position, sampling.seed, draws)))
    shares = [stage.probabilities for stage in found.steps]
    fell = {token: number for number, stage in enumerate(found.steps, 1) for token in stage.removed.tolist()}
    best = before.maximum(after).topk(min(num_bars, len(before))).indices.tolist()
    chosen = text.token(position)
    named = dict.fromkeys([*best, *(each for each in (chosen, picked) if 0 <= each < len(before))])
    shown = sorted(named, key=lambda token: (-float(before[token]), token))
    candidates = [
        CandidateToken(
            spell(token), float(before[token]), float(after[token]), fell.get(token, 0), drawn[token],
            tuple(float(share[token]) for share in shares), token, token == chosen, token == picked,
        )
        for token in shown
    ]  # fmt: skip
    if rest := len(before) - len(shown):
        hidden = [float(each.sum() - each[shown].sum()) for each in (before, after, *shares)]
        hidden = [max(0.0, share) for share in hidden]
        others = draws - sum(drawn[token] for token in shown)
        candidates.append(CandidateToken(f"{rest:,} others", hidden[0], hidden[1], 0, others, tuple(hidden[2:])))
    kept = [1.0, *(stage.kept_mass for stage in found.steps)]
    sieves = tuple(
        FilterFigures(stage.name, kept[number], stage.kept_mass, stage.num_left, entropy_bits(shares[number]))
        for number, stage in enumerate(found.steps)
    )
    first = int((found.model > -float("inf")).sum()), entropy_bits(before)
    mine = next((each for each in candidates if each.chosen), None)
    return PositionFigures(sieves, tuple(candidates), first, mine, drawn)
