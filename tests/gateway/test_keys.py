"""Keys: hashed at rest, compared once whatever the key, rotated, revoked."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import stat
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.event_loop import run_async
from workbench.errors import WorkbenchError
from workbench.gateway import keys
from workbench.gateway.gate import Gateway
from workbench.gateway.keys import KeyStore
from workbench.serve.app import load_dialects
from workbench.serve.dialects import SIGN_THOUGHTS


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> KeyStore:
    return KeyStore(tmp_path / "inner" / "keys.json", clock)


def test_the_file_holds_no_key_and_only_its_owner_reads_it(store: KeyStore) -> None:
    key, text = store.create("alice", "laptop", models=("demo",), admin=True)
    content = store.path.read_text()
    assert text not in content and text.split("_", 2)[2] not in content
    assert hashlib.sha256(text.encode()).hexdigest() in content
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert store.check(text) == key
    assert store.caller(key).scopes == {"model:demo", "admin"}


def test_every_check_hashes_and_compares_once(store: KeyStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time must not say whether a key exists: the work is the same for every text."""
    _, right = store.create("alice")
    gone, revoked = store.create("alice")
    _, expired = store.create("alice", days=1)
    store.revoke(gone.id)
    clock.now += 2 * 86_400
    made: list[str] = []
    sha256, compare = hashlib.sha256, hmac.compare_digest

    def hashing(data: bytes) -> Any:
        made.append("hash")
        return sha256(data)

    def comparing(one: str, other: str) -> bool:
        made.append("compare")
        assert len(one) == len(other) == 64
        return compare(one, other)

    monkeypatch.setattr(keys.hashlib, "sha256", hashing)
    monkeypatch.setattr(keys.hmac, "compare_digest", comparing)
    texts = ["", "x", "wb_", "wb_a_b", "ä_ö_ü", right[:-1], right + "x", right.upper(), revoked, expired, right]
    for text in texts:
        made.clear()
        assert (store.check(text) is not None) == (text == right)
        assert made == ["hash", "compare"]


@given(text=st.text(max_size=80))
def test_no_other_text_is_a_key(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    store = KeyStore(tmp_path_factory.mktemp("keys") / "keys.json")
    assert store.check(text) is None


@pytest.mark.parametrize("life", [None, 3, 1])
def test_a_rotated_key_has_two_texts_for_a_while(store: KeyStore, clock: Clock, life: int | None) -> None:
    """The old one's while is no longer than it would have lived, in hours, anyway."""
    key, old = store.create("alice", days=life and life / 24)
    changed, new = store.rotate(key.id, hours=2)
    assert changed.id == key.id and old != new
    assert store.check(old) == store.check(new) == changed
    clock.now += min(2, life or 2) * 3600 - 1
    assert store.check(old) == changed
    clock.now += 1
    assert store.check(old) is None and store.check(new) == changed
    again, third = store.rotate(key.id, hours=0)
    assert store.check(new) is None and store.check(third) == again
    assert len(again.credentials) == 2  # those that had expired before are forgotten
    _, fourth = store.rotate(key.id, hours=0, days=1)
    clock.now += 86_400 - 1
    assert store.check(fourth) is not None
    clock.now += 1
    assert store.check(fourth) is None


def test_a_revoked_key_ends_at_once_in_every_process(store: KeyStore, clock: Clock) -> None:
    key, text = store.create("alice")
    other = KeyStore(store.path, clock)
    assert other.check(text) == key
    store.revoke(key.id)
    assert other.check(text) is None and other.list()[0].state(clock.now) == "revoked"
    with pytest.raises(WorkbenchError, match="was revoked"):
        other.rotate(key.id)
    ended, clock.now = clock.now, clock.now + 5
    assert other.revoke(key.id).revoked == ended, "it ended the first time"


def test_a_key_that_another_process_makes_meanwhile_is_kept(
    store: KeyStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change begins with what the file says once its lock is held."""
    kept, _ = store.create("alice")
    other, lock, made = KeyStore(store.path, clock), fcntl.flock, []

    def behind_another(file: IO[str], how: int) -> None:
        if not made:
            made.append(None)
            made[0] = other.create("bob")[0]
        lock(file, how)

    for change in (lambda: store.create("carol"), lambda: store.rotate(kept.id), lambda: store.revoke(kept.id)):
        made.clear()
        monkeypatch.setattr(fcntl, "flock", behind_another)
        change()
        monkeypatch.undo()
        assert made[0].id in {key.id for key in KeyStore(store.path, clock).list()}


def test_salts_are_those_of_owners_and_of_the_file(store: KeyStore, tmp_path: Path) -> None:
    one, _ = store.create("alice")
    two, _ = store.create("alice")
    three, _ = store.create("bob")
    salts = [store.caller(each).cache_salt for each in (one, two, three)]
    assert salts[0] == salts[1] != salts[2]
    elsewhere = KeyStore(tmp_path / "other.json")
    key, _ = elsewhere.create("alice")
    assert elsewhere.caller(key).cache_salt not in salts


def test_errors_name_what_would_be_right(store: KeyStore) -> None:
    key, _ = store.create("alice")
    with pytest.raises(WorkbenchError, match="did you mean"):
        store.revoke(key.id[:-1])
    with pytest.raises(WorkbenchError, match="needs an owner"):
        store.create("")
    store.path.write_text('{"secret": "00", "kys": []}')
    with pytest.raises(WorkbenchError, match="kys"):
        store.check("")


def test_the_key_of_signatures_outlives_the_server_and_is_in_no_file_that_others_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first = KeyStore(file).signing_key()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    KeyStore(file).create("alice")
    again, other = KeyStore(file), KeyStore(tmp_path / "other.json")
    assert again.signing_key() == first != other.signing_key() and len(first) == 32
    assert first.hex() not in {again.cache_salt(owner) for owner in ("", "thoughts", "alice")}
    made, read = (Gateway({"keys": str(file)}) for _ in range(2))
    for name in SIGN_THOUGHTS:
        dialects: list[Any] = [load_dialects(each.signing_key())[name] for each in (made, read)]
        signers = [each.signer for each in dialects]
        signers[1].check("m", 0, "a thought", signers[0].sign("m", 0, "a thought"))
    for each in (made, read):
        run_async(each.close())
