"""`workbench top`: watch a server in the terminal."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import typer

from workbench.cli.shared import AsJson, console, print_json
from workbench.errors import WorkbenchError
from workbench.units import format_duration, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from workbench.serve.watch.snapshot import RequestStatus, ServerSnapshot

PATH = "/v1/server"
KEY_VARIABLE = "WORKBENCH_KEY"
TIMEOUT_SECONDS = 10.0
BLOCKS = "▁▂▃▄▅▆▇█"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STATE_STYLES = {"waiting": "yellow", "prefill": "dark_orange", "decode": "blue", "cancelled": "dim", "failed": "red"}
MAX_LINES = 32  # rows of requests if the output is not a terminal


def top(
    url: Annotated[str, typer.Argument(help="a server's address, as `workbench serve` prints it")],
    key: Annotated[
        str | None, typer.Option(help=f"key with the scope admin, if the server requires keys; or {KEY_VARIABLE}")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print one snapshot and exit")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a server in the terminal.

    Shows requests by state, tokens per second, latencies, pages, cache hits, limits and costs, every second; q or
    Ctrl-C quits. `--json` prints one snapshot.
    """
    address = _address(url)
    read = _reader(address, key or os.environ.get(KEY_VARIABLE, ""))
    snapshot = read()
    if as_json:
        print_json(snapshot.to_dict())
    elif once or not sys.stdout.isatty():
        console().print(render(snapshot, address))
    else:
        _watch(read, snapshot, address)


def _watch(read: Callable[[], ServerSnapshot], snapshot: ServerSnapshot, address: str) -> None:
    from rich.live import Live

    screen = console()
    note = "q ends"
    with _key_presses() as pressed, Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(snapshot, address, max(3, screen.height - 12), note), refresh=True)
            if pressed(1.0) in ("q", "Q", "\x1b"):
                return
            try:
                snapshot, note = read(), "q ends"
            except WorkbenchError as error:  # the server may be restarting: keep the last numbers and show the error
                note = f"no answer: {error}; q ends"


@contextmanager
def _key_presses() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits the given seconds for a key, and returns the key or ""."""
    try:
        import termios
        import tty
    except ImportError:  # Windows: only Ctrl-C quits
        yield lambda seconds: time.sleep(seconds) or ""
        return
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    before = termios.tcgetattr(sys.stdin)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(sys.stdin)
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _NoRedirect(HTTPRedirectHandler):
    """Follow no redirect, because the key would be sent to the new address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _address(url: str) -> str:
    """Return a server's address without a path; accepts `127.0.0.1:8000` and a client's base URL."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # the port is not a number
        wrong = True
    if wrong:
        raise WorkbenchError(f"{url!r} is not a server's address; give an address such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _reader(address: str, key: str) -> Callable[[], ServerSnapshot]:
    """Return a function that asks the server for a snapshot.

    It raises WorkbenchError if the address, the key or the answer is wrong.
    """
    from workbench.serve.watch.snapshot import ServerSnapshot

    handlers = [ProxyHandler({})] if urlsplit(address).hostname in LOOPBACK else []
    opener = build_opener(_NoRedirect, *handlers)
    asked = Request(address + PATH, headers={"authorization": f"Bearer {key}"} if key else {})

    def read() -> ServerSnapshot:
        try:
            with opener.open(asked, timeout=TIMEOUT_SECONDS) as answer:
                values = json.loads(answer.read())
        except HTTPError as error:
            raise WorkbenchError(_refusal(address, error, bool(key))) from None
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise WorkbenchError(
                f"no server answers at {address} ({getattr(reason, 'strerror', None) or reason}); "
                "`workbench serve MODEL` starts one and prints its address"
            ) from None
        except ValueError:
            raise WorkbenchError(f"{address}{PATH} does not answer with JSON: it is not a workbench server") from None
        return ServerSnapshot.from_dict(values, f"what {address}{PATH} answers")

    return read


def _refusal(address: str, error: HTTPError, has_key: bool) -> str:
    if error.code in (401, 403):
        wanted = "another key" if has_key else "a key"
        return f"{address} refuses access ({error.code}); give {wanted} with the scope admin: --key"
    if error.code == 404:
        return f"{address} has no {PATH}: it is not a workbench server, or an older version"
    return f"{address}{PATH} answers {error.code} {error.reason}"


def render(snapshot: ServerSnapshot, address: str, max_requests: int = MAX_LINES, note: str = "") -> Group:
    """Return a server's snapshot as a rich renderable: a headline, figures, meters, and the latest requests."""
    from rich.console import Group
    from rich.text import Text

    states = Text("  ").join(
        Text(f"{state} {count:,}", style=STATE_STYLES.get(state, "") if count else "dim")
        for state, count in snapshot.requests.items()
    )
    name = Text(_plain(snapshot.model or "server").plain, "bold")
    head = Text.assemble(name, f"  {address}  up {format_duration(snapshot.uptime)}")
    parts: list[Any] = [head, states, Text(), _figures(snapshot)]
    if snapshot.meters:
        parts += [Text(), _meters(snapshot)]
    parts += [Text(), _requests(snapshot, max_requests)]
    if note:
        parts.append(Text(_plain(note).plain, style="dim"))
    return Group(*parts)


