"""A page map shows every page once, as the pools have it, under random histories of scheduler, index and host."""

from __future__ import annotations

import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import many_histories
from tests.engine.history import LAYOUTS, POLICIES, SIZE, STOPS, History
from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from tests.helpers.widgets import marks, root_of
from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.kv_cache.format import CacheFormat
from workbench.widgets import PageMap
from workbench.widgets.pages.cells import letters
from workbench.widgets.pages.data import PageSnapshot, SnapshotLog, panels_of_cache, take_snapshot
from workbench.widgets.pages.picture import LAYOUTS as ARRANGED
from workbench.widgets.pages.picture import draw_page_map, draw_strip


class Watched(History):
    """A history of which snapshots are taken where a step is formed and between steps."""

    def watch(self) -> None:
        self.log, self.panels = SnapshotLog(), panels_of_cache(self.manager)
        plan = self.scheduler.plan

        def planned(*given: Any) -> Any:
            made = plan(*given)
            if made is not None:
                self.take({span.sequence.request_id: span.end for span in made.spans})
            return made

        self.scheduler.plan = planned  # type: ignore[method-assign]

    def take(self, ends: dict[str, int] | None = None) -> None:
        seen = take_snapshot(self.scheduler, self.panels, ends, self.log.snapshots[-1] if self.log.snapshots else None)
        self.law(seen)
        self.log.add(seen)

    def law(self, seen: PageSnapshot) -> None:
        """Every page is free, idle or held, as its pool has it, and has the tokens of who holds it."""
        pools = (*self.manager.pools, *self.manager.cpu_pages.pools)
        for panel, pool in enumerate(pools):
            census, kept = seen.census[panel], seen.in_prefix_index[panel]
            names = Counter(page for owner in seen.owners for page in owner.held(panel) if page)
            assert not seen.references[panel][0] and not kept[0], "the null page has no owner"
            for page in range(1, pool.num_pages + 1):
                assert seen.references[panel][page] == names[page] + kept[page] == pool.ref_count(page)
                assert census.num_owners[page] == names[page]
                assert pool.page_size * bool(kept[page] and names[page]) <= census.tokens[page] <= pool.page_size
            idle = [page for page in range(1, pool.num_pages + 1) if kept[page] and not names[page]]
            assert (seen.num_free(panel), seen.num_idle(panel)) == (pool.num_free, len(idle))
            assert seen.num_free(panel) + len(idle) + len(names) == pool.num_pages == seen.panels[panel].pages
            assert panel >= len(self.manager.pools) or idle == sorted(pool.evictable)
            assert sum(seen.num_exclusive(panel)) + seen.num_shared(panel) == len(names)
        numbers = {owner.name: number for number, owner in enumerate(seen.owners)}
        for s in (*self.scheduler.running, *self.scheduler.waiting):
            spare = [page for states in s.states.values() for page in states.all]
            assert (s.request_id in numbers) == (any(map(any, s.pages)) or bool(spare)) or s.swapped is not None
            for t, pages in enumerate(s.pages if s.request_id in numbers else ()):
                number, table, census = numbers[s.request_id], self.manager.groups[t], seen.census[t]
                states = s.states[t].all if t in s.states else ()
                assert seen.owners[number].pages[t] == tuple(pages)
                assert seen.owners[number].next_states[t] == tuple(states)
                before = table.quantized_until(s.num_stored_tokens)
                assert seen.tokens_before[number, t] == before <= seen.tokens[number, t]
                if table.is_recurrent:
                    full = {page: min(s.num_stored_tokens - at * SIZE, SIZE) for at, page in enumerate(pages) if page}
                    full |= dict.fromkeys(states, 0)
                    shared = any(census.num_owners[page] > 1 for page in full)
                    for page, tokens in full.items():
                        assert census.tokens[page] == tokens or shared and census.tokens[page] > tokens
                else:
                    assert seen.tokens[number, t] <= len(pages) * pools[t].page_size or seen.between_steps

    def check(self) -> None:
        super().check()
        self.take()


@given(st.integers(0, 10**6), st.sampled_from(LAYOUTS), st.booleans(), st.sampled_from([0, 6, 20]))
@settings(max_examples=tries(60), deadline=None)
def test_every_page_is_one_thing_and_the_picture_says_which(seed: int, tables: Any, prefix: bool, host: int) -> None:
    draw, history = random.Random(seed), Watched()
    history.begin(
        policy=draw.choice(POLICIES), tables=tables, pages=draw.randint(10, 16), prefix=prefix,
        saves=draw.random() < 0.7, host=host, ttl=draw.choice([None, 5.0]), seed=seed,
    )  # fmt: skip
    history.watch()
    for _ in range(draw.randint(1, 20)):
        many_histories.move(history, draw)
        history.check()
    log = history.log
    for seen in draw.sample(log.snapshots, min(2, len(log.snapshots))):
        for arranged in ARRANGED:
            shows(draw_page_map(seen, log.snapshots, log.owner_numbers, arranged), seen, log, arranged == ARRANGED[0])


