"""Laws of a fleet under simulated time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.scenes import TICK, Scene, fleet, machines, outcome, scenes, wrong_turns
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import KVCacheGroup, PageTransfers
from workbench.model.shapes import named_shape
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import Fair
from workbench.simulate.arrival import Arrival
from workbench.simulate.events import FleetEventAdapter
from workbench.simulate.fleet import Fleet, InstanceFailure, InstancePool, KVTransfer
from workbench.simulate.instance import Instance, InstanceSpec, instance_spec
from workbench.simulate.job import SimulatedRequest
from workbench.simulate.roofline import HARDWARE, ModelSizes
from workbench.simulate.routers import LeastLoaded
from workbench.simulate.source import OpenLoopSource
from workbench.simulate.step_times import TICKS_PER_SECOND, AttentionReach, LinearCost, StepTimeModel
from workbench.trace.events import Event, Routed


def machine_of(ticks: int = 1, **changes: Any) -> InstanceSpec:
    """An instance whose steps take so many ticks, whatever they compute."""
    times = StepTimeModel("ticks", (AttentionReach(None, 0),), (LinearCost(ticks, 0, 0, 0, 0, (0, 0), (0, 0)),))
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=12)
    return replace(InstanceSpec(times, (KVCacheGroup((0,)),), (40,), (8,), 32, 60, limits), **changes)


@settings(max_examples=tries(200))
@given(scenes())
def test_many_steps_in_one_move_are_what_they_are_one_by_one(scene: Scene) -> None:
    assert outcome(fleet(scene).run()) == outcome(fleet(scene, single_step=True).run())


def test_who_comes_amid_a_move_begins_where_the_others_are_by_then() -> None:
    """A tenant that comes while another's request decodes: what was computed in the move so far counts."""
    one = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=12)
    machine = machine_of(2, limits=one, policy=Fair())
    came = [(0, "a", 25), (0, "a", 5), (20, "b", 10), (20, "b", 10), (20, "b", 10)]
    arrivals = [Arrival(at * TICK, 1, output, tenant=tenant) for at, tenant, output in came]
    for one_by_one in (False, True):
        run = Fleet(OpenLoopSource(arrivals), InstancePool(machine, 1), single_step=one_by_one).run()
        begun = sorted(run.jobs, key=lambda job: job.first_scheduled or 0)
        assert [job.number for job in begun] == [0, 2, 3, 1, 4], one_by_one


def test_only_pages_that_were_handed_over_are_here_already() -> None:
    """Those of a later preemption take their time on both ways."""
    moved = list[PageTransfers]()
    machine = machine_of(pages=(10,), page_size=2, receives_kv=True, swap_ticks_per_byte=0.25)
    instance = Instance(machine, 0, on_steps=lambda instance, move: moved.append(move.plan.transfers))
    for number in range(2):
        job = SimulatedRequest(
            number, str(number), Arrival(0.0, 5, 9), 0, 9, (number,) * 5, generated_tokens=1, tokens_on_instance=9
        )
        assert not instance.submit(job, 0, handed_over=True)
    while instance.num_requests:
        instance.start(instance.now)
        instance.finish()
    pages = sum(len(each.swap_outs) + len(each.swap_ins) for each in moved[1:])
    assert moved[0].swap_ins and any(each.swap_ins for each in moved[1:])
    assert instance.now == instance.counters.steps + 2 * pages


@given(scenes())
def test_no_request_is_lost_and_none_is_in_two_places(scene: Scene) -> None:
    run, before = fleet(scene), 0
    while run.advance():
        assert run.now >= before
        before = run.now
        here = [job.number for instance in run.instances for job in instance.jobs.values()]
        under_way = sorted(here + list(run.on_the_way) + [job.number for job, _ in run.stranded])
        assert len(set(under_way)) == len(under_way) == run.in_flight
        assert run.submitted == run.finished + run.failed + run.in_flight
        assert all(instance.up or not instance.jobs for instance in run.instances)
    assert run.in_flight == len(run.stranded) == 0  # a request for an instance that never returns has failed
    assert run.submitted == len(scene["arrivals"])
    for job in run.jobs:
        room = min(pool.spec.context for pool in run.pools) - job.arrival.prompt_tokens
        assert job.output_tokens == max(1, min(job.arrival.output_tokens, room))
        assert job.error or job.generated_tokens == job.output_tokens
        times = (job.arrival_time, job.first_scheduled, job.first_token, job.last_token, job.finish_time)
        assert job.error or list(times) == sorted(time for time in times if time is not None)
        assert len(job.instances) <= len(run.pools) * (job.retries + 1)
        assert job.error or job.computed_tokens + job.cached_tokens >= job.num_tokens - 1
    for instance in (each for each in run.instances if each.up):  # at rest pages are free, or kept for later
        instance.scheduler.kv_cache_manager.transfers_done()  # what came with the last step
        assert all(pool.num_used == 0 for pool in instance.scheduler.pools)
        assert all(
            room.num_used == 0 or instance.spec.prefix for room in instance.scheduler.kv_cache_manager.cpu_pages.pools
        )


