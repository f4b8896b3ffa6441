"""Beam search as its definition says: every text computed whole, every continuation of every beam looked at."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Text = tuple[int, ...]


def beams(
    logprobs: Callable[[Text], Tensor],
    width: int,
    most: int,
    ends: set[int],
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[tuple[Text, float]]:
    """Finished texts and their scores, best first. `logprobs` gives [vocab] after an output."""
    going: list[tuple[float, Text]] = [(0.0, ())]
    finished: list[tuple[float, Text]] = []
    for length in range(1, most + 1):
        longer = [
            (score + value, (*text, token))
            for score, text in going
            for token, value in enumerate(logprobs(text).tolist())
        ]
        longer.sort(reverse=True)
        over = [text[-1] in ends or length == most for _, text in longer]
        for (score, text), done in list(zip(longer, over, strict=True))[:width]:
            if done:
                finished.append((score / length**length_penalty, text))
        finished = sorted(finished, reverse=True)[:width]
        going = [pair for pair, done in zip(longer, over, strict=True) if not done][:width]
        if not going:
            break
        if len(finished) == width:
            reachable = most if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or going[0][0] / reachable**length_penalty <= finished[-1][0]:
                break
    return [(text, score) for score, text in finished]
