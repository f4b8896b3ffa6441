"""Time each notebook from Run All to its first widget, without a browser.

    .venv/bin/python -m tools.notebooks.first_widget [NAME...] [--cold] [--folder FOLDER]

The clock starts when the kernel is ready. With --cold nothing that was compiled or measured before is found.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.lab.execute import KERNEL_TIMEOUT_S, VIEW, code_cells
from workbench.lab.start import notebooks_in

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class FirstWidget:
    """The seconds from Run All to the first widget, and the number of the code cell that shows it; both None without a
    widget."""

    notebook: str
    seconds: float | None
    cell: int | None


class _WidgetShown(Exception):
    pass


def time_to_first_widget(path: Path, environment: Mapping[str, str] | None = None) -> FirstWidget:
    """Run a percent file cell by cell until a cell shows a widget, in a new kernel that is ended afterwards."""
    import jupytext
    from jupyter_client.manager import KernelManager

    def look(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["header"]["msg_type"] == "error":
            raise RuntimeError(f"{path.name}: {content['ename']}: {content['evalue']}")
        if VIEW in content.get("data", {}):
            raise _WidgetShown

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(path.parent), env=dict(os.environ) | dict(environment or {}))
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=KERNEL_TIMEOUT_S)
        began = time.perf_counter()
        for number, (_, cell) in enumerate(code_cells(jupytext.read(path)), 1):
            try:
                client.execute_interactive("".join(cell["source"]), output_hook=look)
            except _WidgetShown:
                return FirstWidget(path.name, time.perf_counter() - began, number)
        return FirstWidget(path.name, None, None)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="notebooks; all of the course unless given")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks")
    parser.add_argument("--cold", action="store_true", help="with empty caches")
    given = parser.parse_args()
    for path in notebooks_in(given.folder):
        if given.names and path.name not in given.names:
            continue
        with tempfile.TemporaryDirectory(prefix="workbench-cold-") as empty:
            cold = {"WORKBENCH_CACHE_DIR": empty, "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
            found = time_to_first_widget(path, cold if given.cold else None)
        after = "no widget" if found.seconds is None else f"{found.seconds:6.1f} s, cell {found.cell}"
        load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""
        print(f"{path.name:<28}{after:<20}{load}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
