"""Open a run folder as one frozen value, the record of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_json_object, read_yaml
from workbench.runs.condition import FolderCondition, State, check_folder
from workbench.runs.folder import RunFolder
from workbench.runs.measures import format_measure, learn_measures, main_measures
from workbench.trace.script import StepScript

__all__ = ["Record", "RunFolder"]


@dataclass(frozen=True)
class Record(Displayable):
    """The record of a run: an opened run folder. Files are read on first access."""

    path: Path
    condition: FolderCondition = field(repr=False)

    @classmethod
    def open(cls, path: Path | str, incomplete_ok: bool = False) -> Record:
        """Open a run folder and check that it is complete.

        Raises WorkbenchError if `path` is not a run, was not finished, or lacks a file of its manifest. `incomplete_ok`
        opens an unfinished, partially copied or older run with the files that exist. Sizes are compared here, contents
        by `verify`.
        """
        record = cls(Path(path), check_folder(Path(path)))
        if not (record.complete or incomplete_ok):
            raise WorkbenchError(f"run {path}: {record.condition}")
        return record

    @property
    def complete(self) -> bool:
        """Return True if the run was finished and all its files exist."""
        return self.condition.state == "complete"

    @property
    def state(self) -> State:
        return self.condition.state

    @property
    def manifest(self) -> dict[str, dict]:
        """Return the manifest: file name -> bytes, sha256."""
        return self.condition.manifest

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def experiment_text(self) -> str:
        """Return the resolved experiment as YAML."""
        return self.read_text("experiment.yaml")

    @cached_property
    def environment(self) -> dict:
        return self.read_json("environment.json")

    @cached_property
    def summary(self) -> dict:
        found = self.read_json("summary.json")
        learn_measures(found)
        return found

    @cached_property
    def requests(self) -> pa.Table:
        return self.read_table("requests.parquet")

    @cached_property
    def steps(self) -> pa.Table:
        return self.read_table("steps.parquet")

    @cached_property
    def tokens(self) -> pa.Table:
        return self.read_table("tokens.parquet")

    @cached_property
    def decisions(self) -> pa.Table:
        return self.read_table("decisions.parquet")

    def script(self) -> StepScript:
        """Return the script that `engine.replay` takes to repeat this run's steps. Raises WorkbenchError if it was not
        recorded.
        """
        if not all((self.path / f"{name}.parquet").is_file() for name in ("inputs", "spans")):
            raise WorkbenchError(
                f"run {self.path}: holds no inputs.parquet and spans.parquet (it was simulated or compared, or is "
                "older than these tables), so its steps cannot be replayed; reproduce it without --replay"
            )
        inputs, spans = (self.read_table(f"{name}.parquet").to_pylist() for name in ("inputs", "spans"))
        return StepScript.from_tables(inputs, spans, self.decisions.to_pylist())

    def verify(self) -> None:
        """Compare every file's contents with the manifest. Raises a WorkbenchError that names each differing file."""
        if self.state in ("running", "killed", "unfinished"):
            raise WorkbenchError(f"run {self.path}: unfinished, so it has no manifest to verify against")
        found = check_folder(self.path, contents=True)
        if found.state != "complete":
            raise WorkbenchError(f"run {self.path}: {found}")

    def read_text(self, name: str) -> str:
        return self._bytes(name).decode("utf-8", "replace")

    def read_json(self, name: str) -> dict:
        try:
            return read_json_object(self._bytes(name))
        except UnreadableText as error:
            raise WorkbenchError(f"run {self.path}: {name} is damaged ({error})") from error

    def read_table(self, name: str) -> pa.Table:
        try:
            return pq.read_table(pa.BufferReader(self._bytes(name)))
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise WorkbenchError(f"run {self.path}: {name} is damaged ({reason})") from error

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            here = ", ".join(sorted(p.name for p in self.path.glob("[!.]*"))) or "nothing"
            message = f"run {self.path}: cannot read {name} ({error.strerror}); the folder holds {here}"
            raise WorkbenchError(message) from error

    def _display_table(self) -> Table:
        """Summarize every readable file, also of an incomplete run."""
        rows = {"run": self.name, "state": str(self.condition)}
        folded: list[tuple[str, str]] = []
        if self.complete and "experiment.yaml" in self.manifest:
            folded.append(("its experiment, as YAML", self.experiment_text))
            written = read_yaml(self.experiment_text, f"run {self.path}: experiment.yaml")
            question = written.get("question") if isinstance(written, dict) else None
            rows = {"question": str(question), **rows} if question else rows
        variants = self._variants()
        return Table(
            "", [*rows.items(), *self._headline().items(), *self._verdicts().items()],
            subtables=[variants] if variants is not None else (), collapsed=folded,
        )  # fmt: skip

    def _variants(self) -> Table | None:
        """Tabulate a comparison's rows with their main figures and units; None if the run is not a comparison."""
        found = self.summary.get("rows") if (self.path / "summary.json").is_file() else None
        rows = [row for row in found or () if isinstance(row, dict)]
        names = main_measures(rows)
        if not names:
            return None
        label = next((name for name, value in rows[0].items() if isinstance(value, str)), "variant")
        cells = [[row.get(label), *(format_measure(name, row.get(name)) for name in names)] for row in rows]
        return Table("", cells, (label, *names), left=())

    def _verdicts(self) -> dict[str, str]:
        found = self.summary.get("verdicts") if self.complete and "summary.json" in self.manifest else None
        return {each["claim"]: f"{each['outcome']}: {each['reason']}" for each in found or ()}

    def _headline(self) -> dict[str, str]:
        if not (self.path / "summary.json").is_file():
            return {}
        out = {}
        for key in ("wall_s", "output_tokens_per_s", "decode_tokens_per_s"):
            if isinstance(value := self.summary.get(key), (int, float)):
                out[key] = format_measure(key, value)
        for key in ("ttft_s", "tpot_s", "itl_s", "e2el_s"):
            spread = self.summary.get(key)
            if isinstance(spread, dict) and spread.get("p50") is not None:
                shown = (format_measure(key, spread[p]) for p in ("p50", "p90", "p99"))
                out[f"{key} p50 / p90 / p99"] = " / ".join(shown)
        return out
