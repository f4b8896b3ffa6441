"""`workbench keys` and `workbench usage`: what they print, and what they leave in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.economics.tables import table
from tests.gateway.calls import chat
from workbench.cli import main
from workbench.gateway.accounting import Accounts, account_entry
from workbench.gateway.keys import KeyStore
from workbench.serve.answers.pieces import Used
from workbench.serve.gate import Outcome


def test_a_key_is_created_listed_rotated_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--file", str(tmp_path / "keys.json")]
    assert main(["keys", "create", "alice", "--models", "demo,demo-chat", "--days", "2", *file]) == 0
    printed = capsys.readouterr()
    text = printed.out.strip()
    store = KeyStore(tmp_path / "keys.json")
    key = store.check(text)
    assert key is not None and key.owner == "alice" and key.models == ("demo", "demo-chat")
    assert key.id in printed.err and "not shown again" in printed.err and text not in printed.err
    assert main(["keys", "list", *file]) == 0
    shown = capsys.readouterr().out
    assert key.id in shown and "active" in shown and text not in shown
    assert main(["keys", "rotate", key.id, "--hours", "1", "--json", *file]) == 0
    new = json.loads(capsys.readouterr().out)["key"]
    assert store.check(new) is not None and store.check(new) == store.check(text)
    assert main(["keys", "revoke", key.id, *file]) == 0
    assert store.check(new) is None and store.check(text) is None
    assert main(["keys", "revoke", "nothing", *file]) == 2
    assert "has no such key" in capsys.readouterr().err


def test_usage_is_summed_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accounts = Accounts(tmp_path / "usage.sqlite")
    for day in (0, 0, 1):
        entry = account_entry(chat(), "demo", Outcome(Used(0, 100, 10)), table(), day * 86_400.0)
        accounts.add(entry, table())
    accounts.close()
    file = ["--file", str(tmp_path / "usage.sqlite")]
    assert main(["usage", "--by", "day", "--json", *file]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["day"], row["calls"], row["exact_cost"]) for row in rows] == [
        ("1970-01-01", 2, "9/10000"),
        ("1970-01-02", 1, "9/20000"),
    ]
    assert main(["usage", "--since", "1970-01-02", *file]) == 0
    shown = capsys.readouterr().out
    assert "1970-01-02" in shown and "0.000450" in shown and "1970-01-01" not in shown
    assert "cost (USD)" in shown
    assert main(["usage", "--by", "dya", *file]) == 2
    assert "did you mean 'day'" in capsys.readouterr().err
    assert main(["usage", "--key", "other", *file]) == 0 and "no such calls" in capsys.readouterr().out
    assert main(["usage", "--since", "yesterday", *file]) == 2
    assert "is no day" in capsys.readouterr().err
