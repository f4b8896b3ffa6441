"""Benchmark every peer on the same model: compare logits first, then time interleaved rounds, each measurement in a
separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.agreement import LogitsReference
from benchmarks.peers.catalog import FILE, FORMATS, Peer, foreign_peers, python_of, workbench_peer
from benchmarks.peers.entries import PeerEntry, check_agreement, check_supported, comparisons, entry_row
from benchmarks.peers.export import ExportFailure, ModelExports
from benchmarks.peers.placement import core_to_core_ns
from benchmarks.peers.process import run_script
from benchmarks.peers.rows import summarize_runs
from benchmarks.peers.works import PeerWorkload, standard_workloads
from workbench.errors import WorkbenchError, nearest
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import load_weights
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.models.store import fetched_model

SHAPE = "shape:"


def run_peers(
    model: str,
    workloads: Sequence[PeerWorkload] | None = None,
    formats: Sequence[str] = ("bfloat16", "int8", "int4"),
    *,
    folder: Path,
    rounds: int = 3,
    repetitions: int = 3,
    threads: int = 2,
    backends: Sequence[str] = ("auto",),
    peers: Sequence[str] | None = None,
    pythons: Mapping[str, str] | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    timeout: float = 900.0,
    on_progress: Callable[[str], None] = lambda line: None,
    on_round: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Time peers and the workbench on one model and return the record.

    In each round each combination of workload, format and peer gets one process, which runs a warm-up and then
    `repetitions`. Two processes never run at once. A peer that is not installed, is unsupported, disagrees with our
    logits or fails gets a row with the reason.

    Args:
        model: A `shape:NAME`, or a GGUF file or its name among the fetched models, with the format `file` alone.
        workloads: Workloads to time; None is the standard five.
        formats: Weight formats.
        folder: Folder for exports.
        rounds: Number of rounds.
        repetitions: Repetitions in each process.
        threads: Threads and cores of each process.
        backends: Backends of the workbench.
        peers: Names of peers; None is all known ones.
        pythons: Interpreter of each tool; the default is this one.
        seed: Seed of the weights and prompts.
        settings: Further arguments of `workbench.load` (`weight_group`, `compile`).
        timeout: Seconds for each process.
        on_progress: Called with a line of text before each process.
        on_round: Called with the record so far after each round.
    """
    file = file_of(model)
    if file is not None and (changed := [name for name in settings or {} if "weight" in name]):
        raise WorkbenchError(f"{', '.join(changed)}: each tool reads {file.name} as it stores its weights")
    spec = _checked(model, file, formats, rounds, repetitions, threads)
    state = None if file is None else load_weights(file, spec, torch.float32)
    workloads, pythons = standard_workloads() if workloads is None else workloads, pythons or {}
    own = (workbench_peer(backend, str(file or model), seed, settings or {}) for backend in backends)
    every = (*own, *foreign_peers(peers))
    before, about, date = cpu_times(), environment(), datetime.now(UTC).isoformat(timespec="seconds")
    bench = _PeerBench(ModelExports(folder, spec, seed, threads, file), pythons, threads, timeout, on_progress)
    entries = [
        check_supported(PeerEntry(peer, format, work), spec)
        for work in workloads
        for format in formats
        for peer in every
    ]
    pairs = comparisons(entries)
    agreement = bench.agree(pairs, LogitsReference(spec, seed, [format for _, format in pairs], state))
    del state  # it would lie beside what is timed
    entries = [check_agreement(entry, agreement) for entry in entries]
    runs: list[dict] = []

    def record_of(rounds_done: int) -> dict[str, Any]:
        return {
            "question": "How fast are other tools on the same model, the same machine and the same threads?",
            "date": date,
            "model": {"name": model if file is None else file.stem, "seed": seed, "spec": spec.model_dump(mode="json")},
            "works": [{**asdict(work), "requests": [list(pair) for pair in work.requests]} for work in workloads],
            "settings": {
                "rounds": rounds,
                "rounds_done": rounds_done,
                "repetitions": repetitions,
                "threads": threads,
                "formats": list(formats),
                "workbench": dict(settings or {}),
            },
            "peers": {peer.name: _versions(peer, runs, agreement) for peer in every},
            "agreement": agreement,
            "rows": summarize_runs([entry_row(entry) for entry in entries], runs),
            "runs": list(runs),
            "others_cpu_share": others_cpu_share(before),
            "environment": about,
        }

    record = record_of(0)
    for turn in range(rounds):
        broken = {(run["peer"], run["format"], run["work"]) for run in runs if run["status"] != "ok"}
        for entry in entries if turn % 2 == 0 else entries[::-1]:  # drift favours no peer
            if entry.status == "ok" and (entry.peer.name, entry.format, entry.workload.name) not in broken:
                runs.append(bench.measure(entry, turn, repetitions, rounds))
        record = record_of(turn + 1)
        on_round(record)
    return record


