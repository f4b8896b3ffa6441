"""Show claims and their verdicts, with a button that measures a claim."""
