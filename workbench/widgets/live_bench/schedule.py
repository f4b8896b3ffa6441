"""Check scheduler settings when they are entered, and apply them to a running runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.engine.runner_thread import RunnerThread
from workbench.engine.schedule import changed_schedule
from workbench.errors import describe_error
from workbench.scheduler.policies import BUILT_IN_POLICIES, parse_policy
from workbench.scheduler.validate import policy_name

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

SETTINGS = ("policy", "chunk_tokens", "max_num_seqs")


class ScheduleSettings:
    """The scheduler settings of a runner that a view offers as traits; a policy is given by its name or path.

    `in_force` holds the values that the runner uses now. `policies` maps each name or path to a policy, with the
    runner's present one, which may not be built in.
    """

    def __init__(self, live: RunnerThread):
        self._live, present = live, live.runner.schedule
        policy = getattr(present.policy, "path", "") or policy_name(parse_policy(present.policy))
        chunk = present.max_chunk_tokens
        self.in_force: dict[str, Any] = {
            "policy": policy, "chunk_tokens": chunk, "max_num_seqs": present.max_num_seqs,
        }  # fmt: skip
        self.policies: dict[str, Any] = {name: name for name in BUILT_IN_POLICIES} | {policy: present.policy}
        self._newest: dict[str, object] = {}  # by setting: a token of the latest change

    def check(self, name: str, value: Any) -> None:
        """Raise WorkbenchError if the runner cannot use `value` for the setting `name`."""
        if value == self.in_force[name]:
            return
        runner = self._live.runner
        changed = changed_schedule(runner.config.schedule, runner.schedule, self._setting(name, value))
        parse_policy(changed.policy, changed.kind)

    def change(self, name: str, value: Any, done: Callable[[str, Any], None]) -> None:
        """Change a setting soon, between two steps of the runner.

        Args:
            name: name of the setting.
            value: the new value.
            done: called in the runner's thread with the runner's error ("" on success) and the value in force, unless
                a later change of this setting was requested meanwhile.
        """
        self._newest[name] = asked = object()

        def work() -> None:
            problem = _change(self._live.runner, self._setting(name, value))
            if not problem:
                self.in_force[name] = value
            if self._newest[name] is asked:
                done(problem, self.in_force[name])

        self._live.run_soon(work)

    def _setting(self, name: str, value: Any) -> dict[str, Any]:
        return {name: self.policies.get(value, value) if name == "policy" else value}


def _change(runner: Runner, setting: dict[str, Any]) -> str:
    """Change a setting; return the runner's error, or "" on success."""
    try:
        runner.set_schedule(**setting)
    except Exception as error:
        return describe_error(error)
    return ""
