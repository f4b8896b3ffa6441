"""A worker without an experiment: what `workbench.sweep.worker` leaves, in a fraction of its time.

`began.txt` has a line for each that began. The first to come to a point in which a file `stay` lies never ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

from workbench.runs.folder import RunFolder
from workbench.runs.process import describe_process


def main(folder: Path) -> None:
    with (folder / ".lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if (folder / "outcome.json").exists():
            return
        run = RunFolder.create(folder, "run")
        run.write_json("summary.json", {"by": os.getpid()})
        with (folder / "began.txt").open("a") as file:
            file.write(json.dumps(describe_process()) + "\n")
        if (folder / "stay").exists():
            (folder / "stay").rename(folder / "stayed")
            time.sleep(3600)
        run.finish()
        text = {"key": folder.name, "run": run.path.name, "error": None, "seconds": 0.1, "peak_bytes": None}
        (folder / "outcome.tmp").write_text(json.dumps(text))
        os.replace(folder / "outcome.tmp", folder / "outcome.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]).parent)
