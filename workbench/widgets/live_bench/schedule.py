"""Check a scheduler's settings as they are entered, and hand them to a runner that is busy."""

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
    """The settings of a runner's scheduler that a view has as traits: a policy is its name, or a path.

    `in_force` are the values by which the runner plans. Its policy may be one that no name says; `policies` has it by
    what stands for it.
    """

    def __init__(self, live: RunnerThread):
        self._live, present = live, live.runner.schedule
        policy = getattr(present.policy, "path", "") or policy_name(parse_policy(present.policy))
        chunk = present.max_chunk_tokens
        self.in_force: dict[str, Any] = {
            "policy": policy, "chunk_tokens": chunk, "max_num_seqs": present.max_num_seqs,
        }  # fmt: skip
        self.policies: dict[str, Any] = {name: name for name in BUILT_IN_POLICIES} | {policy: present.policy}
        self._newest: dict[str, object] = {}  # by setting: the change that was asked for last

    def check(self, name: str, value: Any) -> None:
        """Raise WorkbenchError where the runner cannot take the value."""
        if value == self.in_force[name]:
            return
        runner = self._live.runner
        changed = changed_schedule(runner.config.schedule, runner.schedule, self._setting(name, value))
        parse_policy(changed.policy, changed.kind)

    def change(self, name: str, value: Any, done: Callable[[str, Any], None]) -> None:
        """Change a setting between two steps of the runner, soon.

        Args:
            name: of the setting.
            value: the new value.
            done: receives, in the owner's thread, why the runner refused it (else an empty text) and the value in
                force, unless another change of this setting was asked for meanwhile.
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
    """Change a setting; return why it was refused, an empty text where it was not."""
    try:
        runner.set_schedule(**setting)
    except Exception as error:
        return describe_error(error)
    return ""
