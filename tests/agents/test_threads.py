"""Agents beside others: on a runner that a thread owns, and in an interpreter that ends while a tool hangs."""

from __future__ import annotations

import threading

import workbench
from tests.agents.script import add, call, pages_in_use, runner, script
from tests.helpers.processes import python
from tests.patience import until
from workbench.agents.result import AgentResult
from workbench.engine.runner_thread import RunnerThread
from workbench.trace.agent_events import AgentEvent

HANGS = """
import threading
from workbench.agents.calls import carry_out
from workbench.prompt.tools import declare
from workbench.prompt.turns import ToolCall

def hang() -> str:
    \"\"\"Never return.\"\"\"
    threading.Event().wait()

tool = declare(hang)
print([outcome.result for _, outcome in carry_out([(tool, ToolCall(name="hang"))], 0.1, 100)])
"""


def test_agents_share_a_runner_through_its_owner() -> None:
    on, heard = runner(), []
    owner = RunnerThread.attach(on)
    owner.listen(lambda event: heard.append((event, threading.current_thread().name)))
    results: list[AgentResult] = []
    agent = workbench.agent(on, [add], **script("a" + call("add", a=1, b=2), "It is 3."))
    threads = [threading.Thread(target=lambda: results.append(agent.run("q"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.answer for each in results] == ["It is 3."] * 3
    spoken = [(event, where) for event, where in heard if isinstance(event, AgentEvent)]
    assert len({event.agent for event, _ in spoken}) == 3 and {where for _, where in spoken} == {"runner's owner"}
    assert owner.call(pages_in_use) == 0
    run = workbench.agent(on, [add], **{**script("abc" * 1000), "max_tokens": 3000}).stream("q")
    for number, _ in enumerate(run):
        if number == 5:
            run.stop()
    assert run.result.stop_reason == "cancelled"
    run = workbench.agent(on, [add], **{**script("abc" * 1000), "max_tokens": 3000}).stream("q")
    for _ in zip(range(5), run, strict=False):
        pass
    run.close()
    until(lambda: owner.call(pages_in_use) == 0)


def test_a_tool_that_never_ends_does_not_keep_the_interpreter() -> None:
    done = python("-c", HANGS)
    assert (done.returncode, done.stdout) == (0, "['error: no result within 0.1 s']\n"), done.stderr
