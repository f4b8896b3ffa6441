"""`workbench agent`: questions that a model answers with tools."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from workbench.cli.agent_output import answer_settings, load_function, show_run
from workbench.cli.chat import CONVERSATION, Schema, ThinkingBudget, Tools
from workbench.cli.shared import AsJson, Custom, SpokenBy, backend_errors, speaking_model


def agent(
    questions: Annotated[list[str], typer.Argument(help="what to ask, one after the other in one conversation")],
    model: SpokenBy = None,
    system: Annotated[str | None, typer.Option(help="the system prompt")] = None,
    tool: Tools = None,
    tool_choice: Annotated[str, typer.Option(help="auto, none, required, or a tool's name")] = "auto",
    parallel: Annotated[bool, typer.Option(help="let one answer have several calls")] = True,
    schema: Schema = None,
    thinking: ThinkingBudget = None,
    max_rounds: Annotated[int, typer.Option(min=1, help="answers to one question at most")] = 8,
    max_seconds: Annotated[float, typer.Option(help="seconds for one question at most")] = 120.0,
    max_tokens: Annotated[int, typer.Option(help="how many tokens of an answer at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    backend: Annotated[str, typer.Option(help="auto, eager (nothing is compiled), mlir, inductor or triton")] = "auto",
    custom: Custom = None,
    as_json: AsJson = False,
) -> None:
    """Ask a model that calls tools: by default a calculator, units, and the standard library's documentation.

    With `--json`, one line for each question: the answer, every turn, and the tokens, calls and results of each round.
    """
    from workbench.agents.agent import agent as make_agent
    from workbench.agents.demo_tools import calculate, convert, lookup
    from workbench.engine.load import load
    from workbench.progress import discard, to_stderr

    tools = [load_function(each) for each in tool or ()] or [calculate, convert, lookup]
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling |= answer_settings(schema, thinking)
    settings: dict[str, Any] = {**CONVERSATION, "backend": backend, "custom": custom}
    report = discard if as_json else to_stderr
    name = speaking_model(model, report)
    with backend_errors():
        runner = load(name, report=report, **settings)
    limits = {"rounds": max_rounds, "seconds": max_seconds}
    asking = make_agent(
        runner, tools, system, tool_choice=tool_choice, parallel_tool_calls=parallel, limits=limits, **sampling
    )
    talk, failed = None, False
    for question in questions:
        result = show_run(asking.stream(question if talk is None else talk.user(question)), as_json, name)
        talk, failed = result.conversation, failed or result.stop_reason == "error"
        if as_json:
            print(json.dumps({"model": name, **result.as_json()}, ensure_ascii=False), flush=True)
        if result.calls:
            break  # they wait for results of the caller
    raise typer.Exit(1 if failed else 0)
