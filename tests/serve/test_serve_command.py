"""`workbench serve` as a command: what it refuses, and how its clusters end."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.cli.serve import read_serve_config
from workbench.cluster import cluster
from workbench.errors import WorkbenchError
from workbench.serve import served_model, server


@pytest.mark.parametrize("replicas", [0, -1])
def test_a_server_has_a_replica(replicas: int) -> None:
    result = CliRunner().invoke(app, ["serve", "demo", "--port", "0", "--replicas", str(replicas)])
    assert result.exit_code == 2 and "replicas" in result.output


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("model.weights=int8", lambda config: config.model.weights == "int8"),
        ("model.dtype=float32", lambda config: config.model.dtype == "float32"),
        ("cache.prefix.ttl=9", lambda config: config.cache.prefix.ttl == 9),
        ("cache.format=int4", lambda config: config.cache.prefix.kind == "radix" and config.cache.quantized),
        ("schedule.max_num_seqs=3", lambda config: config.schedule.max_num_seqs == 3),
    ],
)
def test_every_engine_setting_is_one_of_a_served_model(tmp_path: Path, override: str, found: Any) -> None:
    """Of a model by name, and of a file whose sections are given by their main setting alone."""
    assert found(read_serve_config("demo-chat", (override,)))
    file = tmp_path / "a.yaml"
    file.write_text("model: demo-chat\ncache: {prefix: radix}\nschedule: continuous\n"
                    "models: {other: {model: demo, cache: {prefix: radix}, schedule: continuous}}\n")  # fmt: skip
    both = read_serve_config(str(file), (override, f"models.other.{override}"))
    assert found(both) and found(both.models["other"])
    assert (both.model.name, both.models["other"].model.name) == ("demo-chat", "demo")


@pytest.mark.parametrize("models", [(), ("other", "third")])
def test_a_setting_of_a_model_that_is_not_there_adds_none(tmp_path: Path, models: tuple[str, ...]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"model: demo-chat\nmodels: {{{', '.join(f'{name}: {{model: demo}}' for name in models)}}}\n")
    for override in ("models.othr.model.weights=int8", "models.othr.cache.format=int4", "models.othr.backend=eager"):
        with pytest.raises(WorkbenchError) as caught:
            read_serve_config(str(file), (override,))
        words = str(caught.value)
        assert words.startswith(f"--set {override}: no model is called 'othr'") and ("'other'" in words) == bool(models)
    for added in ("models.othr.model=demo", "models.othr.model.name=demo", "models.othr={model: demo}"):
        config = read_serve_config(str(file), (added, "models.othr.model.weights=int8"))
        assert [*config.models] == [*models, "othr"] and config.models["othr"].model.weights == "int8"


def test_an_override_is_of_its_own_server() -> None:
    before = read_serve_config("demo-chat", ())
    read_serve_config("demo-chat", ("cache.page_size=8", "schedule.max_num_seqs=3"))
    assert read_serve_config("demo-chat", ()) == before


def test_clusters_close_in_reverse_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, although one cannot."""
    closed: list[str] = []

    class FakeCluster:
        def __init__(self, config: Any, *_: Any, **__: Any):
            self.name = config.served_name if hasattr(config, "served_name") else "other"

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "other":
                raise RuntimeError("it cannot close")

    made = SimpleNamespace(url="http://x", run=lambda: None)
    monkeypatch.setattr(cluster, "Cluster", FakeCluster)
    monkeypatch.setattr(server, "Server", lambda *_: made)
    monkeypatch.setattr(served_model, "ServedModel", lambda *_: None)
    file = tmp_path / "two.yaml"
    file.write_text("model: demo\nserved_name: first\nmodels: {other: {model: demo}}\n")
    before = signal.getsignal(signal.SIGTERM)
    try:
        result = CliRunner().invoke(app, ["serve", str(file), "--replicas", "2"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert closed == ["other", "first"] and "it cannot close" in str(result.exception)
