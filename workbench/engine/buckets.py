"""Round the rows of decode steps up to a few sizes, so that what is compiled for one serves many."""

from __future__ import annotations

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def bucket_for(rows: int) -> int:
    """Return the smallest bucket that holds `rows`; beyond the last, multiples of it."""
    last = DECODE_BUCKETS[-1]
    return next((size for size in DECODE_BUCKETS if size >= rows), -(-rows // last) * last)


def verify_bucket_for(rows: int) -> int:
    """Return the bucket of a verification step, where one more row is felt: exact up to 8, then multiples of 16."""
    return rows if rows <= 8 else -(-rows // 16) * 16 if rows <= DECODE_BUCKETS[-1] else bucket_for(rows)
