"""An instance that fails has done the steps that ended by then, that of the same moment too."""

from __future__ import annotations

import pytest

from workbench.kv_cache.pages import KVCacheGroup
from workbench.simulate.arrival import Arrival
from workbench.simulate.instance import Instance, InstanceSpec
from workbench.simulate.job import SimulatedRequest
from workbench.simulate.step_times import AttentionReach, LinearCost, StepTimeModel

TICKS = 4  # of a step
OUTPUT = 6


@pytest.mark.parametrize("single_step", [True, False])
@pytest.mark.parametrize("now", range(TICKS * OUTPUT))
def test_tokens_of_ended_steps_are_kept(now: int, single_step: bool) -> None:
    costs = (LinearCost(TICKS, 0, 0, 0, 0, (0,), (0,)),)
    times = StepTimeModel("four ticks a step", (AttentionReach(None, 0),), costs)
    instance = Instance(InstanceSpec(times, (KVCacheGroup((0,)),), (40,), (8,), 32, 60), 0, single_step=single_step)
    job = SimulatedRequest(0, "r", Arrival(0.0, 1, OUTPUT), 0, OUTPUT, prompt=(1,), tokens_on_instance=OUTPUT)
    assert instance.submit(job, 0) == "" and instance.start(0) == []
    while instance.current is not None and instance.current.end <= now:  # as a fleet does
        end = instance.current.end
        instance.finish()
        instance.start(end)
    assert [job.name for job in instance.fail(now)] == ["r"]
    assert job.generated_tokens == now // TICKS
