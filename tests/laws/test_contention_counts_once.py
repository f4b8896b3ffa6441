"""The share of the processor that others had: each second of this process's children counts as its own, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workbench.machine.processor import CpuTimes, others_cpu_share

SECONDS = st.integers(0, 5).map(float)


@given(SECONDS, SECONDS, st.lists(st.tuples(SECONDS, SECONDS, st.booleans(), st.booleans()), max_size=4))
def test_others_share_is_what_neither_we_nor_our_children_used(
    own: float, others: float, children: list[tuple[float, float, bool, bool]]
) -> None:
    """A child has used seconds before, uses some now, may be new, and may end and be waited for."""
    before_below, after_below, waited, used = {}, {}, 0.0, own
    for number, (before, now, is_new, ends) in enumerate(children):
        before = 0.0 if is_new else before
        used += now
        if not is_new:
            before_below[number] = before
        if ends:
            waited += before + now
        else:
            after_below[number] = before + now
    busy, total = used + others, used + others + 10.0
    earlier = CpuTimes(100.0, 50.0, 7.0, before_below)
    later = CpuTimes(100.0 + total, 50.0 + busy, 7.0 + own + waited, after_below)
    share = others_cpu_share(earlier, later)
    assert share is not None and abs(share - others / total) < 1e-9
