"""The ledger of claims, with a button that measures."""