@given(scenes())
def test_the_same_again(scene: Scene) -> None:
    assert outcome(fleet(scene).run()) == outcome(fleet(scene).run())


@given(scenes(failing=False))
def test_a_handover_takes_its_latency_and_the_time_of_its_bytes(scene: Scene) -> None:
    sent: list[tuple[int, int, int, int]] = []

    class Watch(FleetEventAdapter):
        def on_handover(self, job: SimulatedRequest, target: Instance, time: int, size: int, ticks: int) -> None:
            assert job.last_token is not None
            sent.append((job.num_tokens - 1, size, ticks, time - job.last_token))

    run, transfer = fleet(scene, listener=Watch(lambda event: None)).run(), scene["transfer"]
    each = scene["pool"].spec.kv_bytes_per_token
    for tokens, size, ticks, taken in sent:
        assert size == round(tokens * each) and ticks == taken
        assert ticks == round((size / transfer.bytes_per_second + transfer.latency) * TICKS_PER_SECOND)
    assert (run.handed_over, run.sent_bytes) == (len(sent), sum(size for _, size, _, _ in sent))


@pytest.mark.parametrize("down", [1, 4, 30])
def test_an_instance_is_down_for_its_time(down: int) -> None:
    """Calls that come meanwhile begin when it is up again, and later ones at once."""
    machine = machine_of()
    arrivals = [Arrival(at * TICK, 1, 2) for at in (6, 50)]
    failures = [InstanceFailure(0, 5 * TICK, down * TICK)]
    run = Fleet(OpenLoopSource(arrivals), InstancePool(machine, 1), failures=failures).run()
    assert [job.first_scheduled for job in run.jobs] == [max(6, 5 + down), 50]


@given(scenes(failing=False), st.integers(0, 400))
def test_stopping_and_going_on_changes_nothing(scene: Scene, ticks: int) -> None:
    halted = fleet(scene).run(until=ticks * TICK)
    assert halted.submitted == halted.finished + halted.failed + halted.in_flight
    assert outcome(halted.run()) == outcome(fleet(scene).run())


@settings(max_examples=tries(50))
@given(machines(), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2000))
def test_more_instances_never_finish_fewer(machine: Any, count: int, fewer: int, more: int, ticks: int) -> None:
    """By any moment, of requests that are alike and come at once; with others a queue may be luckier by chance."""
    alike = [Arrival(0.0, 6, 9)] * count
    finished = [
        Fleet(OpenLoopSource(alike), InstancePool(machine, instances, LeastLoaded())).run(ticks * TICK).finished
        for instances in (fewer, fewer + more)
    ]
    if machine.limits.max_num_seqs >= count and machine.limits.max_num_batched_tokens >= 6 * count:
        assert finished[0] <= finished[1]


@given(scenes())
def test_with_more_instances_all_still_finish(scene: Scene) -> None:
    few = fleet(scene).run()
    more = fleet(scene, pool=replace(scene["pool"], count=scene["pool"].count + 1), failures=()).run()
    assert more.finished >= few.finished


@given(scenes(), st.booleans())
def test_a_decision_that_breaks_a_law_ends_its_request_and_no_other(scene: Scene, split: bool) -> None:
    """Their pages are free, which the laws above hold to; they are not tried again elsewhere."""
    pool = replace(scene["pool"], spec=replace(scene["pool"].spec, policy=wrong_turns))
    decode = replace(pool, spec=replace(pool.spec, receives_kv=True)) if split else None
    run = fleet(scene, pool=pool, decode=decode, failures=()).run()
    for job in run.jobs:
        asked = job.arrival.prompt_tokens
        if not job.instances:  # it could never run
            continue
        assert ("a turn of -1" in job.error) == (asked % 2 == 1 and asked > 1), job
        assert (
            "schedules" not in job.error
            or len(job.instances) == 1
            and job.generated_tokens == 0
            and job.finish_time is not None
        )
    assert run.finished + run.failed == run.submitted