def crowded(prefix: bool) -> Watched:
    history = Watched()
    history.begin("continuous fcfs", LAYOUTS[0], 10, prefix, True, 20, None, 0)
    history.watch()
    return history


def test_pages_that_the_index_has_on_the_host_are_accounted_for_until_they_are_back() -> None:
    history = crowded(prefix=True)
    for again in (False, True):
        history.submit(16, 1, 1, 1, False, "", 0)
        history.step(1)
        assert bool(history.manager.cpu_pages.fetched) == again
        history.check()
        history.step(20)
        assert history.manager.prefix_cache is not None
        history.manager.prefix_cache.evict(0, 10, history.manager.transfers)
        history.check()
    assert any(each.num_idle(1) for each in history.log.snapshots)


def test_what_was_on_its_way_back_when_its_sequence_ended_is_accounted_for() -> None:
    history = crowded(prefix=False)
    for _ in range(3):
        history.submit(14, 2, 10, 1, False, "", 0)
    while not history.manager.cpu_pages.swapping_in:
        history.step(1)
    (order,) = history.manager.cpu_pages.swapping_in
    history.end(next(each for each in history.open if each.arrival_index == order), STOPS[0])
    history.check()
    assert [each.name for each in history.log.snapshots[-1].owners][-1] == f"(ended {order})"
    history.finish()


def shows(picture: str, seen: PageSnapshot, log: SnapshotLog, whole: bool) -> None:
    """Assert that the picture has a cell for each page, of the colour of who holds it, with its tokens as a tip."""
    cells = {each["data-key"]: each for each in marks(picture) if re.fullmatch(r"\d+\.\d+", each["data-key"])}
    for panel, about in enumerate(seen.panels):
        ever = max(each.last_used_page[panel] for each in log.snapshots)
        for page in range(1, about.pages + 1):
            owners = [log.owner_numbers[owner.name] for owner in seen.owners if page in owner.held(panel)]
            kept = bool(seen.in_prefix_index[panel][page])
            cell = cells.pop(f"{panel}.{page}", None)
            if cell is None:
                assert page > ever if whole else not (owners or kept)
                continue
            one = "sh" if len(owners) > 1 else f"c{owners[0] % 7}" if owners else "id" if kept else "fr"
            assert cell["class"].split()[0] == one
            if owners:
                assert re.findall(r"^([A-Z]+) ", cell["data-tip"], re.M) == [letters(each) for each in owners[:6]]
                assert f"{int(seen.census[panel].tokens[page])} of {about.page_size} tokens" in cell["data-tip"]
    assert not cells


def test_a_log_is_bounded_and_keeps_the_newest() -> None:
    history = Watched()
    history.begin("continuous fcfs", LAYOUTS[0], 12, True, True, 0, None, 0)
    seen = take_snapshot(history.scheduler, panels_of_cache(history.manager))
    log = SnapshotLog([replace(seen, step=step) for step in range(1000)], max_snapshots=64)
    steps = [each.step for each in log.snapshots]
    assert len(steps) <= 64 and steps[0] == 0 and steps[-32:] == list(range(968, 1000))
    assert len(steps) + log.num_thinned == 1000
    assert [log.at(step).step for step in (-1, 0, 999, 5000)] == [0, 0, 999, 999]
    assert all(log.at(step).step <= step for step in range(1000))


@pytest.fixture(scope="module")
def runner() -> Runner:
    model = model_of(spec_of(layer(dim=8), layer(dim=8, sliding_window=9)))
    packed = CacheFormat(format="int4", quant_group=8, columns=8, residual_length=8)
    return runner_of(model, cache=packed, page_size=8, pages=14, prefix="radix", offload="memory")


@pytest.fixture
def view(runner: Runner) -> Iterator[PageMap]:
    view = PageMap(runner)
    yield view
    RunnerThread.attach(runner).stop()
    view.close()


def run(runner: Runner) -> None:
    asked = RunnerThread.attach(runner).submit([request(f"r<{n}>", 17, 8) for n in range(3)])
    assert asked.wait()


@pytest.fixture(scope="module")
def seen(runner: Runner) -> tuple[PageSnapshot, ...]:
    """A run's, quantized, with a prefix index and a host."""
    view = PageMap(runner)
    run(runner)
    view.close()
    return view.snapshots


