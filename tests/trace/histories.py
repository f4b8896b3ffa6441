"""Random histories as a runner would tell them, for laws about what is made of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from workbench.trace.events import Decoded, Event, Finished, Preempted, Prefilled, Scheduled, Stepped, Submitted
from workbench.trace.recorder import Recorder

ENDS = ("stop", "length", "cancelled", "error")


@st.composite
def recorders(draw: st.DrawFn, most: int = 5) -> Recorder:
    """Requests that arrive, wait, are prefilled in chunks, decode, are preempted, end; some are refused."""
    recorder = Recorder()
    clock = Clock(draw)
    waiting: list[str] = []
    for index in range(draw(st.integers(0, most))):
        name = f"r{index}"
        arrival = clock.now - draw(st.sampled_from((0.0, 0.25)))
        recorder.record(Submitted(clock.tick(), name, prompt_tokens=7, arrival=arrival, cut_tokens=index))
        if draw(st.booleans()) and draw(st.booleans()):
            recorder.record(Finished(clock.tick(), name, reason="refused", error="too long"))
        else:
            waiting.append(name)
    produced: dict[str, list[int]] = {name: [] for name in waiting}
    absent: set[str] = set(waiting)
    step = 0
    while waiting and step < 12:
        began, plan = clock.now, clock.tick()
        happened: list[Event] = []
        decoded = 0
        for name in list(waiting):
            fate = draw(st.sampled_from(("wait", "prefill", "decode", "decode", "preempted", "end")))
            if fate == "wait" or (fate == "preempted" and name in absent):
                recorder.record(Scheduled(plan, name, step=step, action="waiting", reason="no pages"))
            elif fate == "preempted":
                recorder.record(Preempted(plan, name, step=step, reason="out of pages"))
                absent.add(name)
            else:
                if name in absent:
                    recorder.record(Scheduled(plan, name, step=step, action="admitted", reason="fits"))
                    happened.append(Prefilled(0.0, name, step=step, tokens=3, computed=3))
                    absent.discard(name)
                output = produced[name]
                if fate != "prefill":
                    token = Decoded(0.0, name, "x", step=step, token_id=9, index=len(output), logprob=-0.5)
                    happened.append(token)
                    output.append(9)
                    decoded += 1
                if fate == "end":
                    text, reason = "x" * len(output), draw(st.sampled_from(ENDS))
                    happened.append(Finished(0.0, name, reason=reason, token_ids=tuple(output), output_text=text))
                    waiting.remove(name)
        computed = clock.tick()
        for event in happened:
            recorder.record(replace(event, time=computed))
        end = clock.tick()
        phase = draw(st.sampled_from(("prefill", "decode", "mixed")))
        recorder.record(
            Stepped(
                end, step=step, phase=phase, requests=len(happened), decode_tokens=decoded, prefill_tokens=3,
                pages_used=step, wall_seconds=end - began, forward_seconds=computed - plan, telemetry_seconds=1e-6,
            )
        )  # fmt: skip
        step += 1
    return recorder


class Clock:
    """Seconds that only go forward, from an origin as odd as `perf_counter`'s."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.now = draw(st.floats(1.0, 1e6))

    def tick(self) -> float:
        self.now += self.draw(st.floats(0.0, 0.3))
        return self.now
