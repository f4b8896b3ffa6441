"""`workbench chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.agent_output import answer_settings, load_function, round_json, show_run
from workbench.cli.shared import AsJson, Custom, SpokenBy, backend_errors, speaking_model

Tools = Annotated[
    list[str] | None, typer.Option(metavar="MODULE:FUNCTION", help="a tool that the model may call; repeatable")
]
Schema = Annotated[Path | None, typer.Option(metavar="FILE", help="a JSON Schema that the answer's text must keep")]
ThinkingBudget = Annotated[int | None, typer.Option(min=0, help="tokens of a thought before each answer, at most")]

CONVERSATION = {"max_num_seqs": 1, "prefix": "radix", "page_size": 16}  # a short turn fills no longer page


def chat(
    questions: Annotated[
        list[str] | None, typer.Argument(help="what to say; without any, each line of the input")
    ] = None,
    model: SpokenBy = None,
    system: Annotated[str | None, typer.Option(help="the system prompt")] = None,
    tool: Tools = None,
    schema: Schema = None,
    thinking: ThinkingBudget = None,
    max_tokens: Annotated[int, typer.Option(help="how many tokens of an answer at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens up to this mass")] = 0.9,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    overflow: Annotated[str, typer.Option(help="over the context: refuse or cut_oldest")] = "cut_oldest",
    backend: Annotated[str, typer.Option(help="auto, eager (nothing is compiled), mlir, inductor or triton")] = "auto",
    custom: Custom = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a model: answers stream, each begins on the cached prefix of the turns before it.

    With `--json`, one line for each answer, and for each result of a tool.
    """
    from workbench.agents.agent import agent
    from workbench.engine.load import load
    from workbench.progress import discard, to_stderr

    tools = [load_function(each) for each in tool or ()]
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling |= answer_settings(schema, thinking)
    settings: dict[str, Any] = {**CONVERSATION, "overflow": overflow, "backend": backend, "custom": custom}
    report = discard if as_json else to_stderr
    name = speaking_model(model, report)
    with backend_errors():
        runner = load(name, report=report, **settings)
    talking = agent(runner, tools, system, limits={"seconds": None, "tokens": None}, **sampling)
    talk = None
    for question in questions or _lines():
        asked = question if talk is None else talk.user(question)
        known = 1 if talk is None else len(talk.turns) + 1
        result = show_run(talking.stream(asked), as_json, name)
        talk = result.conversation
        if as_json:
            rounds = iter(result.rounds)
            for turn in talk.turns[known:]:
                line = round_json(turn, next(rounds)) if turn.role == "assistant" else turn.model_dump(mode="json")
                print(json.dumps({"model": name, **line}, ensure_ascii=False), flush=True)


def _lines() -> Iterator[str]:
    while True:
        print("> " if sys.stdin.isatty() else "", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
