"""Print an agent's run as it proceeds, for `workbench chat` and `workbench agent`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError, nearest

if TYPE_CHECKING:
    from workbench.agents.result import AgentResult
    from workbench.agents.rounds import AgentRun
    from workbench.trace.agent_events import AgentEvent

DIM, PLAIN = "\033[2m", "\033[0m"
MAX_RESULT = 300  # number of characters shown of a tool's result


def show_run(run: AgentRun, as_json: bool, model: str) -> AgentResult:
    """Print a run as it goes (text, dimmed thoughts, calls with their results), or its result as one line of JSON;
    return the result."""
    printer = RunPrinter((lambda text: None) if as_json else lambda text: print(text, end="", flush=True), model)
    for event in run:
        printer.show(event)
    if as_json:
        print(json.dumps({"model": model, **run.result.as_json()}, ensure_ascii=False), flush=True)
    return run.result


class RunPrinter:
    """A printer of an agent's events. It shows a tool call once the call is complete, with its arguments, and begins
    each round with the model's name.
    """

    def __init__(self, write: Callable[[str], object], model: str):
        self._write, self._model = write, model
        self._last = self._channel = ""

    def show(self, event: AgentEvent) -> None:
        from workbench.trace.agent_events import AgentFinished, AnswerPiece, CallFinished, CallStarted, RoundFinished

        if isinstance(event, AnswerPiece):
            if event.channel != "call":
                if event.channel != self._channel:
                    self._line()
                self._channel = event.channel
                self._put(event.text, event.channel == "thought")
        elif isinstance(event, CallStarted):
            self._line()
            self._put(f"→ {event.name}({json.dumps(event.arguments, ensure_ascii=False)})\n")
        elif isinstance(event, CallFinished):
            self._line()
            more = " ..." if len(event.result) > MAX_RESULT else ""
            self._put(f"← {event.name}: {event.result[:MAX_RESULT]}{more}\n")
        elif isinstance(event, RoundFinished):
            self._line()
            self._channel = ""
            words = f"{event.prompt_tokens} prompt tokens, {event.cached_tokens} of them cached"
            thought = f", {event.thinking_tokens} of them a thought" if event.thinking_tokens else ""
            self._put(
                f"[{self._model}, round {event.round}: {words}, {event.computed_tokens} computed; "
                f"{event.output_tokens} of the answer{thought}; {event.finish_reason}]\n", True,
            )  # fmt: skip
        elif isinstance(event, AgentFinished):
            self._line()
            if event.stop_reason != "end_turn":
                self._put(f"[ended: {event.stop_reason}{f': {event.error}' if event.error else ''}]\n", True)

    def _line(self) -> None:
        if self._last and not self._last.endswith("\n"):
            self._put("\n")

    def _put(self, text: str, dim: bool = False) -> None:
        self._last = text or self._last
        self._write(f"{DIM}{text}{PLAIN}" if dim and text and _is_coloured() else text)


def _is_coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def load_function(path: str) -> Any:
    """Import the function named by MODULE:FUNCTION; modules in the current folder are found as well."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise WorkbenchError(f"--tool {path}: must be MODULE:FUNCTION")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a module may raise any exception
        raise WorkbenchError(f"--tool {path}: cannot be imported ({error}); must be MODULE:FUNCTION") from None
    if not hasattr(found, name):
        hint = nearest(name, [each for each in dir(found) if not each.startswith("_")])
        raise WorkbenchError(f"--tool {path}: cannot be imported ({module} has no {name!r}){hint or ''}")
    return getattr(found, name)


def read_schema(path: Path) -> dict[str, Any]:
    """Return the JSON Schema in a file as a response_format."""
    from workbench.files import UnreadableText, read_bytes

    try:
        schema = json.loads(read_bytes(path))
    except (UnreadableText, OSError) as error:
        raise WorkbenchError(f"--schema {path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:
        raise WorkbenchError(f"--schema {path}: is not JSON ({error})") from None
    if not isinstance(schema, dict | bool):
        raise WorkbenchError(f"--schema {path}: a JSON Schema must be an object, not {type(schema).__name__}")
    return {"kind": "json_schema", "json_schema": schema}
