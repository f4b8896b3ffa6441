"""The fake peer is a script that finds its imports beside another one."""

from __future__ import annotations

collect_ignore = ["fake_peer.py"]
