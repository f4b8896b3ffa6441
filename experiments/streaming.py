"""Judge streaming by the rules of `streaming.yaml`; both were changed after a first run (`CHANGED`)."""

from __future__ import annotations

from statistics import median

from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row

OVERHEAD, SOME = 1.05, 1.01  # times the tokens a second without streaming
SAME, ALIKE = 1.05, 1.25  # times the total time
SOONER, EARLIER = 0.2, 0.5  # of the wait without streaming
RATE = "output_tokens_per_s"
_WORK = RuleChange(
    what="nine rounds of 128 tokens, in both orders, instead of five of 256 in one",
    when="2026-11-21",
    after="a run on a shared machine, which was not kept",
    why="shorter rounds in turn are disturbed alike",
)
_BAR = RuleChange(
    what=(
        "more tokens a second in all rounds but one, instead of in all; in the record of 170701 it was more in every "
        "round, so that it holds by either"
    ),
    when="2026-11-21",
    after="the same run",
    why="one disturbed round of nine should not decide",
)
CHANGED = {"batch-no-stream": (_WORK, _BAR), "stream-perceived": (_WORK,)}


def judge(rows: VariantRows) -> list[Verdict]:
    return [overhead(rows), perceived(rows)]


def overhead(rows: VariantRows) -> Verdict:
    whole, stream = variant_row(rows, "whole"), variant_row(rows, "stream")
    gains = [mine / theirs for mine, theirs in zip(whole["rates"], stream["rates"], strict=True)]
    gain, slower = median(gains), sum(each <= 1 for each in gains)
    predicted = whole[f"predicted_{RATE}"] / stream[f"predicted_{RATE}"]
    holds = gain >= OVERHEAD and slower <= 1
    handled = (stream["handling_s_per_token"] - whole["handling_s_per_token"]) * 1e6
    return Verdict(
        claim="batch-no-stream",
        says="Streaming adds overhead in batch pipelines",
        rule=(
            f"the same requests, their texts to a client whole at the end against token by token: at least "
            f"{OVERHEAD:g} times the output tokens a second in the median of the rounds, more in all but one: holds; "
            f"{SOME:g} times: with limits; less: refuted"
        ),
        outcome="holds" if holds else "holds-with-limits" if gain >= SOME else "refuted",
        reason=(
            f"{whole[RATE]:,.0f} against {stream[RATE]:,.0f} tokens/s: {gain:.3f} times "
            f"({min(gains):.3f} to {max(gains):.3f}); predicted at most {predicted:.3f} times, from {handled:.0f} us "
            f"of handling a token on steps as quick as the roofline"
        ),
        limits=f"{gain - 1:.1%} of the throughput",
        figures={"times the tokens a second, whole": gain},
        changed=CHANGED["batch-no-stream"],
    )


def perceived(rows: VariantRows) -> Verdict:
    whole, stream = variant_row(rows, "whole"), variant_row(rows, "stream")
    total = stream["e2el_s_p50"] / whole["e2el_s_p50"]
    wait = stream["visible_s_p50"] / whole["visible_s_p50"]
    holds = total <= SAME and wait <= SOONER
    alike = total <= ALIKE and wait <= EARLIER
    return Verdict(
        claim="stream-perceived",
        says="Streaming does not change total time, but moves the first visible token from the end to TTFT",
        rule=(
            f"what a client in a process of its own sees, in the median: the last text at most {SAME:g} times as late "
            f"as without streaming, and the first after at most {SOONER:.0%} of the wait: holds; {ALIKE:g} times and "
            f"{EARLIER:.0%}: with limits; else refuted"
        ),
        outcome="holds" if holds else "holds-with-limits" if alike else "refuted",
        reason=(
            f"first text after {stream['visible_s_p50']:.3f} against {whole['visible_s_p50']:.3f} s ({wait:.1%}), "
            f"last after {stream['e2el_s_p50']:.3f} against {whole['e2el_s_p50']:.3f} s ({total:.3f} times)"
        ),
        limits=f"the total is {total:.2f} times as long, the first text comes after {wait:.0%} of the wait",
        figures={"times the total time": total, "share of the wait": wait},
        changed=CHANGED["stream-perceived"],
    )
