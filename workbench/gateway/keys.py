"""Create, check, rotate and revoke API keys. A key is stored as a hash, with its owner and scopes.

A key has the form `wb_ID_SECRET`: the stored hash is looked up by id, so every check hashes one text and compares once,
in constant time, for known and unknown keys alike.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from workbench.errors import WorkbenchError, explain, nearest
from workbench.files import note_own, read_json_file, write_atomically
from workbench.serve.call import Caller
from workbench.settings import Settings

PREFIX = "wb"
ADMIN, EVERY_MODEL = "admin", "*"
UNKNOWN_HASH = hashlib.sha256(b"").hexdigest()  # matches no key: a secret is never empty


class Credential(Settings):
    """One secret of a key, as its hash. Times are seconds since 1970."""

    id: str
    sha256: str
    expires: float | None = None


class ApiKey(Settings):
    """A key with its owner and scopes. It has several credentials during a rotation."""

    id: str
    name: str = ""
    owner: str
    models: tuple[str, ...] = (EVERY_MODEL,)
    admin: bool = False
    created: float
    revoked: float | None = None
    credentials: tuple[Credential, ...]

    @property
    def scopes(self) -> frozenset[str]:
        """Return the scopes of the key: `*` or a `model:NAME` for each model, and `admin` for an administrator."""
        models = {each if each == EVERY_MODEL else f"model:{each}" for each in self.models}
        return frozenset(models | ({ADMIN} if self.admin else set()))

    def state(self, now: float) -> str:
        """Return the state of the key at time `now`: active, revoked or expired."""
        if self.revoked is not None:
            return "revoked"
        return "active" if any(_is_valid(each, now) for each in self.credentials) else "expired"


class KeyFile(Settings):
    """The contents of a key file. Salts and the signing key are derived from `secret`."""

    secret: str
    keys: tuple[ApiKey, ...] = ()


class KeyStore:
    """Keys in a JSON file that only its owner may read. A running server notices changes by other processes.

    Args:
        path: path of the file, which need not exist.
        clock: returns seconds since 1970.

    Raises:
        WorkbenchError: if the file is not a key file.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self.path, self._clock = note_own(path), clock
        self._version: tuple[int, int] | None = None
        self._content = KeyFile(secret="")
        self._by_credential: dict[str, tuple[ApiKey, Credential]] = {}
        self._refresh()

    def check(self, text: str) -> ApiKey | None:
        """Return the key with the text `text` if it is valid now."""
        self._refresh()
        _, _, rest = text.partition("_")
        found = self._by_credential.get(rest.partition("_")[0])
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        is_same = hmac.compare_digest(digest, UNKNOWN_HASH if found is None else found[1].sha256)
        if found is None or not is_same or found[0].revoked is not None or not _is_valid(found[1], self._clock()):
            return None
        return found[0]

    def active(self, id: str) -> ApiKey | None:
        """Return the key with this id if one of its credentials is valid now, else None."""
        return next((key for key in self.list() if key.id == id and key.state(self._clock()) == "active"), None)

    def caller(self, key: ApiKey) -> Caller:
        return Caller(key.id, key.owner, self.cache_salt(key.owner), key.scopes)

    def cache_salt(self, owner: str) -> str:
        """Return the salt for an owner's cached prefixes and responses. It cannot be guessed without the secret in the
        key file.
        """
        self._refresh()
        return hmac.new(bytes.fromhex(self._content.secret), owner.encode(), hashlib.sha256).hexdigest()

    def signing_key(self) -> bytes:
        """Return the signing key for thoughts. It is derived from the file's secret, so it persists over restarts and
        is equal for all servers that share the file; a file without a secret gets one.
        """
        self._refresh()
        if not self._content.secret:
            with self._changing() as content:
                self._write(content)
        secret = bytes.fromhex(self._content.secret)
        return hashlib.blake2b(key=secret, person=b"thoughts", digest_size=32).digest()

    def list(self) -> tuple[ApiKey, ...]:
        self._refresh()
        return self._content.keys

    def create(
        self, owner: str, name: str = "", models: Collection[str] = (EVERY_MODEL,), admin: bool = False,
        days: float | None = None,
    ) -> tuple[ApiKey, str]:  # fmt: skip
        """Create a key that is valid for `days` days, or until revoked; return it and its text, which is shown only
        once.
        """
        if not owner:
            raise WorkbenchError("a key needs an owner: cached prefixes and limits are separate by owner")
        credential, text = self._credential(days)
        with self._changing() as content:
            key = ApiKey(
                id=secrets.token_hex(4), name=name, owner=owner, models=tuple(models), admin=admin,
                created=self._clock(), credentials=(credential,),
            )  # fmt: skip
            self._write(content.model_copy(update={"keys": (*content.keys, key)}))
        return key, text

    def rotate(self, id: str, hours: float = 24.0, days: float | None = None) -> tuple[ApiKey, str]:
        """Give a key a new secret text and return both; the old text stays valid for `hours` hours."""
        credential, text = self._credential(days)
        ends = self._clock() + hours * 3600
        with self._changing(id) as content:
            key = self._find(content, id)
            if key.revoked is not None:
                raise WorkbenchError(f"key {id}: it was revoked; create another one")
            old = [each for each in key.credentials if _is_valid(each, self._clock())]
            old = [each.model_copy(update={"expires": min(ends, each.expires or ends)}) for each in old]
            changed = key.model_copy(update={"credentials": (*old, credential)})
            self._replace(content, changed)
        return changed, text

    def revoke(self, id: str) -> ApiKey:
        """Revoke a key at once, and return it."""
        with self._changing(id) as content:
            key = self._find(content, id)
            changed = key.model_copy(update={"revoked": key.revoked or self._clock()})
            self._replace(content, changed)
        return changed

    def _credential(self, days: float | None) -> tuple[Credential, str]:
        id = secrets.token_hex(6)
        text = f"{PREFIX}_{id}_{secrets.token_urlsafe(32)}"
        expires = None if days is None else self._clock() + days * 86_400
        return Credential(id=id, sha256=hashlib.sha256(text.encode()).hexdigest(), expires=expires), text

    def _find(self, content: KeyFile, id: str) -> ApiKey:
        for key in content.keys:
            if key.id == id:
                return key
        known = [key.id for key in content.keys]
        raise WorkbenchError(f"key {id!r}: {self.path} has no such key{nearest(id, known)}; `workbench keys list`")

    def _replace(self, content: KeyFile, changed: ApiKey) -> None:
        keys = tuple(changed if key.id == changed.id else key for key in content.keys)
        self._write(content.model_copy(update={"keys": keys}))

    @contextmanager
    def _changing(self, id: str | None = None) -> Iterator[KeyFile]:
        """Lock the file against changes by other processes, and read it. An unknown key `id` is refused before any file
        is created.
        """
        if id is not None:
            self._refresh()
            self._find(self._content, id)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(self.path.name + ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._refresh()
            if self._content.secret:
                yield self._content
            else:
                yield KeyFile(secret=secrets.token_hex(32))

    def _write(self, content: KeyFile) -> None:
        def fill(file: BinaryIO) -> None:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(content.model_dump(mode="json"), indent=1).encode())

        write_atomically(self.path, fill)
        self._refresh()

    def _refresh(self) -> None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._version, self._content, self._by_credential = None, KeyFile(secret=""), {}
            return
        version = (status.st_ino, status.st_mtime_ns)  # a file is replaced, never modified
        if version == self._version:
            return
        try:
            content = KeyFile.model_validate(read_json_file(self.path))
        except ValidationError as error:
            raise explain(error, f"keys {self.path}", KeyFile) from None
        self._version, self._content = version, content
        self._by_credential = {each.id: (key, each) for key in content.keys for each in key.credentials}


def _is_valid(credential: Credential, now: float) -> bool:
    return credential.expires is None or now < credential.expires
