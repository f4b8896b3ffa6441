"""The comparison of servers: its tokenizer, its load, and what counts as a promise that was kept."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.peers import servers
from experiments.serving_client import Reply


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(servers.made_up_tokenizer(20_000)))


def test_the_made_up_tokenizer_reads_back_every_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 20_000

    @given(st.text(max_size=30))
    def law(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    law()
    pieces = {tokenizer.decode([token]) for token in range(256, 20_000)}
    assert len(pieces) == 20_000 - 256 and all(piece.isascii() for piece in pieces)


@given(st.integers(0, 99), st.sampled_from(servers.RATES))
def test_a_load_is_drawn_from_its_seed_within_its_bounds(seed: int, rate: float) -> None:
    load = servers.draw_load(rate, 1000, random.Random(seed))
    assert load == servers.draw_load(rate, 1000, random.Random(seed))
    assert [each["after"] for each in load] == sorted(each["after"] for each in load)
    for each in load:
        assert 0 <= each["after"] < servers.WINDOW_SECONDS
        assert servers.PROMPTS[0] <= len(each["prompt"]) <= servers.PROMPTS[1]
        assert servers.OUTPUTS[0] <= each["output"] <= servers.OUTPUTS[1]


def reply(ttft: float, tpot: float, tokens: int, prompt: int) -> Reply:
    """Return a stream as servers send it: a chunk a token, the end, usage, the mark of the end."""
    text = [json.dumps({"choices": [{"text": "a", "index": 0}]})] * tokens
    usage = '"choices":[],"usage":' + json.dumps({"total_tokens": prompt + tokens})  # its beginning is cut off
    times = [5 + ttft + tpot * place for place in range(tokens)]
    return Reply(sent=5.0, status=200, times=[*times, times[-1], times[-1]], events=[*text, usage, "[DONE]"])


def test_a_promise_is_kept_by_both_times() -> None:
    load: list[dict[str, Any]] = [{"after": 0.0, "prompt": [1] * 7, "output": 5}] * 3
    times = [(0.9, 0.09), (1.1, 0.01), (0.1, 0.11)]
    found = servers.judge(load, [reply(ttft, tpot, 5, 7) for ttft, tpot in times])
    assert (found["requests"], found["kept"]) == (3, 1)
    assert found["goodput"] == 1 / servers.WINDOW_SECONDS
    assert found["ttft_s"]["p50"] == pytest.approx(0.9) and found["tpot_s"]["p50"] == pytest.approx(0.09)


@pytest.mark.parametrize("fault", ["a token less", "refused"])
def test_an_answer_that_is_not_whole_ends_the_measurement(fault: str) -> None:
    short = reply(0.1, 0.01, 4 if fault == "a token less" else 5, 7)
    short.status = 503 if fault == "refused" else 200
    with pytest.raises(RuntimeError, match="of 5 tokens"):
        servers.judge([{"after": 0.0, "prompt": [1] * 7, "output": 5}], [short])
