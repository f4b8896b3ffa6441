"""Answered calls are run again by their ids: over HTTP beside other calls, and from the folder in another process."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.command_line import answer, cli, refused
from tests.patience import limit
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.gateway.gate import Gateway
from workbench.serve.server import Server, serve
from workbench.serve.watch.kept_requests import SUFFIX

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def runner() -> Runner:
    """Prefixes are found in the cache, and requests wait for its pages under load."""
    settings: dict[str, Any] = {"max_num_batched_tokens": 48, "page_size": 16, "pages": 16, "max_num_seqs": 6}
    return load("demo-chat", backend="mlir", prefix="radix", batch_invariant=True, **settings)


def ask(server: Server, number: int, **options: Any) -> str:
    """Return the id of an answer."""
    content = f"What is {number % 4} + 3?" + " And then?" * (number % 3)
    body = {"model": "demo-chat", "messages": [{"role": "user", "content": content}], "max_tokens": 6 + number % 5,
            "seed": number, **options}  # fmt: skip
    return httpx.post(server.url + CHAT, json=body, timeout=limit(60)).json()["id"]


def replayed(server: Server, call_id: str, code: int = 200, **headers: str) -> dict[str, Any]:
    found = httpx.post(f"{server.url}/v1/traces/{call_id}/replay", headers=headers, timeout=limit(60))
    assert found.status_code == code, found.text
    return found.json()


def test_answers_under_load_come_back_bit_for_bit(runner: Runner, tmp_path: Path) -> None:
    """Over HTTP while other calls run, and by the command from the folder alone."""
    with serve(runner, replay_folder=str(tmp_path)) as server, ThreadPoolExecutor(12) as threads:
        first = ask(server, 1)
        ids = list(threads.map(lambda number: ask(server, number, n=1 + number % 7 // 5), range(24)))
        more = [threads.submit(ask, server, number) for number in range(6)]
        found = [replayed(server, each) for each in (first, ids[9], ids[5])]
        ids += [each.result() for each in more]
    for name, each in zip((first, ids[9], ids[5]), found, strict=True):
        assert each["id"] == name and each["identical"], each["remarks"]
        assert not any("not as recorded" in remark for remark in each["remarks"]) or name == ids[5]  # n is 2
        own = [one for one in each["requests"] if not one["is_neighbour"]]
        assert {one["request_id"] for one in own} == {name} and all(one["place"] is None for one in each["requests"])
        assert any(span["sequence"] == name for step in each["steps"] for span in step["spans"])
    assert "had found in a cache were computed before" in str(found[1]["remarks"]), "the test is about something"
    alone, loaded, several = (sum(one["is_neighbour"] for one in each["requests"]) for each in found)
    assert alone == 0 and loaded > 2 and several > 2
    again = answer(f"replay {ids[9]} --from", tmp_path)
    assert again["identical"] and again["requests"] == found[1]["requests"] and again["steps"] == found[1]["steps"]
    printed = cli(f"replay {ids[12]} --from", tmp_path).text
    assert f"{ids[12]}: identical tokens" in printed and re.search(r"steps +\d+ walked", printed)


def test_other_tokens_are_found_at_their_first_place(runner: Runner, tmp_path: Path) -> None:
    with serve(runner, replay_folder=str(tmp_path)) as server:
        name = ask(server, 1, max_tokens=8, temperature=0, ignore_eos=True)
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    assert file.stat().st_mode & 0o077 == 0, "prompts are for the owner alone"
    ids = next(re.findall(r"\[([\d,]+)\]", line)[0] for line in file.read_text().splitlines() if '"end"' in line)
    wrong = [*ids.split(",")]
    wrong[5] = str(int(wrong[5]) + 1)
    file.write_text(file.read_text().replace(ids, ",".join(wrong)))
    found = answer(f"replay {name} --from", tmp_path, code=1)
    (own,) = found["requests"]
    assert not found["identical"] and (own["place"], own["was"]) == (5, int(wrong[5]))
    assert f"token 5 of 8 was {wrong[5]}, is {ids.split(',')[5]}" in cli(f"replay {name} --from", tmp_path, code=1).text


def test_what_cannot_be_replayed_says_why(runner: Runner, tmp_path: Path) -> None:
    assert "holds no served requests; name the `server" in refused("replay chatcmpl-1 --from", tmp_path)
    with serve(runner, replay_folder=str(tmp_path), replay_bytes=40_000) as server:
        old = [ask(server, number) for number in range(3)]
        assert "no request of this id is kept; did you mean" in replayed(server, f"{old[0]}x", 404)["error"]["message"]
        for number in range(30):
            ask(server, number)
            server.service.replays.write()
        gone = replayed(server, old[0], 404)["error"]["message"]
        assert re.search("is not kept any more|no request of this id is kept", gone) and "`server.replay_bytes`" in gone
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 60_000
    assert f"'{old[0]}'" in refused(f"replay {old[0]} --from", tmp_path)
    with serve(runner) as server:  # nothing is kept unless a folder is named
        name = ask(server, 1)
        assert "set server.replay_folder" in replayed(server, name, 400)["error"]["message"]


def test_a_replay_is_for_administrators(runner: Runner, tmp_path: Path) -> None:
    gateway = Gateway({"keys": str(tmp_path / "keys.json")})
    assert gateway.keys is not None
    user, admin = (gateway.keys.create(name, admin=name == "root")[1] for name in ("alice", "root"))
    with serve(runner, gate=gateway, replay_folder=str(tmp_path / "kept")) as server:
        headers = {"authorization": f"Bearer {user}"}
        body = {"model": "demo-chat", "max_tokens": 4, "prompt": ["def f(", "once"]}
        name = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=limit(60)).json()["id"]
        assert "scope admin" in replayed(server, name, 403, authorization=f"Bearer {user}")["error"]["message"]
        replayed(server, name, 401)
        found = replayed(server, name, authorization=f"Bearer {admin}")
        assert found["identical"] and [each["request_id"] for each in found["requests"]] == [f"{name}.0", f"{name}.1"]


def test_files_that_others_delete_or_leave_half_written(runner: Runner, tmp_path: Path) -> None:
    """The folder is shared with other servers, each of which deletes the oldest files beyond the bound."""
    (tmp_path / f"0-0{SUFFIX}").write_bytes(b"")
    (tmp_path / f"0-1{SUFFIX}").write_bytes(b'{"server": "half')
    with serve(runner, replay_folder=str(tmp_path)) as server:
        ask(server, 1)
        server.service.replays.write()
        for each in tmp_path.iterdir():
            each.unlink()
        assert replayed(server, ask(server, 2))["identical"]
