"""Present the zoo: techniques with their measurements, as rows, as a table, and one by one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.claims.comparison import FIGURES, KINDS
from workbench.claims.summary import Summary
from workbench.claims.tables import NOT_RUN
from workbench.claims.technique import ZOO_FOLDER, LoadedTechnique, load_zoo, select_entries
from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError, nearest
from workbench.machine.processor import contention_remark
from workbench.own_folder import OWN_FOLDER

VERDICTS = ("holds", "holds-with-limits", "refuted", "not-testable-here", NOT_RUN)
HEADINGS = ("kind", "name", "technique", "paper", "lines", "laws", "bytes", "speed", "KL", "verdict")
TIMES = ("decode_time_ratio", "time_ratio")
EXPERIMENT = "experiments/first_light.yaml"  # experiment in the command that `show` prints


class ZooItem(Displayable):
    """One technique with its deciding summary, if it has one."""

    def __init__(self, entry: LoadedTechnique):
        self.entry, self.settings = entry, entry.settings
        self.record = next(iter(entry.summaries), None)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def verdict(self) -> str:
        """Return the outcome of the entry's current rule on the recorded figures."""
        return NOT_RUN if self.record is None else self.entry.rule.outcome(self.figures)

    @property
    def figures(self) -> Mapping[str, float | None]:
        numbers = {} if self.record is None else self.record.figures
        return {name: value for name, value in numbers.items() if not isinstance(value, str)}

    @property
    def source(self) -> str:
        """Return the path of the entry's file, relative to the project's folder if inside it."""
        file = self.entry.source_file
        return file.relative_to(OWN_FOLDER).as_posix() if file.is_relative_to(OWN_FOLDER) else str(file)

    @property
    def short_paper(self) -> str:
        return self.settings.paper.split(":")[0]

    @property
    def remarks(self) -> list[str]:
        """Return warnings: contention, or a technique that has been changed since."""
        if self.record is None:
            return []
        found = [remark] if (remark := contention_remark(self.record.others_cpu_share)) else []
        if self.record.inputs != self.entry.inputs:
            found.append(f"the entry has been changed since: `workbench zoo run {self.name}`")
        return found

    @property
    def use_line(self) -> str:
        """Return the line of YAML that enables the technique."""
        lines = self.entry.file.read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("use:")).removeprefix("use:").strip()

    @property
    def changes(self) -> dict[str, Any]:
        """Return the technique's settings for `command`. Beam search settings replace all of `sampling`, because beam
        search takes no settings that change the distribution."""
        use = self.settings.use
        if "sampling.beams" not in use:
            return use
        search = {path: value for path, value in use.items() if path.startswith("sampling.")}
        rest = {path: value for path, value in use.items() if path not in search}
        return {**rest, "sampling": {path.removeprefix("sampling."): value for path, value in search.items()}}

    @property
    def command(self) -> str:
        """Return a command that runs an experiment of the project with the technique."""
        sets = []
        for path, value in self.changes.items():
            text = value if isinstance(value, str) else json.dumps(value)
            quoted = f"{path}={text}".replace("'", "'\\''")
            sets.append(f"--set '{quoted}'")
        return " ".join([f"workbench run {EXPERIMENT}", *sets])

    def row(self) -> dict[str, Any]:
        """Return all details of the entry, JSON-ready."""
        record = self.record
        return {
            "name": self.name, **self.settings.model_dump(mode="json"), "lines": self.entry.lines,
            "source": self.source, "verdict": self.verdict,
            "reason": "" if record is None else self.entry.rule.reason(self.figures),
            "figures": self.figures,
            "laws": None if record is None else {"tried": record.laws.tried, "broken": list(record.laws.broken)},
            "backends": {} if record is None else dict(record.backends),
            "model": "" if record is None else record.model, "machine": "" if record is None else record.machine,
            "date": None if record is None else record.date,
            "remarks": self.remarks, "command": f"workbench zoo run {self.name}",
        }  # fmt: skip

    def cells(self) -> tuple[object, ...]:
        """Return its row of the table, in the order of `HEADINGS`."""
        time = next((value for name in TIMES if (value := self.figures.get(name))), None)
        return (
            self.settings.kind,
            self.name,
            self.settings.technique,
            self.short_paper,
            self.entry.lines,
            "" if self.record is None else str(self.record.laws),
            self.figures.get("bytes_ratio"),
            None if time is None else 1 / time,
            self.figures.get("kl"),
            self.verdict,
        )

    def figure_rows(self) -> list[tuple[str, float | None, str]]:
        """Return (name, value, meaning) of every figure; figures of the entry itself have no known meaning."""
        known = FIGURES[self.settings.kind]
        names = [*known, *(name for name in self.figures if name not in known)]
        return [(name, self.figures.get(name), known.get(name, "the entry's own")) for name in names]

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, text) lines of the entry's details, without figures and docstring."""
        record = self.record
        found = [("paper", self.settings.paper), ("claim", self.settings.says), ("rule", self.settings.rule)]
        if record is not None:
            found += [("verdict", f"{self.verdict}: {self.entry.rule.reason(self.figures)}")]
            found += [("here", self.settings.held)] * bool(self.settings.held)
            found += [("laws", f"{record.laws} hold" if record.laws.tried else "no laws to check")]
            found += [("broken law", law) for law in record.laws.broken]
            backends = ", ".join(dict.fromkeys(record.backends.values()))
            found += [("measured", f"{record.date[:10]}, {record.machine}" + (f" ({backends})" if backends else ""))]
            found += [("remark", remark) for remark in self.remarks]
        else:
            found += [("verdict", f"{NOT_RUN}: `workbench zoo run {self.name}`")]
        baseline = json.dumps(self.settings.baseline) if self.settings.baseline else "the model unchanged"
        found += [("use", self.use_line), ("instead of", baseline), ("try", self.command)]
        return [*found, ("source", f"{self.source} ({self.entry.lines} lines)")]

    def _display_table(self) -> Table:
        figures = Table("", self.figure_rows(), ("figure", "here", "what it says"), left=("what it says",))
        source = self.entry.source_file.read_text(encoding="utf-8")
        folded = [("the equation", self.entry.docstring), ("the source", source)]
        return Table(self.settings.technique, self.lines(), subtables=[figures], collapsed=folded)


