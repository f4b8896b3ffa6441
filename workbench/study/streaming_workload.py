"""Settings of the streaming workload."""

from __future__ import annotations

from typing import Literal

from workbench.study.parts import Count, ExperimentSettings, Seed

Delivery = Literal["whole", "events", "stream"]


class StreamingWorkload(ExperimentSettings):
    """Send `requests` at once, all with outputs of full length, to a client in a process of its own.

    `whole`: the client gets each text at its end, and no token is detokenized before. `events`: the same, but every
    token becomes text and an event at once. `stream`: the client gets every token's text as a server-sent event."""

    kind: Literal["streaming"] = "streaming"
    delivery: Delivery = "stream"
    requests: Count = 16
    prompt_tokens: Count = 32
    output_tokens: Count = 128
    rounds: Count = 9  # measured rounds, interleaved, after one warm-up
    seed: Seed = 0
