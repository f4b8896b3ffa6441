"""Measure the time per prefill token from the times at which steps are planned."""

from __future__ import annotations

HALF_LIFE_TOKENS = 2048.0  # prefill tokens after which a measurement has half its weight


class PrefillRate:
    """A measurement of the seconds per prefill token, with the decodes of the same steps included: time / tokens, with
    less weight for older steps. A step in which each prefill has one token left counts as a step of decodes.

    planned   step n            step n + 1         step n + 2
    now     ----|--- n computes ---|--- n + 1 ... ---|
                seconds of step n: from its plan to the next, unless `forget_step` comes between them
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._tokens = 0  # prefill tokens of the last begun step
        self._sum_seconds = self._sum_tokens = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds per prefill token; 0 if no step was measured."""
        return self._sum_seconds / self._sum_tokens if self._sum_tokens else 0.0

    def end_step(self, now: float) -> None:
        """Count the step that began last; its time ends `now`, when the next step is planned."""
        if self._began is not None and self._tokens:
            weight = 0.5 ** (self._tokens / HALF_LIFE_TOKENS)
            self._sum_seconds = weight * self._sum_seconds + max(0.0, now - self._began)
            self._sum_tokens = weight * self._sum_tokens + self._tokens
        self._began = None

    def begin_step(self, now: float, tokens: int) -> None:
        """Begin a step with `tokens` prefill tokens."""
        self._began, self._tokens = now, tokens

    def forget_step(self) -> None:
        """Discard the step that began last, because the time until the next step is not the time of its tokens."""
        self._began = None