def test_where_no_instance_is_left_requests_fail_and_say_so() -> None:
    """Requests in flight on the last one and later ones fail; with another that stays up, or comes back, none does."""
    failure, pool = InstanceFailure(0, 0.05), InstancePool(_machine(), 1)
    scene = {
        "arrivals": [Arrival(0.0, 100, 2), Arrival(0.0, 100, 2000), Arrival(1.0, 100, 2)], "clients": None,
        "decode": None, "pool": pool, "failures": [failure],
    }  # fmt: skip
    alone = fleet(scene).run()
    assert (alone.finished, alone.failed, alone.in_flight) == (1, 2, 0)
    assert all(job.error.startswith("no instance left") and job.finish_time is not None for job in alone.jobs[1:])
    for changes in ({"pool": replace(pool, count=2)}, {"failures": [replace(failure, downtime=2.0)]}):
        assert fleet(scene, **changes).run().finished == 3
    lost = [replace(failure, instance=1)]  # of the decode pool: no instance could go on with what is prefilled
    apart = fleet(scene, decode=replace(pool, spec=replace(_machine(), receives_kv=True)), failures=lost).run()
    assert (apart.finished, apart.failed, apart.in_flight) == (1, 2, 0)


def test_a_failure_of_no_instance_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="instance 3: there are 0 to 0"):
        fleet(
            {
                "arrivals": (), "clients": None, "decode": None,
                "pool": InstancePool(_machine(), 1), "failures": [InstanceFailure(3, 1.0)],
            }
        )  # fmt: skip


@pytest.mark.parametrize(("fails", "down"), [(4, 1), (4, 20), (30, 1)])
def test_what_is_sent_to_an_instance_that_fails_meanwhile_is_lost(fails: int, down: int) -> None:
    """Also where it is up again before the transfer ends: its pages are gone. One that fails later receives it."""
    machine = machine_of()
    run = Fleet(
        OpenLoopSource([Arrival(0.0, 1, 3)]), InstancePool(machine, 1),
        InstancePool(replace(machine, receives_kv=True), 1), transfer=KVTransfer(1e15, 10 * TICK),
        failures=[InstanceFailure(1, fails * TICK, down * TICK)],
    ).run()  # fmt: skip
    [job] = run.jobs
    lost = fails < 10
    assert (job.retries, run.handed_over, job.generated_tokens, job.error) == (int(lost), 1 + lost, 3, "")


def _machine() -> Any:
    return instance_spec(ModelSizes.dense(named_shape("llama-3.1-8b")), HARDWARE["h100"], SchedulerLimits())


@pytest.mark.parametrize("gpus", [1, 3])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9, 1.0])
def test_weights_and_cache_fill_the_share_of_the_memory(share: float, gpus: int) -> None:
    """Fill it to a page; where the weights leave nothing of it, the model is refused."""
    sizes = ModelSizes.dense(named_shape("llama-3.1-8b"))
    left = share * gpus * HARDWARE["h100"].memory - sizes.weight_bytes
    if left < 0:
        with pytest.raises(WorkbenchError, match="leaves no memory for its cache"):
            instance_spec(sizes, HARDWARE["h100"], SchedulerLimits(), gpus=gpus, memory_share=share)
        return
    made = instance_spec(sizes, HARDWARE["h100"], SchedulerLimits(), gpus=gpus, memory_share=share)
    assert 0 <= left - made.pages[0] * made.page_bytes[0] < made.page_bytes[0]


@given(scenes())
def test_every_placement_is_reported_with_its_reason(scene: Scene) -> None:
    """In a fleet of several instances each request has one `Routed` for each instance that it came to, and one more for
    each retry at most: a transfer may be lost on its way. One that the instance refused has one more."""
    heard: list[Event] = []
    run = fleet(scene, listener=FleetEventAdapter(heard.append)).run()
    sent: dict[str, list[int]] = defaultdict(list)
    for each in heard:
        if isinstance(each, Routed):
            sent[each.request_id].append(each.replica - 1)
            assert each.reason and each.replica in [option.replica for option in each.options]
    if len(run.instances) == 1:
        assert not sent
    else:
        for job in (each for each in run.jobs if each.instances):  # the others were refused where they came
            placed = iter(sent[job.name])
            assert all(instance in placed for instance in job.instances)  # in this order
            assert len(sent[job.name]) <= len(job.instances) + job.retries + bool(job.error)