class _PeerBench:
    """Run the peers' scripts on the exports of one model."""

    def __init__(
        self,
        exports: ModelExports,
        pythons: Mapping[str, str],
        threads: int,
        timeout: float,
        on_progress: Callable[[str], None],
    ):
        self.exports, self.pythons, self.threads = exports, pythons, threads
        self.timeout, self.tell = timeout, on_progress

    def agree(self, asked: Sequence[tuple[Peer, str]], reference: LogitsReference) -> list[dict]:
        """Return one finding for each (peer, format): status ok, disagrees, or the failure of its process."""
        findings = []
        for peer, format in asked:
            self.tell(f"logits: {peer.name} {format}")
            answer = self._run(peer, format, {"kind": "logits", "prompt": reference.prompt})
            logits = answer.pop("logits", {})
            if answer["status"] == "ok":
                found = reference.disagreement(format, logits)
                answer.update(found, status="disagrees" if found["reason"] else "ok")
            findings.append({"peer": peer.name, "format": format, "reason": "", **answer})
        return findings

    def measure(self, entry: PeerEntry, turn: int, repetitions: int, rounds: int) -> dict:
        peer, work = entry.peer, entry.workload
        self.tell(f"round {turn + 1}/{rounds}: {work.name} {entry.format}, {peer.name}")
        vocab, first = self.exports.spec.vocab_size, turn * (repetitions + 1)
        asked = [work.repetition(vocab, first + index) for index in range(repetitions + 1)]
        place = core_to_core_ns()
        answer = self._run(peer, entry.format, {"kind": work.kind, "repetitions": asked})
        row = {"round": turn, "peer": peer.name, "format": entry.format, "work": work.name}
        return {**row, "core_to_core_ns": place, **answer}

    def _run(self, peer: Peer, format: str, job: dict) -> dict:
        python = python_of(peer, self.pythons)
        try:
            model, weights = self.exports.export(peer.model_format, format, python, peer.packages)
        except ExportFailure as failure:
            answer = {"status": failure.status, "reason": f"export: {failure}"}
        else:
            whole = {**job, "peer": peer.name, "format": format, "model": str(model), "options": dict(peer.options)}
            answer = run_script(
                python, peer.script, whole, threads=self.threads, packages=peer.packages, timeout=self.timeout,
                environment=peer.environment,
            )  # fmt: skip
            answer["weights"] = weights
            if self.exports.file is not None:  # records name no place of this machine
                answer["reason"] = answer.get("reason", "").replace(str(model), model.name)
        if answer["status"] == "absent":
            answer["reason"] += f"; install: {peer.install}"
        return answer


def file_of(model: str) -> Path | None:
    """Return the GGUF file that `model` names; None if it does not name one."""
    found = fetched_model(model) or Path(model)
    return found.resolve() if found.suffix == ".gguf" else None


def _checked(
    model: str, file: Path | None, formats: Sequence[str], rounds: int, repetitions: int, threads: int
) -> ModelSpec:
    if file is None and not model.startswith(SHAPE):
        raise WorkbenchError(f"model {model!r}: give shape:NAME (random weights) or FILE.gguf")
    known = FORMATS if file is None else (FILE,)
    for format in formats:
        if format not in known:
            raise WorkbenchError(f"no format {format!r}{nearest(format, known)}; known: {', '.join(known)}")
    for name, value in (("rounds", rounds), ("repetitions", repetitions), ("threads", threads)):
        if value < 1:
            raise WorkbenchError(f"{name} {value}: must be at least 1")
    return named_shape(model.removeprefix(SHAPE)) if file is None else read_spec(file)


def _versions(peer: Peer, runs: Sequence[dict], agreement: Sequence[dict]) -> dict:
    """Return the versions that the peer's own interpreter reported."""
    answers: Iterator[dict] = (each for each in (*runs, *agreement) if each["peer"] == peer.name)
    return next((answer["versions"] for answer in answers if "versions" in answer), {})
