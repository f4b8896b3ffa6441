"""Check a custom scheduling policy against the laws of the workbench's own."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st

from workbench.engine.lawful import name_of
from workbench.engine.schedule import policy_from
from workbench.testing.holding import held
from workbench.testing.policy_laws import LAWS, RIVALS, STARVING, nobody_starves
from workbench.testing.policy_scenes import PolicyScene, scenes
from workbench.testing.report import Report

# One slot or several, few tokens a step or many, pages for all requests or hardly one.
_STARVING = st.builds(
    PolicyScene, st.just(()), st.sampled_from(["full", "full and window"]), st.sampled_from([10, 40]),
    st.sampled_from([1, 2, 4]), st.sampled_from([4, 24]),
)  # fmt: skip


def check_policy(policy: Any, examples: int = 40, kind: Any = "continuous") -> Report:
    """Try `policy` on small schedules, and report law by law whether it holds.

    Args:
        policy: a function from `State` to `SchedulerDecision`, or a value of `schedule.policy`: a name, settings, an
            import path. Its `starvation_limit`, in steps, bounds waiting; 200 where it has none.
        examples: schedules tried for each law, equal in every call.
        kind: the schedule's, `continuous` or `static`.

    Raises:
        WorkbenchError: the policy cannot be found or built.
    """
    made = policy_from(policy, kind)
    laws = [held(law, functools.partial(check, made), examples, scenes()) for law, check in LAWS.items()]
    for rivals in RIVALS:
        check = functools.partial(nobody_starves, made, rivals)
        laws.append(held(STARVING.format(rivals), check, max(2, examples // 10), _STARVING))
    return Report(f"policy {name_of(made)}", tuple(laws))
