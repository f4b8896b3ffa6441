"""A message is printed where the waiting is long, and none where it is not."""

from __future__ import annotations

import threading

import pytest

from workbench import progress
from workbench.engine import loaded_model as load_module
from workbench.engine.load import load
from workbench.progress import report_if_slow


def test_reported_once_it_takes_long() -> None:
    messages, heard = [], threading.Event()

    def tell(line: str) -> None:
        messages.append(line)
        heard.set()

    with report_if_slow("compiling", tell, seconds=0.01):
        assert heard.wait()
    with report_if_slow("quick", tell, seconds=3600):
        pass
    with pytest.raises(ValueError), report_if_slow("broken", tell, seconds=3600):
        raise ValueError
    assert messages == ["compiling"]


def test_loading_tells_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    heard = threading.Event()

    def slow(backends, *_, **settings):
        assert heard.wait()
        return backends

    def tell(line: str) -> None:
        if line.startswith("trying which backend decodes shape:tiny fastest here"):
            heard.set()  # not for a line of what came before, which a busy machine makes long as well

    monkeypatch.setattr(load_module, "autotune_backend", slow)
    with monkeypatch.context() as soon:
        soon.setattr(progress, "SLOW_SECONDS", 0.01)
        load("shape:tiny", backend="auto", report=tell)
    assert heard.is_set()
    load("shape:tiny", backend="eager")
    assert capsys.readouterr().err == ""
