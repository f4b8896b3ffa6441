"""The control of a record keeps to its end while it follows, stays where a user went, and never leaves the record."""

from __future__ import annotations

import re
import threading

import pytest
import traitlets
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import limit
from workbench.widgets.recorded import Recorded


class View(traitlets.HasTraits):
    step = traitlets.Int(0)


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 4), st.integers(0, 9)),
        st.tuples(st.sampled_from(["view", "control"]), st.integers(-3, 60)),
        st.tuples(st.just("follow"), st.booleans()),
    ),
    max_size=30,
)


@given(st.booleans(), MOVES)
def test_a_step_is_in_the_record_and_its_end_is_followed(grows: bool, moves: list[tuple[str, int, int]]) -> None:
    view = View()
    control = Recorded(view, grows=grows, follow=grows)
    first = last = step = 0
    follow = grows
    for kind, *numbers in moves:
        if kind == "extend":
            first, last = first + numbers[0], max(first + numbers[0], last) + numbers[1]
            wanted = last if follow else max(first, step)
            follow = follow if wanted == step else grows and wanted == last
            step = wanted
            control.extend(first, last)
        elif kind == "follow":
            control.follow = follow = bool(numbers[0])
        elif kind == "view":
            moved = numbers[0] != view.step
            view.step = numbers[0]
            if moved:
                step = min(max(first, numbers[0]), last)
                follow = grows and step == last
        else:
            control.step = numbers[0]
            step = min(max(first, numbers[0]), last)
            follow = grows and step == last
        assert (view.step, control.step, control.follow) == (step, step, follow)
        assert (control.first, control.last) == (first, last)
    control.close()


def test_a_step_that_the_browser_chose_is_not_lost_to_a_thread_that_extends(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View()
    control = Recorded(view, grows=True, follow=True)
    control.extend(0, 5)
    extending, set_trait = threading.Thread(target=control.extend, args=(0, 9)), control.set_trait

    def extended(name: str, value: object) -> None:
        set_trait(name, value)
        if extending.ident is None:  # the step is set and not validated yet
            extending.start()
            extending.join(limit(0.02))

    with monkeypatch.context() as patched:
        patched.setattr(control, "set_trait", extended)
        control.set_state({"step": 2})
    extending.join(limit(60))
    assert (view.step, control.step, control.last, control.follow) == (2, 2, 9, False)
    control.close()


def test_the_browser_shows_each_change_of_what_it_shows() -> None:
    drawn = set(re.findall(r'get\("(\w+)"\)', re.sub(r"(?s)const go =.*const show =", "", Recorded._esm)))
    (heard,) = re.findall(r'const shown = "(.+)";', Recorded._esm)
    assert drawn == set(heard.replace("change:", "").split()) and Recorded._esm.count("(shown, show)") == 2
