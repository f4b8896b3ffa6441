"""`workbench chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.shared import AsJson, Custom, backend_errors
from workbench.errors import WorkbenchError, describe_error, nearest

if TYPE_CHECKING:
    from workbench.engine.runner import Runner
    from workbench.prompt.conversation import Conversation
    from workbench.trace.events import Finished

MAX_ROUNDS = 8  # answers with calls of tools, to one question
MAX_RESULT_CHARACTERS = 20_000


def chat(
    questions: Annotated[
        list[str] | None, typer.Argument(help="what to say; without any, each line of the input")
    ] = None,
    model: Annotated[str, typer.Option(help="a folder, FILE.gguf or demo")] = "demo",
    system: Annotated[str | None, typer.Option(help="the system prompt")] = None,
    tool: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:FUNCTION", help="a tool that the model may call; repeatable")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="how many tokens of an answer at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens up to this mass")] = 0.9,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    overflow: Annotated[str, typer.Option(help="over the context: refuse or cut_oldest")] = "cut_oldest",
    backend: Annotated[str, typer.Option(help="auto, eager (nothing is compiled), mlir, inductor or triton")] = "auto",
    custom: Custom = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a model: answers stream, each begins on the cached prefix of the turns before it."""
    from workbench.engine.load import load
    from workbench.progress import discard, to_stderr
    from workbench.prompt.conversation import Conversation

    talk = Conversation(system=system, tools=[load_function(each) for each in tool or ()])
    settings: dict[str, Any] = {"max_num_seqs": 1, "overflow": overflow, "prefix": "radix"}
    settings |= {"backend": backend, "custom": custom}
    with backend_errors():
        runner = load(model, report=discard if as_json else to_stderr, **settings)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    for question in questions or _lines():
        talk = talk.user(question)
        for _ in range(MAX_ROUNDS):
            talk, finished = answer(runner, talk, sampling, not as_json)
            _report(talk, finished, as_json)
            if not (calls := talk.unanswered_calls):
                break
            for call in calls:
                talk = talk.result(carry_out(talk, call.name, call.arguments), call)


def answer(runner: Runner, talk: Conversation, sampling: dict[str, Any], shown: bool) -> tuple[Conversation, Finished]:
    """Stream the answer to a conversation; return the conversation with it."""
    from workbench.prompt.answers import AnswerFormat, AnswerParser
    from workbench.trace.events import Decoded, Finished

    prompt, finished = runner.assemble(talk, sampling["max_tokens"]), Finished(0.0)
    assert runner.tokenizer is not None and runner.chat_template is not None  # the prompt was made by them
    name = runner.chat_template.choose(talk.template, bool(talk.tools))
    format = AnswerFormat.from_template(runner.chat_template, runner.tokenizer, name)
    parser = AnswerParser(runner.tokenizer, format, format.ends_in_thought(prompt.ids))
    for event in runner.stream(talk, **sampling):
        if isinstance(event, Decoded):
            for piece in parser.push(event.token_id):
                print(piece.text if shown else "", end="", flush=True)
        elif isinstance(event, Finished):
            finished = event
    for piece in parser.finish():
        print(piece.text if shown else "", end="", flush=True)
    return talk.with_turn(parser.turn()), finished


def carry_out(talk: Conversation, name: str, arguments: dict[str, Any]) -> str:
    """Call a tool; what goes wrong is the result that the model reads."""
    tool = next((each for each in talk.tools if each.name == name), None)
    if tool is None or tool.function is None:
        return f"error: no tool is named {name!r}{nearest(name, [each.name for each in talk.tools])}"
    try:
        found = tool.function(**arguments)
    except Exception as error:
        return f"error: {describe_error(error)}"[:MAX_RESULT_CHARACTERS]
    return (found if isinstance(found, str) else json.dumps(found, default=str))[:MAX_RESULT_CHARACTERS]


def load_function(path: str) -> Any:
    """Import the function that MODULE:FUNCTION names."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise WorkbenchError(f"--tool {path}: cannot be imported ({error}); give MODULE:FUNCTION") from None


def _lines() -> Iterator[str]:
    while True:
        print("> " if sys.stdin.isatty() else "", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _report(talk: Conversation, finished: Finished, as_json: bool) -> None:
    figures = {
        "finish_reason": finished.reason, "prompt_tokens": finished.prompt_tokens,
        "cached_tokens": finished.cached_tokens, "output_tokens": len(finished.token_ids),
    }  # fmt: skip
    if as_json:
        turn = talk.turns[-1].model_dump(mode="json", exclude={"generated_ids"})
        print(json.dumps({**turn, **figures}, ensure_ascii=False), flush=True)
        return
    words = f"{figures['output_tokens']} tokens, {figures['finish_reason']}; {figures['cached_tokens']} of "
    print(f"\n[{words}{figures['prompt_tokens']} of the prompt cached]", file=sys.stderr)
