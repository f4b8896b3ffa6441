"""`workbench top`: it shows what a server answers, and says in one line what is wrong with an address or a key."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.command_line import answer, cli, refused
from workbench.cli.top import render
from workbench.engine.load import load
from workbench.serve.call import Caller
from workbench.serve.errors import ApiError
from workbench.serve.gate import OpenGate
from workbench.serve.server import serve
from workbench.serve.watch.snapshot import (
    STATES,
    LatencyPercentiles,
    Meter,
    PageUse,
    RequestStatus,
    ServerSnapshot,
    TokenRate,
)

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ServerSnapshot(
    time=100.0,
    model="demo-chat",
    uptime=3725.0,
    requests={**dict.fromkeys(STATES, 0), "waiting": 1, "decode": 1, "finished": 1234},
    prompt_tokens_per_second=12.5,
    output_tokens_per_second=40.25,
    rates=tuple(TokenRate(40.0 + second, 0, second) for second in range(60)),
    ttft=LatencyPercentiles(3, 0.01, 0.02, 0.5),
    tpot=LatencyPercentiles(2, 0.003, 0.004, 0.005),
    pages=PageUse(3, 4, 5),
    prompt_tokens=200,
    cached_tokens=50,
    meters=(Meter("alice: tokens a minute", 60, 60, "tokens", 12.0), Meter("alice: today", 0.5, None, "USD")),
    recent=(
        RequestStatus("[bold]one\x1b[2J", "decode", 90.0, 90.1, 90.2, 99.9, None, 40, 16, 7, "alice"),
        RequestStatus("two", "waiting", 99.0, prompt_tokens=9),
        RequestStatus("three", "finished", 80.0, 80.1, 80.2, 81.2, 81.2, 40, 0, 11, "alice", "stop"),
    ),
)


@contextmanager
def serving(status: int, body: bytes, headers: dict[str, str] | None = None) -> Iterator[tuple[str, list[dict]]]:
    """Answer every request so; yield the address, and the headers of what came."""
    came: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            came.append({"path": self.path} | {name.lower(): value for name, value in self.headers.items()})
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


BODY = json.dumps(SNAPSHOT.to_dict()).encode()


def text_of(snapshot: ServerSnapshot, count: int = 10) -> str:
    screen = Console(width=140, record=True, file=io.StringIO())
    screen.print(render(snapshot, "http://here", count))
    return screen.export_text()


def test_every_figure_is_shown() -> None:
    text = text_of(SNAPSHOT)
    assert "demo-chat  http://here  up 1:02 h" in text
    assert "waiting 1  prefill 0  decode 1  finished 1,234  cancelled 0  failed 0" in text
    assert "40.2 tokens/s" in text and "12.5 tokens/s" in text and "█ to 59" in text
    assert "p50 10 ms, p90 20 ms, p99 500 ms" in text and "p50 3 ms" in text
    assert "3 used, 4 idle, 5 free" in text and "25%" in text and "50 of 200 prompt tokens from the cache" in text
    assert "60 tokens" in text and "12 s" in text and "0.5" in text


def test_requests_under_way_come_first_and_markup_of_their_ids_is_text() -> None:
    lines = text_of(SNAPSHOT).splitlines()
    rows = [line for line in lines if line.split(" ")[0].startswith(("[bold]", "two", "three"))]
    assert [row.split()[0] for row in rows] == ["two", "[bold]one\N{REPLACEMENT CHARACTER}[2J", "three"]
    assert rows[1].split()[1:] == ["decode", "10", "s", "40", "16", "7", "200", "ms", "1.62", "s"]
    assert rows[2].split()[-1] == "stop"
    assert "1 more" in text_of(SNAPSHOT, 2)


def test_a_server_that_has_done_nothing_is_shown_too() -> None:
    assert "0 used, 0 idle, 0 free" in text_of(ServerSnapshot(time=0.0))


@pytest.mark.parametrize("base", ["{}", "{}/", "{}/v1", "127.0.0.1:{port}"])
def test_one_snapshot_as_json(base: str) -> None:
    with serving(200, BODY) as (url, came):
        found = answer("top --key sk-a --once", base.format(url, port=url.rsplit(":")[-1]))
    assert ServerSnapshot.from_dict(found) == SNAPSHOT
    assert [(each["path"], each["authorization"]) for each in came] == [("/v1/server", "Bearer sk-a")]


def test_once_prints_it_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_KEY", "sk-b")
    with serving(200, BODY) as (url, came):
        assert "p50 10 ms" in cli("top --once", url).out
    assert came[0]["authorization"] == "Bearer sk-b"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"{}", "refuses access (401); give a key with the scope admin: --key"),
        (403, b"{}", "refuses access (403)"),
        (404, b"", "has no /v1/server: it is not a workbench server"),
        (503, b"", "/v1/server answers 503 Service Unavailable"),
        (302, b"", "/v1/server answers 302 Found"),
        (200, b"<html>", "does not answer with JSON: it is not a workbench server"),
        (200, b"[]", "is no snapshot of a server"),
    ],
)
def test_an_answer_that_is_no_snapshot_is_one_line(status: int, body: bytes, said: str) -> None:
    with (
        serving(200, BODY) as (elsewhere, keys_came),
        serving(status, body, {"location": elsewhere} if status == 302 else None) as (url, _),
    ):
        assert said in refused("top --once", url)
    assert keys_came == [], "no redirect is followed: the key would go along"
    assert f"no server answers at {url} (Connection refused); `workbench serve MODEL`" in refused("top", url)


class KeyGate(OpenGate):
    """A gate with two keys: `one` may do everything, `two` may ask models."""

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        key = headers.get("authorization", "").removeprefix("Bearer ")
        if key not in ("one", "two"):
            raise ApiError("authentication_error", "no key")
        return Caller(key, scopes=frozenset({"*", "admin"} if key == "one" else {"*"}))

    def meters(self) -> Iterable[Meter]:
        return SNAPSHOT.meters


def test_a_server_of_the_workbench_shows_its_work_to_administrators() -> None:
    runner = load("demo-chat", backend="eager", prefix="radix", page_size=16)
    with serve(runner, gate=KeyGate()) as server:
        body = {"model": "demo-chat", "prompt": [5] * 40, "max_tokens": 4, "ignore_eos": True}
        for _ in range(2):
            asked = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(),
                {"authorization": "Bearer two", "content-type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(asked) as response:
                call_id = json.loads(response.read())["id"]
        shown = ServerSnapshot.from_dict(answer("top --key one", server.url))
        for key, code in (("two", 403), ("three", 401)):
            assert f"refuses access ({code}); give another key" in refused(f"top --key {key}", server.url)
    assert shown.model == "demo-chat" and shown.requests == {**dict.fromkeys(STATES, 0), "finished": 2}
    assert shown.recent[-1].id == call_id and shown.recent[-1].output_tokens == 4
    assert (shown.prompt_tokens, shown.cached_tokens) == (80, 32) and shown.meters == SNAPSHOT.meters
    assert shown.pages.used == 0 < shown.pages.idle
    assert shown.pages.total == runner.kv_cache.manager.pools[0].num_pages
    assert not server.log._watchers


@pytest.mark.processes
def test_in_a_terminal_q_ends_it_and_leaves_the_terminal_as_it_was() -> None:
    import termios

    shown = replace(SNAPSHOT, model="in-a-terminal")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with serving(200, json.dumps(shown.to_dict()).encode()) as (url, came):
        command = [sys.executable, "-m", "workbench", "top", url]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        run = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        text = b""
        while b"in-a-terminal" not in text:
            text += os.read(ours, 65536)  # ends with the test's time limit where it never comes
        os.write(ours, b"q")
        drained = threading.Thread(target=_drain, args=(ours,), daemon=True)
        drained.start()
        assert run.wait() == 0
        assert came
    assert termios.tcgetattr(theirs)[3] == before[3]
    os.close(theirs)


def _drain(handle: int) -> None:
    try:
        while os.read(handle, 65536):
            pass
    except OSError:  # the other end is closed
        pass


@pytest.mark.parametrize(
    ("used", "limit", "is_red"), [(59, 60, False), (60, 60, True), (61, 60, True), (9, None, False)]
)
def test_what_is_used_up_is_red(used: float, limit: float | None, is_red: bool) -> None:
    console = Console(file=io.StringIO(), record=True, width=140, force_terminal=True, color_system="standard")
    console.print(render(replace(SNAPSHOT, meters=(Meter("m", used, limit, "units"),)), "http://here"))
    (row,) = (line for line in console.export_text(styles=True).splitlines() if f"{used} units" in line)
    assert ("\x1b[31m" in row) == is_red


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "now"), (-1.0, "now"), (0.5, "500 ms"), (59.0, "59 s"), (60.0, "1:00 min"), (None, "–")],
)
def test_a_limit_is_free_again_in_so_long(seconds: float | None, words: str) -> None:
    shown = text_of(replace(SNAPSHOT, meters=(Meter("m", 1, 2, "units", seconds),)))
    (row,) = (line for line in shown.splitlines() if "1 units" in line)
    assert row.strip().rpartition("  ")[2] == words
