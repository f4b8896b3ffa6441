"""`workbench agent`: let a model answer questions with tools."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.agent_output import load_function, show_run
from workbench.cli.chat import KEYS, Schema, System, Tools, talking_agent
from workbench.cli.shared import AsJson, MaxTokens, SpokenBy, Temperature, settings_option


def agent(
    questions: Annotated[list[str], typer.Argument(help="questions, asked one after another in one conversation")],
    model: SpokenBy = None,
    system: System = None,
    tool: Tools = None,
    schema: Schema = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    set_: Annotated[list[str] | None, settings_option(f"{KEYS}, limits.rounds, limits.seconds, tool_choice")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a model that calls tools.

    The default tools are a calculator, units, and the standard library's documentation. `--json` prints a line for each
    question: the answer, every turn, and the tokens, calls and results of each round.
    """
    from workbench.agents.demo_tools import calculate, convert, lookup

    settings = {
        "sampling": {"max_tokens": max_tokens, "temperature": temperature},
        "limits": {"rounds": 8, "seconds": 120.0},
    }
    tools = [load_function(each) for each in tool or ()] or [calculate, convert, lookup]
    name, asking = talking_agent(model, system, tools, schema, settings, set_, as_json)
    talk, failed = None, False
    for question in questions:
        result = show_run(asking.stream(question if talk is None else talk.user(question)), as_json, name)
        talk, failed = result.conversation, failed or result.stop_reason == "error"
        if result.calls:
            break  # the calls wait for results of the caller
    raise typer.Exit(1 if failed else 0)
