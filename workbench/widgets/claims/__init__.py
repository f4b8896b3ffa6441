"""Show the ledger of claims, with a button that measures a claim."""
