"""Rate and spending limits of callers: arithmetic, storage, reservations, headers and meters."""