def _figures(snapshot: ServerSnapshot) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    peak = max((rate.output_tokens for rate in snapshot.rates), default=0)
    line = "".join(BLOCKS[rate.output_tokens * (len(BLOCKS) - 1) // max(1, peak)] for rate in snapshot.rates)
    table.add_row("output", f"{snapshot.output_tokens_per_second:,.1f} tokens/s", f"{line} to {peak:,}")
    table.add_row("prompts", f"{snapshot.prompt_tokens_per_second:,.1f} tokens/s", "")
    for name, cuts in (("TTFT", snapshot.ttft), ("TPOT", snapshot.tpot)):
        found = ", ".join(f"p{q} {format_seconds(getattr(cuts, f'p{q}'))}" for q in (50, 90, 99))
        table.add_row(name, f"{cuts.count:,} requests", found if cuts.count else "")
    pages, share = snapshot.pages, snapshot.cache_hit_share
    table.add_row("pages", f"{pages.total:,}", f"{pages.used:,} used, {pages.idle:,} idle, {pages.free:,} free")
    found = f"{snapshot.cached_tokens:,} of {snapshot.prompt_tokens:,} prompt tokens from the cache"
    table.add_row("cache", format_percent(share), found)
    return table


def _meters(snapshot: ServerSnapshot) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("limit", "used", "of", "free again in"):
        table.add_column(heading, style="" if heading == "limit" else None)
    for meter in snapshot.meters:
        bound = "–" if meter.limit is None else f"{meter.limit:,.6g}"
        style = "red" if meter.limit is not None and meter.used >= meter.limit else None
        free = "now" if meter.resets_in is not None and meter.resets_in <= 0 else format_duration(meter.resets_in)
        cells = (meter.name, f"{meter.used:,.6g} {meter.unit}", bound, free)
        table.add_row(*map(_plain, cells), style=style)
    return table


def _requests(snapshot: ServerSnapshot, count: int) -> Table:
    """Return a table of requests: running ones first, then ended ones, the latest first in each group."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("request", max_width=36, no_wrap=True)
    table.add_column("state")
    for heading in ("age", "prompt", "cached", "output", "TTFT", "TPOT"):
        table.add_column(heading, justify="right")
    table.add_column("end", max_width=40, no_wrap=True)
    rows = sorted(snapshot.recent, key=lambda each: (each.ended is not None, -each.arrival))
    for each in rows[:count]:
        state = Text(each.state, STATE_STYLES.get(each.state, ""))
        table.add_row(_plain(each.id), state, *map(_plain, _cells(each, snapshot.time)))
    if len(rows) > count:
        table.add_row(f"{len(rows) - count} more")
    return table


def _cells(each: RequestStatus, now: float) -> tuple[str, ...]:
    age = (now if each.ended is None else each.ended) - each.arrival
    tokens = (f"{each.prompt_tokens:,}", f"{each.cached_tokens:,}", f"{each.output_tokens:,}")
    return (format_seconds(age), *tokens, format_seconds(each.ttft), format_seconds(each.tpot), each.reason)


def _plain(text: str) -> Text:
    """Return foreign text without markup and without control characters that a terminal would execute."""
    from rich.text import Text

    return Text("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))
