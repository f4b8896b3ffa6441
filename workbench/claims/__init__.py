"""Judge claims: evidence, stored records, verdicts and ledger. This package may not import widgets, the lab or the
command line."""
