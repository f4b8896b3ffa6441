"""Build the site from the command line: `python -m tools.site` (`make docs`).

.venv/bin/python -m tools.site                  # build/site/html/index.html
.venv/bin/python -m tools.site --out FOLDER     # FOLDER/source and FOLDER/html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.site.build import ROOT, build


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="where the site is put")
    out = parser.parse_args().out
    problems = build(out)
    for line in problems:
        print(line, file=sys.stderr)
    print(f"{len(problems)} problems" if problems else f"open {out / 'html' / 'index.html'}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
