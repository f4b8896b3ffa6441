"""`workbench keys` and `workbench usage`: what they print, and what they leave in files."""

from __future__ import annotations

from pathlib import Path

from tests.economics.tables import table
from tests.gateway.calls import chat
from tests.helpers.command_line import answer, cli, refused
from workbench.gateway.accounting import Accounts, account_entry
from workbench.gateway.keys import KeyStore
from workbench.serve.answers.pieces import Used
from workbench.serve.gate import Outcome


def test_a_key_is_created_listed_rotated_and_revoked(tmp_path: Path) -> None:
    file = "--file", tmp_path / "keys.json"
    printed = cli("keys create alice --models demo,demo-chat --days 2", *file)
    text = printed.out.strip()
    store = KeyStore(tmp_path / "keys.json")
    key = store.check(text)
    assert key is not None and key.owner == "alice" and key.models == ("demo", "demo-chat")
    assert key.id in printed.err and "not shown again" in printed.err and text not in printed.err
    shown = cli("keys list", *file).out
    assert key.id in shown and "active" in shown and text not in shown
    assert "for demo, demo-chat;" in printed.err and "for all models;" in cli("keys create bob", *file).err
    new = answer("keys rotate --hours 1", key.id, *file)["key"]
    assert store.check(new) is not None and store.check(new) == store.check(text)
    cli("keys revoke", key.id, *file)
    assert store.check(new) is None and store.check(text) is None


def test_usage_is_summed_from_a_file(tmp_path: Path) -> None:
    accounts = Accounts(tmp_path / "usage.sqlite")
    for day in (0, 0, 1):
        entry = account_entry(chat(), "demo", Outcome(Used(0, 100, 10)), table(), day * 86_400.0)
        accounts.add(entry, table())
    accounts.close()
    file = "--file", tmp_path / "usage.sqlite"
    rows = [(row["day"], row["calls"], row["exact_cost"]) for row in answer("usage --by day", *file)]
    assert rows == [("1970-01-01", 2, "9/10000"), ("1970-01-02", 1, "9/20000")]
    shown = cli("usage --since 1970-01-02", *file).out
    assert "1970-01-02" in shown and "0.000450" in shown and "1970-01-01" not in shown
    assert "cost (USD)" in shown
    assert "no such calls" in cli("usage --key other", *file).out
    assert "did you mean 'day'" in refused("usage --by dya", *file)
    assert "is no day" in refused("usage --since yesterday", *file)
