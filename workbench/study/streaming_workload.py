"""What a run of answers that are streamed, or waited for, asks for."""

from __future__ import annotations

from typing import Literal

from workbench.study.parts import Count, Part, Seed

Delivery = Literal["whole", "events", "stream"]


class StreamingWorkload(Part):
    """`requests` at once, all outputs of full length, to a client in a process of its own. `whole`: the client gets
    each text at its end, and no token is looked at before; `events`: the same, though every token becomes text and an
    event when it is known; `stream`: the client gets every token's text by itself, as server-sent events have it."""

    kind: Literal["streaming"] = "streaming"
    delivery: Delivery = "stream"
    requests: Count = 16
    prompt_tokens: Count = 32
    output_tokens: Count = 128
    rounds: Count = 9  # that count, in turn, after one that does not
    seed: Seed = 0
