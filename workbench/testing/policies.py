"""Check a custom scheduling policy against the laws of the workbench's own."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st

from workbench.engine.lawful import policy_name
from workbench.engine.schedule import parse_policy
from workbench.testing.holding import check_law
from workbench.testing.policy_laws import LAWS, COMPETING_REQUESTS, STARVATION_LAW, check_no_starvation
from workbench.testing.policy_scenes import PolicyScenario, policy_scenarios
from workbench.testing.report import ConformityReport

# One slot or several, few tokens a step or many, pages for all requests or hardly one.
_STARVATION_SCENARIOS = st.builds(
    PolicyScenario, st.just(()), st.sampled_from(["full", "full and window"]), st.sampled_from([10, 40]),
    st.sampled_from([1, 2, 4]), st.sampled_from([4, 24]),
)  # fmt: skip


def check_policy(policy: Any, examples: int = 40, kind: Any = "continuous") -> ConformityReport:
    """Try `policy` on small schedules, and report law by law whether it holds.

    Args:
        policy: a function from `State` to `SchedulerDecision`, or a value of `schedule.policy`: a name, settings, an
            import path. Its `starvation_limit`, in steps, bounds waiting; 200 where it has none.
        examples: schedules tried for each law, equal in every call.
        kind: the schedule's, `continuous` or `static`.

    Raises:
        WorkbenchError: the policy cannot be found or built.
    """
    made = parse_policy(policy, kind)
    laws = [check_law(law, functools.partial(check, made), examples, policy_scenarios()) for law, check in LAWS.items()]
    for rivals in COMPETING_REQUESTS:
        check = functools.partial(check_no_starvation, made, rivals)
        laws.append(check_law(STARVATION_LAW.format(rivals), check, max(2, examples // 10), _STARVATION_SCENARIOS))
    return ConformityReport(f"policy {policy_name(made)}", tuple(laws))
