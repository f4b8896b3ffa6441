"""Into a store of plain files and out of it again by MLflow's own client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command_line import answer
from tests.runs.small_folders import HOSTILE, comparison_folder, experiment, run_folder, sweep_folder
from workbench.errors import WorkbenchError
from workbench.reports import mlflow_export
from workbench.reports.mlflow_export import export_to_mlflow

NOT_INSTALLED = "mlflow is not installed; pip install 'inference-workbench[mlflow]'"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow", reason=NOT_INSTALLED)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    return f"file:{tmp_path / 'mlruns'}"


def test_a_run_comes_out_as_it_went_in(store: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    record = run_folder(tmp_path, experiment(HOSTILE.replace("\x00", ""), schedule={"max_num_seqs": 3}))
    (found,) = export_to_mlflow(record.path, store)
    client = MlflowClient(store)
    run = client.get_run(found.run_id)
    assert run.info.run_name == record.name and run.info.status == "FINISHED"
    assert run.data.params["schedule.max_num_seqs"] == "3" and run.data.params["model.name"] == "shape:tiny"
    assert run.data.metrics["ttft_s.p50"] == record.summary["ttft_s"]["p50"]
    assert run.data.metrics["kv.bytes_used_peak"] == 128 and "backend.name" not in run.data.metrics
    assert run.data.tags["record"] == record.name and run.data.tags["backend"] == "eager (asked for)"
    assert (len(run.data.params), len(run.data.metrics)) == (found.parameters, found.metrics)
    kept = {each.path for each in client.list_artifacts(found.run_id)}
    assert kept == {path.name for path in record.path.iterdir()}
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in kept:
        client.download_artifacts(found.run_id, name, str(copy))
    assert all((copy / name).read_bytes() == (record.path / name).read_bytes() for name in kept)


def test_a_sweep_is_a_run_a_point_and_a_comparison_names_its_variants(store: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    exported = export_to_mlflow(sweep_folder(tmp_path), store, "other")
    client = MlflowClient(store)
    runs = [client.get_run(each.run_id) for each in exported]
    assert [run.data.tags["sweep"] for run in runs] == ["sizes", "sizes"]
    assert [run.data.params["schedule.max_num_seqs"] for run in runs] == ["1", "8"]
    assert client.get_experiment_by_name("other") is not None
    (found,) = export_to_mlflow(comparison_folder(tmp_path).path, store)
    run = client.get_run(found.run_id)
    assert run.data.metrics["a.tpot_s_p50"] == 0.01 and run.data.tags["verdict.C1"] == "holds"


def test_the_command_line(store: str, tmp_path: Path) -> None:
    record = run_folder(tmp_path)
    (found,) = answer("export --to mlflow --uri", store, record.path)
    assert found["run"] == record.name and found["artifacts"] == len(list(record.path.iterdir()))


def test_without_mlflow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(WorkbenchError, match=r"pip install 'inference-workbench\[mlflow\]'"):
        export_to_mlflow(tmp_path, f"file:{tmp_path}")


def test_a_changed_record_is_not_exported(store: str, tmp_path: Path) -> None:
    record = run_folder(tmp_path)
    text = (record.path / "summary.json").read_text()
    (record.path / "summary.json").write_text(text.replace("1", "2", 1))
    with pytest.raises(WorkbenchError, match="summary.json is not what was written"):
        export_to_mlflow(record.path, store)


def test_names_are_as_mlflow_has_them() -> None:
    assert mlflow_export._name("a<b>.c d/é") == "a_b_.c d/é" and mlflow_export._name("///") == "_"
