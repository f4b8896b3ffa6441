"""Run tool calls: all calls of a round in parallel, each in a thread; results and errors become text for the model.

A thread that never ends is abandoned: it blocks neither the loop nor the interpreter's exit.
"""

from __future__ import annotations

import io
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from workbench.agents.arguments import convert_arguments, find_fault
from workbench.errors import nearest
from workbench.prompt.tools import Tool
from workbench.prompt.turns import UNPARSED, ToolCall

CUT = "\n... (cut: {} characters in all)"


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call: the text for the model, and the error if there was one."""

    result: str
    seconds: float = 0.0
    error: str = ""
    printed: str = ""


def failed(message: str, seconds: float = 0.0, printed: str = "") -> CallOutcome:
    """Return the outcome of a call that failed; its result is `error: {message}`."""
    return CallOutcome(f"error: {message}", seconds, message, printed)


def carry_out(
    calls: Sequence[tuple[Tool, ToolCall]],
    seconds: float,
    result_characters: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[tuple[int, CallOutcome]]:
    """Run calls in parallel, and yield (index of the call, its outcome) as they end; calls that take longer than
    `seconds` fail.

    Args:
        calls: tools with functions, and their calls.
        seconds: time limit of all calls together.
        result_characters: maximum length of a result.
        stopped: polled every 50 ms: True ends the wait, without outcomes of unfinished calls.
    """
    ended: queue.SimpleQueue[tuple[int, CallOutcome]] = queue.SimpleQueue()
    waiting = set(range(len(calls)))
    began = time.monotonic()
    with _PRINTED.captured():
        for place, (tool, call) in enumerate(calls):
            work = lambda place=place, tool=tool, call=call: ended.put(  # noqa: E731 (each its own)
                (place, call_tool(tool, call, result_characters))
            )
            threading.Thread(target=work, name=f"tool {tool.name}", daemon=True).start()
        while waiting and not stopped():
            left = began + seconds - time.monotonic()
            try:
                place, outcome = ended.get(timeout=max(0.0, min(left, 0.05)))
            except queue.Empty:
                if left <= 0:
                    break
                continue
            waiting.discard(place)
            yield place, outcome
    if not stopped():
        spent = time.monotonic() - began
        for place in sorted(waiting):
            yield place, failed(f"no result within {seconds:.3g} s", spent)


def call_tool(tool: Tool, call: ToolCall, result_characters: int) -> CallOutcome:
    """Run one call in this thread, and return its outcome."""
    began = time.monotonic()
    printed = _PRINTED.begin()
    try:
        fault = find_call_fault(tool, call)
        if fault:
            return failed(cut(fault, result_characters - len("error: ")))
        assert tool.function is not None
        value = tool.function(**convert_arguments(tool.function, call.arguments))
        text = printed.getvalue() if value is None and printed.getvalue() else result_text(value)
        error = ""
    except SystemExit as end:
        text, error = "", f"the tool called sys.exit({'' if end.code is None else end.code!r})"
    except BaseException as problem:  # the model reads any error of a tool
        text, error = "", _message(problem)
    finally:
        _PRINTED.end()
    seconds, shown = time.monotonic() - began, cut(printed.getvalue(), result_characters)
    if error:
        return failed(cut(error, result_characters - len("error: ")), seconds, shown)
    return CallOutcome(cut(text, result_characters), seconds, printed=shown)


def find_call_fault(tool: Tool, call: ToolCall) -> str:
    """Return the fault in a call's arguments under the tool's schema; empty if there is none."""
    if call.arguments.keys() == {UNPARSED} and UNPARSED not in (tool.parameters.get("properties") or {}):
        return "the arguments are not a JSON object, or are nested too deep"
    return find_fault(call.arguments, tool.parameters)


def unknown_tool(name: str, tools: Sequence[Tool]) -> CallOutcome:
    """Return the outcome of a call of an unknown tool."""
    names = [each.name for each in tools]
    hint = nearest(name, names) or f"; known: {', '.join(names) or 'none'}"
    return failed(f"no tool is named {name[:80]!r}{hint}")


def result_text(value: Any) -> str:
    """Return a tool's result as text: a text unchanged, other values as JSON.

    Raises:
        TypeError, ValueError: for a value that JSON cannot represent.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError:
        kind = type(value).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        raise TypeError(f"the tool returned {article} {kind}, not JSON; return text, numbers, lists or dicts") from None


def cut(text: str, characters: int) -> str:
    """Return the text cut to `characters` characters, with a note of its full length, and without lone surrogates."""
    if len(text) > characters:
        note = CUT.format(len(text))
        text = text[: max(0, characters - len(note))] + note
    return text.encode("utf-8", "replace").decode("utf-8")


def _message(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # an error that cannot be shown as text
        return type(error).__name__


class _PrintedByThread:
    """A `sys.stdout` while tools run: it collects the output of each tool's thread, and passes on all other output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._real: Any = None
        self._texts: dict[int, io.StringIO] = {}

    def captured(self) -> _Capture:
        return _Capture(self)

    def begin(self) -> io.StringIO:
        """Collect the output of this thread from now on."""
        text = self._texts[threading.get_ident()] = io.StringIO()
        return text

    def end(self) -> None:
        self._texts.pop(threading.get_ident(), None)

    def install(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._real, sys.stdout = sys.stdout, self  # type: ignore[assignment] (it writes as a file does)

    def uninstall(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and sys.stdout is self:
                sys.stdout = self._real

    def write(self, text: str) -> int:
        stream: Any = self._texts.get(threading.get_ident(), self._real)
        return stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if threading.get_ident() not in self._texts:
            self._real.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Capture:
    def __init__(self, printed: _PrintedByThread):
        self._printed = printed

    def __enter__(self) -> None:
        self._printed.install()

    def __exit__(self, *_: object) -> None:
        self._printed.uninstall()


_PRINTED = _PrintedByThread()
