"""Run the command line `workbench` as `python -m workbench`; under torchrun only in rank 0."""

from __future__ import annotations

import os

from workbench.cli import entry

if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")) and "MASTER_ADDR" in os.environ:  # set by torchrun
        from workbench.engine.rank_process import main

        main()
    else:
        entry()
