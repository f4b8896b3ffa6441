"""A message is printed where the waiting is long, and none where it is not."""

from __future__ import annotations

import threading

import pytest

from tests.patience import limit
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


def test_a_long_wait_says_again_and_again_how_long_it_has_gone_on_and_how_long_still() -> None:
    messages: list[str] = []
    often = threading.Event()

    def tell(line: str) -> None:
        messages.append(line)
        if len(messages) == 3:
            often.set()

    with report_if_slow("compiling", tell, seconds=0.01, usual=3600, again=0.01):
        assert often.wait(limit(60))
    assert messages[0].startswith("compiling (about 36")
    assert all(each.startswith("compiling: 0 s so far, about ") and each.endswith("still") for each in messages[1:])
    assert progress._waiting_words(99.0, 60.0, is_first=False) == ": 99 s so far, longer than usual"
