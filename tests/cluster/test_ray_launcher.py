"""Launchers of one process share Ray: the last shuts it down. A stub is Ray."""

from __future__ import annotations

import importlib
import inspect
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.stand_in import stand_in
from tests.patience import until
from workbench import ray_start
from workbench.cluster import ray_replicas
from workbench.cluster.front_watch import FrontWatch
from workbench.cluster.ray_replicas import RayLauncher, SharedRay
from workbench.errors import WorkbenchError


class StubRay:
    def __init__(self) -> None:
        self.is_up, self.shutdowns = False, 0

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, **settings: Any) -> None:
        assert not self.is_up
        self.is_up = True

    def shutdown(self) -> None:
        self.shutdowns += self.is_up
        self.is_up = False


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[StubRay], StubRay]:
    """Return a function that makes a stub the Ray of launchers."""
    monkeypatch.setattr(ray_replicas, "SHARED_RAY", SharedRay())
    monkeypatch.setattr(ray_replicas, "FrontWatch", lambda folder: stand_in(FrontWatch, close=lambda: None))
    monkeypatch.setattr(ray_replicas, "check_reachable", lambda address: None)
    monkeypatch.setattr(ray_replicas.tempfile, "mkdtemp", lambda **_: "/tmp/ray-stub")

    def put(ray: StubRay) -> StubRay:
        monkeypatch.setattr(ray_replicas, "import_ray", lambda what: ray)
        return ray

    return put


def test_the_stub_has_the_functions_of_ray() -> None:
    """By name, and by the names of their further arguments."""
    ray = pytest.importorskip("ray", reason="pip install 'ray>=2.40'")
    for name, method in vars(StubRay).items():
        if not name.startswith("_"):
            named = [*inspect.signature(method).parameters.values()][2:]  # after `self` and what is given by its place
            known = inspect.signature(getattr(ray, name)).parameters
            assert {each.name for each in named} <= known.keys(), name


@pytest.mark.parametrize(("failures", "words", "starts"), [(2, "timed out during startup", 3), (3, "timed out during "
                         "startup", 3), (1, "no port is free", 1)])  # fmt: skip
def test_a_node_whose_raylet_ends_is_started_again(failures: int, words: str, starts: int) -> None:
    pytest.importorskip("ray", reason="pip install 'ray>=2.40'")
    seen: list[str] = []

    def init(**options: Any) -> None:
        seen.append("init")
        if len(seen) <= 2 * failures - 1:
            raise RuntimeError(f"The current node {words}")

    ray = SimpleNamespace(init=init, shutdown=lambda: seen.append("shutdown"))
    if starts > failures:
        ray_start.start_ray(ray, num_cpus=1)
    else:
        with pytest.raises(RuntimeError, match=words):
            ray_start.start_ray(ray, num_cpus=1)
    assert seen == ["init", *["shutdown", "init"] * (starts - 1)]


def test_a_raylet_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sleep")
    with subprocess.Popen([raylet, "1000"]) as process:
        before = ray_start.ended_raylets()
        clock = ray_start._SlowClock(before)
        assert clock.monotonic() < math.inf
        process.kill()
        until(lambda: clock.monotonic() == math.inf)
        assert ray_start.ended_raylets() - before == {str(process.pid)}


def test_a_raylet_finds_the_ports_that_its_agents_would_write_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="pip install 'ray>=2.40'")
    from ray._private import node

    wait = importlib.import_module("ray._raylet").wait_for_persisted_port
    found: list[int] = []

    def start_raylet(self: Any) -> None:
        for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            found.append(wait(str(tmp_path), self.node_id, name, timeout_ms=1))
        found.append(self._ray_params.runtime_env_agent_port)

    monkeypatch.setattr(node.Node, "start_raylet", start_raylet)
    given = SimpleNamespace(runtime_env_agent_port=None)
    started = SimpleNamespace(get_session_dir_path=lambda: str(tmp_path), node_id="ab" * 28, _ray_params=given)
    with ray_start.slow_start():
        start: Any = node.Node.start_raylet
        start(started)
    assert found[:3] == [-1, -1, -1] and found[3] > 1023
    assert node.Node.start_raylet is start_raylet


@pytest.mark.parametrize("address", [None, "127.0.0.1:6379"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_last_launcher_shuts_ray_down(use: Callable[[StubRay], StubRay], first: int, address: str | None) -> None:
    ray = use(StubRay())
    launchers = [RayLauncher(address, 1, 0.0, 2) for _ in range(2)]
    launchers[first].close()
    launchers[first].close()  # which counts once
    assert ray.is_up, "the other launcher has no Ray"
    launchers[1 - first].close()
    assert not ray.is_up and ray.shutdowns == 1
    RayLauncher(address, 1, 0.0, 2).close()
    assert ray.shutdowns == 2


def test_a_ray_of_the_callers_stays(use: Callable[[StubRay], StubRay]) -> None:
    ray = use(StubRay())
    ray.init()
    RayLauncher(None, 1, 0.0, 2).close()
    assert ray.is_up
    with pytest.raises(WorkbenchError, match="this process has a Ray cluster"):
        RayLauncher("127.0.0.1:6379", 1, 0.0, 2)
