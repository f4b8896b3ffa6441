"""The vendors' own clients, two rounds of tools under eight models' templates, against a server in its process."""

from __future__ import annotations

import pytest

from tests.serve import clients


@pytest.mark.processes
def test_the_clients_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert clients.main() == 0, capsys.readouterr().out
