"""Tables that are made when the site is built: the zoo, records, events, guides."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tools.site import events, records, zoo
from tools.site.blocks import BLOCKS, guides
from tools.structure import ROOT
from workbench.claims.comparison import FIGURES
from workbench.claims.summary import LawCount, Summary, store_summaries

ENTRY = """
technique: Quest
kind: attention
paper: "Tang et al., 2024: Quest (arXiv:2406.10774)"
use: {attention.sliding_window: 64}
says: "The pages with the largest bounds hold what counts."
rule: "kl <= 0.02 and bytes_ratio <= 0.8"
held: "At 4,096 tokens it does."
"""
SOURCE = (
    '"""Quest: read pages whose keys may score high.\n\nAs so:\n\n    bound = sum max(q * low, q * high)\n"""\nx = 1\n'
)
SUMMARY = Summary(
    "technique", {"kl": 0.0123456, "bytes_ratio": 1.0}, "demo", "Zen 5, 2 cores", date="2026-01-02T00:00:00",
    others_cpu_share=0.0, laws=LawCount(4),
)  # fmt: skip


def plant(root: Path) -> Path:
    folder = root / "experiments" / "zoo"
    folder.mkdir(parents=True)
    for name, technique, kind in (("quest", "Quest", "attention"), ("tova", "TOVA (KV)", "eviction")):
        settings = ENTRY.replace("technique: Quest", f"technique: {technique}").replace("attention\n", f"{kind}\n")
        (folder / f"{name}.yaml").write_text(settings)
        (folder / f"{name}.py").write_text(SOURCE)
    store_summaries(folder / "quest.yaml", [SUMMARY])
    return root


def test_a_folder_without_entries_is_no_mistake(tmp_path: Path) -> None:
    assert zoo.zoo_table(tmp_path) == zoo.EMPTY and zoo.zoo_sections(tmp_path) == ""


def test_the_zoo_has_a_row_and_a_section_an_entry(tmp_path: Path) -> None:
    table = zoo.zoo_table(plant(tmp_path))
    assert table.startswith("2 entries: 1 holds-with-limits, 1 not run yet.")
    (quest, tova) = [line for line in table.splitlines() if line.startswith("| [")]
    assert quest.startswith("| [Quest](#quest) | attention | Tang et al., 2024 | 1 | 4 of 4 | 1")
    assert "0.0123" in quest and quest.endswith("| holds-with-limits |")
    assert tova.startswith("| [TOVA (KV)](#tova-kv) | eviction |") and tova.endswith("| not run yet |")
    text = zoo.zoo_sections(tmp_path)
    assert text.index("## Attention") < text.index("### Quest") < text.index("## Eviction") < text.index("### TOVA")
    assert "As so:\n\n```text\nbound = sum max(q * low, q * high)\n```" in text
    assert "| rule | `kl <= 0.02 and bytes_ratio <= 0.8` |" in text and "| here | At 4,096 tokens it does. |" in text
    assert "| `kl` | 0.0123" in text and "Zen 5, 2 cores" in text


def test_the_zoo_lists_every_figure_of_a_rule() -> None:
    table = zoo.zoo_figures(ROOT)
    for kind, names in FIGURES.items():
        rows = [line for line in table.splitlines() if re.match(rf"\| (\w+, )*{kind}\b", line)]
        assert [row.split("`")[1] for row in rows] == list(names)
    assert table.count("`kl`") == 1


def test_the_newest_record_of_each_question_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "experiments" / "records"
    folder.mkdir(parents=True)
    where = {"cpu": {"model": "Zen", "flags": ["avx2", "avx512f"], "usable_cores": 4}, "gpu": [{"name": "H100"}]}
    for day, rate in ((2, 250.0), (1, 9.5)):
        record = {"rows": [{"work": "decode 8", "status": "ok", "tokens_per_s": rate}], "environment": where}
        (folder / f"bench-x-2026010{day}-000000.json").write_text(json.dumps(record))
    (folder / "notes.json").write_text("no record")
    machine = "Zen, AVX-512, 4 cores, H100"
    expected = f"| bench | decode 8: 250 tokens/s | {machine} | `bench-x-20260102-000000` |"
    assert expected in records.figures_table(tmp_path)
    assert f"| {machine} | 1 | bench-x |" in records.machines_table(tmp_path)


def test_tools_are_compared_within_one_record(tmp_path: Path) -> None:
    folder = tmp_path / "experiments" / "records"
    folder.mkdir(parents=True)
    for date, peers in (("20260101", {"workbench": 20.0, "llama.cpp": 10.0}), ("20260102", {"workbench": 99.0}),
                        ("20251231", {"workbench": 1.0, "llama.cpp": 2.0})):  # fmt: skip
        rows = [{"peer": p, "work": "decode", "format": "int8", "tokens_per_s": rate} for p, rate in peers.items()]
        record = {"model": {"name": "shape:s"}, "rows": rows, "environment": {"cpu": {"model": "Zen"}}}
        (folder / f"peers-s-{date}-000000.json").write_text(json.dumps(record))
    table = records.peers_tables(tmp_path)
    assert "| s | decode | int8 | 20.0 | 10.0 | `peers-s-20260101-000000` |" in table and "99" not in table


def test_every_row_of_figures_names_a_record_that_is_there() -> None:
    for block in ("figures", "peers", "verdicts"):
        rows = re.findall(r"^\|.*`.*", BLOCKS[block](ROOT), re.M)
        names = re.findall(r"`([^`]+)` \|$", "\n".join(rows), re.M)
        assert len(names) == len(rows) >= 8
        assert all((ROOT / "experiments" / "records" / f"{name}.json").is_file() for name in names)


def test_every_kind_of_event_has_a_row() -> None:
    table = events.events_table(ROOT)
    assert all(f"| `{kind.kind}` |" in table for kind in events.kinds()) and table.count("\n| `") > 12
    assert "`prefill_tokens`" in table and "`request_id`" not in table


def test_a_guide_that_the_readme_does_not_name_is_listed_too(tmp_path: Path) -> None:
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    for name in ("index", "zebra", "traces"):
        (tmp_path / "docs" / "guide" / f"{name}.md").write_text(f"# The {name}\n")
    (tmp_path / "README.md").write_text("| read a trace | [docs/guide/traces.md](docs/guide/traces.md) |\n")
    text = guides(tmp_path)
    assert "| read a trace | [The traces](traces.md) |\n| the zebra | [The zebra](zebra.md) |" in text
    assert text.endswith("traces\nzebra\n```")
