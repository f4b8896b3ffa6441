"""From which context on a quantized cache is the smaller one."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.experiment.experiment import Experiment
from workbench.kv_cache.pages import KVCacheGroup
from workbench.memory import capacity
from workbench.model.memory import UNLIMITED_TOKENS, KVGroupBytes, break_even_context, peak_bytes

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "09_experiments.py"
groups = st.sampled_from([8, 16, 32])


@settings(deadline=None)
@given(groups, st.integers(0, 70), st.integers(1, 100), st.integers(1, 12), st.sampled_from([1, 16, 48]))
def test_it_is_what_counting_every_context_finds(group: int, residual: int, chunk: int, size: int, page: int) -> None:
    lag = residual // group * group
    dense = (KVGroupBytes(KVCacheGroup(), 10.0),)
    packed = (
        KVGroupBytes(KVCacheGroup(residual_length=lag, quant_group=group), float(size)),
        KVGroupBytes(KVCacheGroup(sliding_window=lag + group, stride=group), 10.0),
    )
    found = break_even_context(packed, dense, chunk, page)
    smaller = [peak_bytes(packed, n, chunk, page) < peak_bytes(dense, n, chunk, page) for n in range(1, 4000)]
    assert (found == UNLIMITED_TOKENS) == (size >= 10)
    if found < 3000:
        assert all(smaller[found - 1 :]) and (found == 1 or not smaller[found - 2])
    else:
        assert not all(smaller[2900:])


def test_the_notebook_says_what_the_formats_bytes_say() -> None:
    experiment = Experiment.from_values({"question": "q", "workload": {"kind": "random"}})
    text = " ".join(NOTEBOOK.read_text().replace("\n# ", " ").split())
    for chunk, words in ((64, r"it is ([\d,]+) tokens in INT8, and ([\d,]+) in INT4"),
                         (512, r"Then these lengths are ([\d,]+) and ([\d,]+) tokens\.")):  # fmt: skip
        dense = experiment.with_(f"schedule.chunk_tokens={chunk}")
        counted = [
            capacity.break_even_context(dense.with_(f"cache.format={format}"), dense) for format in ("int8", "int4")
        ]
        [stated] = re.findall(words, text)
        assert [f"{tokens:,}" for tokens in counted] == list(stated)
    assert capacity.break_even_context(experiment, experiment) is None
