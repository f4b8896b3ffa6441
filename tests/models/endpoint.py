"""A hub on loopback: one repository, served as huggingface_hub asks for it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
INFO = {"id": "o/n", "sha": COMMIT, "siblings": [], "cardData": {"license": "mit"}}


@dataclass
class Hub:
    """A repository's files, what is wrong with it, and what was asked for."""

    files: dict[str, bytes]
    large: str = ""  # the file that is kept by sha256
    sent: dict[str, bytes] = field(default_factory=dict)  # in place of what is listed
    breaks: dict[str, int] = field(default_factory=dict)  # bytes of a file until the connection ends, once
    refuses: tuple[int, str] | None = None  # a status, and the hub's own code of the error
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # files, with the range of bytes
    url: str = ""

    def listed(self, name: str) -> dict[str, object]:
        content = self.files[name]
        digest, size = hashlib.sha256(content).hexdigest(), len(content)
        large = {"lfs": {"oid": digest, "size": size, "pointerSize": 1}} if name == self.large else {}
        blob = hashlib.sha1(b"blob %d\0" % size + content).hexdigest()
        return {"type": "file", "path": name, "size": size, "oid": blob, **large}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).removeprefix("/api/models/")
            _, _, name = path.partition(f"/o/n/resolve/{COMMIT}/")
            if hub.refuses is not None:
                self.send(*hub.refuses)
            elif name:
                self.send_file(name, int((self.headers["Range"] or "bytes=0-")[6:-1]))
            elif path in ("o/n", "o/n/revision/v1", f"o/n/tree/{COMMIT}"):
                self.send(200, "", json.dumps([*map(hub.listed, hub.files)] if "tree" in path else INFO).encode())
            else:
                self.send(404, "RevisionNotFound")

        do_HEAD = do_GET

        def send_file(self, name: str, start: int) -> None:
            content, end = hub.sent.get(name, hub.files[name])[start:], None
            if self.command == "GET":
                hub.asked.append((name, self.headers["Range"]))
                end = hub.breaks.pop(name, None)
                self.close_connection = end is not None
            about = {"ETag": f'"{hub.listed(name)["oid"]}"', "X-Repo-Commit": COMMIT}
            self.send(206 if start else 200, "", content, end, **about)

        def send(self, status: int, code: str, body: bytes = b"", end: int | None = None, **about: str) -> None:
            self.send_response(status)
            for each in {**about, "X-Error-Code": code, "Content-Length": str(len(body))}.items():
                self.send_header(*each)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:end])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()
