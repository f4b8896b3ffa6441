"""Blocks of pages that are made when the site is built, by the name that a page calls them by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

BLOCKS: dict[str, Callable[[Path], str]] = {}
