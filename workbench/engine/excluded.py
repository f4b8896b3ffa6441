"""Refuse settings that exclude one another."""

from __future__ import annotations


def incompatible_settings(batch_invariant: bool, evicts: bool, speculates: bool) -> str:
    """Return why a runner cannot have all of these at once, or an empty string."""
    if evicts and batch_invariant:
        return "batch_invariant: not with cache.evict: what stays of a prompt depends on its chunks; leave one out"
    if evicts and speculates:
        return "speculate: not with cache.evict: what a policy of it weighs may fall; leave one out"
    return ""
