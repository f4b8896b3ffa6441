"""Claims: their evidence, stored records, verdicts and ledger. It may not import widgets, the lab or the command
line."""
