"""The whole bench, with peers that need nothing installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import catalog, interpreters, peers_markdown, peers_tables, run_peers, write_record
from benchmarks.peers.__main__ import main as command
from benchmarks.peers.catalog import Peer
from benchmarks.peers.rows import summarize_runs
from benchmarks.peers.works import PeerWorkload, decode_workload, mixed_workload, prefill_workload
from tests.benchmarks.fakes import fake, noise, right_logits
from tests.helpers.refusals import refuses
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.model.hf.convert_gguf import convert_to_gguf

WORKS = (decode_workload(0, 5), prefill_workload(20))


def bench(peers: list[Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works=WORKS, **settings) -> dict:
    monkeypatch.setattr(catalog, "FOREIGN_PEERS", tuple(peers))
    settings = {"formats": ("bfloat16",), "rounds": 2, "repetitions": 2, "threads": 1, "backends": (), **settings}
    return run_peers("shape:tiny", works, folder=tmp_path / "exports", **settings)


def rows(record: dict) -> dict[tuple[str, str], dict]:
    return {(row["peer"], row["work"]): row for row in record["rows"]}


def test_what_cannot_be_timed_is_a_row_and_the_rest_goes_on(tmp_path, monkeypatch) -> None:
    note = tmp_path / "note"
    peers = [
        fake("honest", note, step=0.5),
        fake("liar", note, logits=noise()),
        fake("absent", note, load="absent"),
        fake("dies", note, load="dies"),
        fake("broken", note, generate="broken"),
        fake("other", note, formats=("float32",)),
    ]
    record = bench(peers, tmp_path, monkeypatch, works=(*WORKS, decode_workload(4096)))
    found = rows(record)
    statuses = {name: found[name, "prefill 20"]["status"] for name in ("honest", "liar", "absent", "dies", "broken")}
    assert statuses == {
        "honest": "ok", "liar": "disagrees", "absent": "absent", "dies": "failed", "broken": "failed",
    }  # fmt: skip
    assert found["honest", "decode at 0"]["tokens_per_s"] == pytest.approx(2.0)
    assert "is allowed" in found["liar", "decode at 0"]["reason"]
    assert found["absent", "decode at 0"]["reason"] == "No module named 'no_such_package'; install: pip install absent"
    assert found["broken", "decode at 0"]["reason"] == "RuntimeError: lost its way"
    assert found["other", "decode at 0"]["reason"] == "no bfloat16 here; it has float32"
    assert found["honest", "decode at 4096"]["reason"] == "4224 tokens, the model's context is 256"
    assert all("tokens_per_s" not in row for row in record["rows"] if row["status"] != "ok")
    assert {line.split()[0] for line in note.read_text().splitlines()} == {"honest"}  # no other was timed
    assert sum(run["peer"] == "broken" for run in record["runs"]) == len(WORKS)  # not again in the second round


def test_rounds_are_interleaved_and_prompts_new_and_shared(tmp_path, monkeypatch) -> None:
    note, progress = tmp_path / "note", []
    peers = [fake(name, note) for name in ("a", "b")]
    bench(peers, tmp_path, monkeypatch, works=(decode_workload(0, 5),), on_progress=progress.append)
    lines = [line.split() for line in note.read_text().splitlines()]
    assert [name for name, _ in lines] == [*"aaa", *"bbb", *"bbb", *"aaa"]  # a warm-up and two repetitions each
    firsts = [first for _, first in lines]
    assert firsts[:3] == firsts[3:6] and firsts[6:9] == firsts[9:] and firsts[:3] != firsts[6:9]
    assert progress[0] == "logits: a bfloat16" and progress[-1] == "round 2/2: decode at 0 bfloat16, a"


def test_quantized_rows_need_the_peer_to_agree_with_dense_weights_too(tmp_path, monkeypatch) -> None:
    near = [value * 1.05 for value in right_logits()]  # within the bound of INT4, not of bfloat16
    peers = [fake("near", tmp_path / "note", ("bfloat16", "int4"), logits=near)]
    record = bench(peers, tmp_path, monkeypatch, formats=("int4",))
    assert [(each["format"], each["status"]) for each in record["agreement"]] == [
        ("bfloat16", "disagrees"), ("int4", "ok"),
    ]  # fmt: skip
    assert {row["status"] for row in record["rows"]} == {"disagrees"}
    assert record["rows"][0]["reason"].startswith("with bfloat16 weights: ")


def test_medians_spread_and_ratios() -> None:
    line = {"format": "bfloat16", "work": "w", "status": "ok", "reason": ""}
    lines = [{**line, "peer": name} for name in ("workbench", "workbench mlir", "a", "b")]
    seconds = {"workbench": [1, 2, 4, 4], "workbench mlir": [1, 1, 1, 1], "a": [2, 2, 2, 2], "b": [4, 4, 4, 8]}
    runs = [
        {
            **line, "peer": name, "round": turn, "load_seconds": 1.0, "peak_bytes": turn,
            "others_cpu_share": 0.1 * turn, "weights": "", "how": f"backend {turn}" if name == "workbench" else "so",
            "measured": [{"tokens": 8, "seconds": each} for each in own[2 * turn :][:2]],
        }
        for name, own in seconds.items()
        for turn in range(2)
    ]  # fmt: skip
    found = {row["peer"]: row for row in summarize_runs(lines, runs)}
    assert found["workbench"]["tokens_per_s"] == 3 and found["workbench"]["spread"] == [2, 6]
    assert found["workbench"]["peak_bytes"] == 1 and found["workbench"]["others_cpu_share"] == pytest.approx(0.1)
    assert found["workbench"]["how"] == "backend 0; then backend 1" and found["a"]["how"] == "so", (
        "auto may choose anew"
    )
    assert [found[name]["of_workbench"] for name in seconds] == [1, 8 / 3, 4 / 3, 2 / 3]
    assert [found[name]["of_best_peer"] for name in seconds] == [3 / 4, 2, 1, 1 / 2]


def test_a_peer_without_finite_logits_costs_its_rows_and_not_the_record(tmp_path, monkeypatch) -> None:
    peers = [fake("honest", tmp_path / "note"), fake("nan", tmp_path / "note", logits=[float("nan")] * 257)]
    record = bench(peers, tmp_path, monkeypatch)
    kept = json.loads(write_record(record, tmp_path / "records").read_text())
    found = {each["peer"]: each for each in kept["agreement"]}
    assert found["nan"]["errors"] == {"prefill": None, "decode": None} and found["nan"]["status"] == "disagrees"
    assert "257 of 257 are not finite" in rows(kept)["nan", "prefill 20"]["reason"]
    assert rows(kept)["honest", "prefill 20"]["status"] == "ok"


def test_the_record_is_kept_after_every_round(tmp_path, monkeypatch) -> None:
    """In one file; a run that is ended in its second round leaves the first."""
    peers = [fake("honest", tmp_path / "note", step=0.5)]
    kept: list[dict] = []

    def tell(line: str) -> None:
        if line.startswith("round 2/3"):
            raise KeyboardInterrupt

    def keep(record: dict) -> None:
        write_record(record, tmp_path / "records")
        kept.append(record)

    with pytest.raises(KeyboardInterrupt):
        bench(peers, tmp_path, monkeypatch, rounds=3, on_progress=tell, on_round=keep)
    (path,) = (tmp_path / "records").iterdir()
    left = json.loads(path.read_text())
    assert left["settings"]["rounds"] == 3 and left["settings"]["rounds_done"] == 1
    assert rows(left)["honest", "decode at 0"]["tokens_per_s"] == pytest.approx(2.0)
    whole = bench(peers, tmp_path, monkeypatch, rounds=3, on_round=keep)
    assert [each["settings"]["rounds_done"] for each in kept] == [1, 1, 2, 3] and kept[-1] == whole
    assert len({each["date"] for each in kept[1:]}) == 1


def test_record_and_tables(tmp_path, monkeypatch) -> None:
    peers = [fake("honest", tmp_path / "note", step=0.5), fake("liar", tmp_path / "note", logits=noise())]
    peers.append(fake("broken", tmp_path / "note", load="broken"))
    record = bench(peers, tmp_path, monkeypatch)
    path = write_record(record, tmp_path / "records")
    assert path.name.startswith("peers-tiny-2") and json.loads(path.read_text()) == record
    assert str(tmp_path) not in path.read_text() and sys.executable not in path.read_text()
    text = peers_markdown(record)
    assert "| honest | 2.0 | 2.0 to 2.0 |" in text and "| liar | disagrees |" in text
    assert "- honest: python" in text and record["environment"]["cpu"]["model"] in text
    assert [table.title for table in peers_tables(record)] == ["decode at 0, bfloat16", "prefill 20, bfloat16"]
    assert [len(table.rows) for table in peers_tables(record)] == [3, 3]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("demo", {}, "give shape:NAME"),
        ("shape:huge", {}, "no shape 'huge'"),
        ("shape:tiny", {"formats": ("int5",)}, "no format 'int5'; did you mean"),
        ("smollm2", {}, "`workbench model get smollm2` fetches it"),
        ("shape:tiny", {"rounds": 0}, "rounds 0: must be at least 1"),
        ("shape:tiny", {"peers": ["llama.cp"]}, "no peer 'llama.cp'; did you mean 'llama.cpp'"),
    ],
)
def test_mistakes_are_reported(tmp_path, monkeypatch, model, settings, message) -> None:
    monkeypatch.setenv("WORKBENCH_DATA_DIR", str(tmp_path / "none"))
    refuses(message, run_peers, model, WORKS, folder=tmp_path, **settings)


def test_a_file_is_read_by_each_tool_as_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "demo.Q8_0.gguf"
    convert_to_gguf(BUNDLED_MODELS["demo-draft"], path, "q8_0", torch.bfloat16)
    settings: dict[str, Any] = {
        "rounds": 1,
        "repetitions": 1,
        "threads": 1,
        "backends": ("eager",),
        "peers": ["onnxruntime"],
    }
    record = run_peers(str(path), WORKS, ("file",), folder=tmp_path, **settings)
    (found,) = record["agreement"]
    assert found["status"] == "ok" and 0 < max(found["errors"].values()) < found["bound"] < 0.1
    assert {name: row["status"] for (name, _), row in rows(record).items()} == {
        "workbench eager": "ok",
        "onnxruntime": "unsupported",
    }
    assert record["model"]["name"] == "demo.Q8_0" and str(tmp_path) not in json.dumps(record)
    assert {run["weights"] for run in record["runs"]} == {"weights as demo.Q8_0.gguf stores them"}
    refuses("weight_group: each tool reads demo.Q8_0.gguf as it stores", run_peers, str(path), WORKS, ("file",),
            folder=tmp_path, **settings, settings={"weight_group": 64})  # fmt: skip
    refuses("no format 'int8'; known: file", run_peers, str(path), WORKS, ("int8",), folder=tmp_path, **settings)


def test_the_command_refuses_a_format_that_there_is_not() -> None:
    refuses("no format 'int5'", command, "shape:tiny", format=["int5"])


def test_interpreters_are_named_in_the_environment(monkeypatch) -> None:
    monkeypatch.setenv(catalog.INTERPRETERS_VARIABLE, f"llama.cpp={sys.executable}:openvino=/bin/sh")
    assert interpreters() == {"llama.cpp": sys.executable, "openvino": "/bin/sh"}
    for wrong in ("llama.cpp", "unknown=/bin/sh", "openvino=/no/such/python", "openvino=/"):
        monkeypatch.setenv(catalog.INTERPRETERS_VARIABLE, wrong)
        refuses(catalog.INTERPRETERS_VARIABLE, interpreters)


def test_the_workbench_and_transformers_agree_and_are_timed(tmp_path) -> None:
    pytest.importorskip("transformers", reason="pip install transformers")
    works: tuple[PeerWorkload, ...] = (mixed_workload(2, (4, 8), (2, 3), 12, 5),)
    record = run_peers(
        "shape:tiny", works, ("float32",), folder=tmp_path, rounds=1, repetitions=1, threads=1, backends=("eager",),
        peers=["transformers"], seed=3,
    )  # fmt: skip
    found = {each["peer"]: each for each in record["agreement"] if each["format"] == "float32"}
    assert {name: each["status"] for name, each in found.items()} == {"workbench eager": "ok", "transformers": "ok"}
    assert all(max(each["errors"].values()) < 1e-5 and len(each["errors"]) == 2 for each in found.values())
    for row in record["rows"]:
        assert row["status"] == "ok" and row["tokens_per_s"] > 0
    assert record["peers"]["transformers"]["transformers"]
