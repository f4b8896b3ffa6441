"""No request ends a server: schemas that the compiler does not survive, known or not, in every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.constrained import dying_trial
from tests.patience import limit
from tests.serve import strangers
from workbench.constrained.grammar_trial import GrammarTrial
from workbench.engine.runner import Runner
from workbench.serve.server import Server, serve


@pytest.fixture(scope="module")
def dying(chat_runner: Runner) -> Iterator[Server]:
    """A server whose compiler dies of some choices: in its child."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarTrial, "module", dying_trial.DyingTrial.module)
        with serve(chat_runner) as running:
            yield running


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=limit(60))


@pytest.mark.parametrize(("name", "words"), [("signal", "it ended by SIGSEGV"), ("loop", "processor time")])
def test_a_grammar_that_ends_the_compiler_is_refused_and_the_server_goes_on(
    dying: Server, name: str, words: str
) -> None:
    body = {"model": "demo-chat", "prompt": "hi", "max_tokens": 4}
    bad = post(dying, "/v1/completions", {**body, "structured_outputs": {"choice": [name]}})
    assert bad.status_code == 400 and words in bad.text
    good = post(dying, "/v1/completions", {**body, "structured_outputs": {"choice": ["fine"]}})
    assert good.status_code == 200 and good.json()["choices"][0]["text"] == "fine"


@pytest.mark.processes
def test_a_server_in_a_process_of_its_own_lives_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert strangers.main() == 0, capsys.readouterr().out