def test_a_map_of_a_runner_follows_it_but_does_not_carry_off_who_looks_back(runner: Runner, view: PageMap) -> None:
    before = view.step
    run(runner)
    view.throttle.flush()
    assert view.steps.follow and view.step == view.snapshots[-1].step > before + 7
    assert view.snapshots[-1].between_steps and not view.snapshots[-1].owners
    assert {owner.name for seen in view.snapshots for owner in seen.owners} == {f"r<{n}>" for n in range(3)}
    assert view._repr_mimebundle_()["image/svg+xml"] == view.picture() == view.shown.content
    middle = view.snapshots[len(view.snapshots) // 2]
    view.step = middle.step
    assert not view.steps.follow
    run(runner)
    view.throttle.flush()
    assert view.step == middle.step and f"what step {middle.step} is computed on" in view.shown.content
    view.steps.follow = True
    view.throttle.flush()
    assert view.step == view.snapshots[-1].step
    view.close()
    count = len(view.snapshots)
    run(runner)
    assert len(view.snapshots) == count, "a closed map hears nothing"


def test_a_step_chosen_while_another_thread_draws_stays(
    seen: tuple[PageSnapshot, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    view, ended, faults = PageMap(seen), threading.Event(), list[BaseException]()
    monkeypatch.setattr(view, "picture", str)

    def draw() -> None:
        try:
            while not ended.is_set():
                view.redraw()
        except BaseException as fault:
            faults.append(fault)

    drawing, interval = threading.Thread(target=draw), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    drawing.start()
    try:
        for each in (*seen, *seen):
            if each is not seen[-1]:
                view.steps.follow = True
                view.step = each.step
                view.redraw()
                assert view.step == each.step == view.steps.step and not view.steps.follow
    finally:
        ended.set()
        drawing.join()
        sys.setswitchinterval(interval)
        view.close()
    assert not faults


def test_panels_say_what_is_quantized_and_what_is_not_yet(seen: tuple[PageSnapshot, ...]) -> None:
    titles = [panel.title for panel in seen[0].panels]
    full, rest, windowed = (title.split(" · ")[1:] for title in titles[:3])
    assert full == ["layers 0", "quantized: int4"]
    assert rest == ["layers 0", "residual, in full precision: not quantized yet"]
    assert windowed[0] == "layers 1" and "window 9" in windowed
    assert [panel.on_cpu for panel in seen[0].panels] == [False] * (len(titles) // 2) + [True] * (len(titles) // 2)
    assert any(each.tokens[:, 1].any() for each in seen) and any(each.num_idle(0) for each in seen)


def test_what_is_picked_stands_out(seen: tuple[PageSnapshot, ...]) -> None:
    view = PageMap(list(seen))
    assert not view.steps.follow
    busy = max(seen, key=lambda each: len(each.owners))
    view.step = busy.step
    owner = busy.owners[0]
    panel = 0 if any(owner.pages[0]) else 1
    page = next(page for page in owner.pages[panel] if page)
    view.shown.picked = f"{panel}.{page}"
    assert view.chosen == owner.name and ' dm"' in view.picture()
    view.shown.picked = f"@{owner.name}"
    assert view.chosen == "" and ' dm"' not in view.picture()


def test_it_tells_when_it_was_fullest_and_when_most_was_shared(seen: tuple[PageSnapshot, ...]) -> None:
    view = PageMap(list(seen))
    by_step = {each.step: each for each in seen}
    for panel in range(2):
        free = [each.num_free(panel) for each in seen]
        shared = [each.num_shared(panel) for each in seen]
        assert by_step[view.fullest(panel)].num_free(panel) == min(free) < max(free)
        assert by_step[view.most_shared(panel)].num_shared(panel) == max(shared)


def test_bands_of_one_colour_are_distinguished(seen: tuple[PageSnapshot, ...]) -> None:
    names = list(dict.fromkeys(owner.name for each in seen for owner in each.owners))
    numbers = {name: 7 * number for number, name in enumerate(names)}  # all of the first colour
    busy = max(seen, key=lambda each: len(each.owners))
    strip = next(each for each in root_of(draw_page_map(busy, seen, numbers)).iter() if each.get("class") == "strip")
    bands = [each.attrib for each in strip.iter() if "d" in each.attrib]
    hatches = {each["d"]: each["fill"] for each in bands if each["class"] == "o"}
    plain = [each for each in bands if each["class"] == "c0"]
    assert len(plain) == len(names) >= 3 and len({hatches.get(each["d"]) for each in plain}) == len(plain)
    for owner, own in zip(busy.owners, busy.num_exclusive(0), strict=True):
        expected = f"{letters(numbers[owner.name])} {owner.name}, alone: {own} at step {busy.step}, at most "
        assert [each for each in plain if each["data-tip"].startswith(expected)]
    view = PageMap(list(seen))
    for key, chosen in (("A", names[0]), ("shared", "")):
        view.shown.picked = f"band:0:{key}"
        assert view.chosen == chosen, "a band picks whose it is"


def test_caches_of_one_size_are_drawn_on_one_scale() -> None:
    panel, counts = SimpleNamespace(pages=32, on_cpu=False), (([], 3, 1), ([], 9, 0))
    seen: Any = SimpleNamespace(step=0, between_steps=False, owners=(), panels=(panel, panel), counts=counts)
    strips = [draw_strip(seen, [seen], number, {}, 0.0, 0.0, 100.0) for number in range(2)]
    assert [re.findall(r"(\d+) pages<", each) for each in strips] == [["11"]] * 2


def test_snapshots_that_are_of_no_one_run_are_refused(seen: tuple[PageSnapshot, ...]) -> None:
    with pytest.raises(WorkbenchError, match="each step once"):
        PageMap([seen[0], seen[0]])
    with pytest.raises(WorkbenchError, match="of different caches"):
        PageMap([seen[0], replace(seen[0], step=10**6, panels=seen[0].panels[:1])])
