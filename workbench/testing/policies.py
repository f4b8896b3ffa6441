"""Hold a scheduling policy of your own to the laws that the workbench's own obey."""

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

# With one place and with several, tight in tokens or not, and with pages for everybody or nearly nobody.
_STARVING = st.builds(
    PolicyScene, st.just(()), st.sampled_from(["full", "full and window"]), st.sampled_from([10, 40]),
    st.sampled_from([1, 2, 4]), st.sampled_from([4, 24]),
)  # fmt: skip


def check_policy(policy: Any, examples: int = 40, kind: Any = "continuous") -> Report:
    """Try `policy` on small schedules and report, law by law, whether it keeps them.

    `policy` is a function from `engine.policy.State` to `Wishes`, or whatever `schedule.policy` takes: a name,
    settings, an import path; `kind` is the schedule's, `continuous` or `static`. Each law is tried on `examples`
    schedules, the same ones every time. How long somebody may wait is what the policy has as `patience`, in steps, or
    else 200; what is ahead of it comes on top. Raises WorkbenchError when the policy cannot be found or built.
    """
    made = policy_from(policy, kind)
    laws = [held(law, functools.partial(check, made), examples, scenes()) for law, check in LAWS.items()]
    for rivals in RIVALS:
        check = functools.partial(nobody_starves, made, rivals)
        laws.append(held(STARVING.format(rivals), check, max(2, examples // 10), _STARVING))
    return Report(f"policy {name_of(made)}", tuple(laws))
