"""Measure what a token of a prompt costs, from the times at which steps are planned."""

from __future__ import annotations

HALF_LIFE_TOKENS = 2048.0  # prefill tokens after which a measurement counts half


class PrefillRate:
    """Seconds per prefill token, decodes of the same steps included: time over tokens, older steps counting less. A
    step whose prefills have one token left each is a step of decodes.

    planned   step n            step n + 1         step n + 2
    now     ----|--- n computes ---|--- n + 1 ... ---|
                seconds of step n: from its plan to the next, unless `forget_step` comes between them
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._tokens = 0  # prefill tokens of the step that began last
        self._sum_seconds = self._sum_tokens = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds of a step for each prefill token in it; 0 while none is measured."""
        return self._sum_seconds / self._sum_tokens if self._sum_tokens else 0.0

    def end_step(self, now: float) -> None:
        """Count the step that was begun last; another is planned now."""
        if self._began is not None and self._tokens:
            weight = 0.5 ** (self._tokens / HALF_LIFE_TOKENS)
            self._sum_seconds = weight * self._sum_seconds + max(0.0, now - self._began)
            self._sum_tokens = weight * self._sum_tokens + self._tokens
        self._began = None

    def begin_step(self, now: float, tokens: int) -> None:
        """Begin a step with `tokens` prefill tokens."""
        self._began, self._tokens = now, tokens

    def forget_step(self) -> None:
        """Leave out the step that was begun last: the time until the next one is not what its tokens take."""
        self._began = None
