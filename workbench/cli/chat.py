"""`workbench chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.agent_output import load_function, read_schema, show_run
from workbench.cli.shared import (
    AsJson,
    MaxTokens,
    SpokenBy,
    Temperature,
    backend_errors,
    changed_settings,
    settings_option,
    speaking_model,
)

if TYPE_CHECKING:
    from workbench.agents.agent import Agent

System = Annotated[str | None, typer.Option(help="system prompt")]
Tools = Annotated[
    list[str] | None, typer.Option(metavar="MODULE:FUNCTION", help="a tool that the model may call; repeatable")
]
Schema = Annotated[Path | None, typer.Option(metavar="FILE", help="JSON Schema that the answer must match")]
KEYS = "backend, cache.format, sampling.seed, sampling.thinking.budget_tokens"


def chat(
    questions: Annotated[
        list[str] | None, typer.Argument(help="messages to send; lines of standard input unless given")
    ] = None,
    model: SpokenBy = None,
    system: System = None,
    tool: Tools = None,
    schema: Schema = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    set_: Annotated[list[str] | None, settings_option(f"{KEYS}, schedule.overflow=refuse")] = None,
    as_json: AsJson = False,
) -> None:
    """Chat with a model.

    Answers stream; each begins on the cached prefix of the turns before it. `--json` prints a line for each
    question: the answer, every turn, and the tokens, calls and results of each round.
    """
    settings = {
        "sampling": {"max_tokens": max_tokens, "temperature": temperature, "top_p": 0.9},
        "schedule": {"overflow": "cut_oldest"},
        "limits": {"seconds": None, "tokens": None},
    }
    tools = [load_function(each) for each in tool or ()]
    name, talking = talking_agent(model, system, tools, schema, settings, set_, as_json)
    talk = None
    for question in questions or _lines():
        asked = question if talk is None else talk.user(question)
        talk = show_run(talking.stream(asked), as_json, name).conversation


def talking_agent(
    model: str | None, system: str | None, tools: list[Any], schema: Path | None, settings: dict[str, Any],
    changes: list[str] | None, quiet: bool,
) -> tuple[str, Agent]:  # fmt: skip
    """Load the model that answers. Return its name and an agent; `settings` are those of the agent and the engine."""
    from workbench.agents.agent import agent
    from workbench.engine.load import load
    from workbench.progress import discard, to_stderr

    report = discard if quiet else to_stderr
    name = speaking_model(model, report)
    cache = {"prefix": "radix", "page_size": 16}  # a short turn does not fill longer pages
    settings = changed_settings({"model": {"name": name}, "cache": cache, **settings}, changes)
    sampling = settings.pop("sampling") | ({} if schema is None else {"response_format": read_schema(schema)})
    own = {each: settings.pop(each) for each in ("limits", "tool_choice", "parallel_tool_calls") if each in settings}
    with backend_errors():
        runner = load(**settings, max_num_seqs=1, report=report)
    return name, agent(runner, tools, system, **own, **sampling)


def _lines() -> Iterator[str]:
    while True:
        print("> " if sys.stdin.isatty() else "", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