class Zoo(Displayable):
    """Entries by name. `zoo["typical"]` is one entry, `zoo.of_kind("sampling")` all entries of one kind."""

    def __init__(self, items: Sequence[ZooItem]):
        self.items = {item.name: item for item in items}

    def __getitem__(self, name: str) -> ZooItem:
        if name not in self.items:
            raise WorkbenchError(f"no entry {name!r}{nearest(name, self.items)}; `workbench zoo` lists them")
        return self.items[name]

    def __iter__(self) -> Iterator[ZooItem]:
        return iter(self.items.values())

    def __len__(self) -> int:
        return len(self.items)

    def of_kind(self, kind: str) -> Zoo:
        """Return the entries of one kind. Raises WorkbenchError for an unknown kind."""
        if kind not in KINDS:
            raise WorkbenchError(f"kind {kind!r}: is unknown{nearest(kind, KINDS)}; known: {', '.join(KINDS)}")
        return Zoo([item for item in self if item.settings.kind == kind])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return all details of each entry, as printed by `workbench zoo --format json`."""
        return [item.row() for item in self]

    @property
    def counts(self) -> str:
        """Return the number of entries by verdict, in one line."""
        found = Counter(item.verdict for item in self)
        summary = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])
        return f"{len(self)} entr{'y' if len(self) == 1 else 'ies'}: {summary or 'none'}"

    def table(self) -> Table:
        """Return a table with one row per entry; bytes and speed are ratios to the baseline."""
        left = ("name", "technique", "paper", "laws", "verdict")
        return Table("", [item.cells() for item in self], HEADINGS, self.counts, left=left)

    def _display_table(self) -> Table:
        return self.table()


def open_zoo(folder: Path | str = ZOO_FOLDER) -> Zoo:
    """Open the zoo of published techniques, by kind and name, with the records of their measurements.

        workbench.open_zoo().of_kind("attention")
        workbench.open_zoo()["typical"]

    Args:
        folder: folder of the entries; default: the workbench's own.

    Raises:
        WorkbenchError: for a mistake in an entry or a record.
    """
    entries = load_zoo(Path(folder)).values()
    return Zoo([ZooItem(entry) for entry in sorted(entries, key=lambda each: KINDS.index(each.settings.kind))])


def verdict_of(entry: LoadedTechnique, summary: Summary) -> dict[str, Any]:
    """Return the verdict of the technique's rule on a measurement, as `workbench zoo run --json` prints it."""
    figures = {name: value for name, value in summary.figures.items() if not isinstance(value, str)}
    return {"outcome": entry.rule.outcome(figures), "reason": entry.rule.reason(figures), "figures": figures,
            "laws": str(summary.laws)}  # fmt: skip


def named_entries(folder: Path, names: Sequence[str]) -> dict[str, LoadedTechnique]:
    """Load a folder's entries and select `names`; an empty `names` selects all."""
    known = load_zoo(folder)
    return select_entries(known, names) if names else known
