"""Find the project's own experiments and notebooks: an installed wheel has them within the package, a checkout beside
it.

`import workbench` imports this module, so that `experiments` can be imported wherever `workbench` can: claims, entries
of the zoo and parts named `experiments.module:function` are read from it.
"""

from __future__ import annotations

import sys
from pathlib import Path

_WITHIN = Path(__file__).resolve().parent / "_checkout"  # tools/wheel.py puts it there
OWN_FOLDER = _WITHIN if _WITHIN.is_dir() else _WITHIN.parents[1]
OWN_EXPERIMENTS = OWN_FOLDER / "experiments"
OWN_NOTEBOOKS = OWN_FOLDER / "notebooks"

if str(OWN_FOLDER) not in sys.path:
    sys.path.append(str(OWN_FOLDER))  # last: a folder of the user's comes first
