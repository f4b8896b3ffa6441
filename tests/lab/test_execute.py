"""Errors of an executed notebook are found, and a kernel that stays on its machine refuses every other host."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from workbench.lab import stay_home
from workbench.lab.execute import VIEW, cell_errors, widget_outputs


def code(source: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "id": source, "source": [source, "\nmore"], "outputs": list(outputs)}


def stream(name: str, text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": ["Traceback (most recent call last)\n", f"  x\n{text}\n"]}


def test_errors_of_cells_and_of_their_threads_are_found_and_printed_ones_are_not() -> None:
    error = {"output_type": "error", "ename": "KeyError", "evalue": "'x'"}
    views = [{"output_type": "display_data", "data": {kind: "x"}} for kind in ("text/plain", VIEW)]
    cells = [
        {"cell_type": "markdown", "source": ["words"]}, code("one", error),
        code("two", stream("stdout", "printed"), stream("stderr", "ValueError: in a thread"), *views), code("three"),
    ]  # fmt: skip
    assert [str(each) for each in cell_errors({"cells": cells})] == [
        "cell 1 (one): KeyError: 'x'", "cell 2 (two): stderr: ValueError: in a thread",
    ]  # fmt: skip
    assert widget_outputs({"cells": cells}) == [("two", 3)]


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("::1%lo", True), ("", True),
        ("0.0.0.0", True), ("::", True), (b"127.0.0.1", True), (None, True), (socket.gethostname(), True),
        ("example.org", False), ("10.0.0.1", False), (b"8.8.8.8", False), ("fe80::1%eth0", False),
        ("localhost.org", False),
    ],
)  # fmt: skip
def test_hosts_of_this_machine(host: Any, is_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stay_home.LOG, str(log := tmp_path / "log"))
    events = (("socket.getaddrinfo", (host, 80)), ("socket.connect", (None, (host, 80))))
    stay_home.watch("socket.connect", (None, "/a/socket"))
    stay_home.watch("open", ("example.org",))
    for event in events:
        if is_here:
            stay_home.watch(*event)
        else:
            with pytest.raises(ConnectionError, match="may not leave its machine"):
                stay_home.watch(*event)
    assert log.exists() != is_here and (is_here or len(log.read_text().splitlines()) == 2)
