"""`python -m workbench` is the command line `workbench`."""

from __future__ import annotations

from workbench.cli import entry

if __name__ == "__main__":
    entry()
