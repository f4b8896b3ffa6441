"""A server without keys on loopback: clients of this machine may ask, web pages may not."""

from __future__ import annotations

import httpx
import pytest

from tests.patience import limit
from workbench.gateway.gate import Gateway
from workbench.serve.errors import ApiError
from workbench.serve.local_names import check_names, is_loopback
from workbench.serve.server import Server, serve

LOCAL = ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "a", "a.localhost:1", "10.1.2.3:8000")
FOREIGN = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::1", "a.b.")
PAGES = (
    "https://evil.example",
    "http://127.0.0.1.evil.example",
    "null",
    "http://intranet",
    "http://10.1.2.3",
    "x",
    "//",
)


@pytest.mark.parametrize("host", LOCAL)
@pytest.mark.parametrize("origin", [None, "http://localhost:3000", "http://127.0.0.1:8888", "http://[::1]:1"])
def test_clients_of_this_machine_may_ask(host: str, origin: str | None) -> None:
    check_names({"host": host} | ({} if origin is None else {"origin": origin}))


@pytest.mark.parametrize(
    "headers",
    [{"host": each} for each in FOREIGN] + [{"host": "127.0.0.1:8000", "origin": each} for each in PAGES],
)
def test_web_pages_may_not(headers: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        check_names(headers)
    assert caught.value.status == 403


def test_addresses_of_this_machine_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.1.2.3", "gpu1.example")))


def test_a_server_asks_only_where_no_caller_needs_a_key(server: Server, tmp_path) -> None:
    ask = lambda server, **headers: httpx.get(f"{server.url}/v1/models", headers=headers, timeout=limit(60))  # noqa: E731
    assert ask(server).status_code == 200
    refused = ask(server, host="evil.example")
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "foreign_name"
    assert ask(server, origin="https://evil.example").status_code == 403
    gateway = Gateway({"keys": str(tmp_path / "keys.json")})
    assert gateway.keys is not None
    _, text = gateway.keys.create("alice")
    runners = {name: each.runner for name, each in server.service.models.items()}
    with serve(runners, gate=gateway) as guarded:  # behind a proxy, say
        assert ask(guarded, host="api.example", authorization=f"Bearer {text}").status_code == 200
