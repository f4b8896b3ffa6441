"""Published techniques, each a user part of at most 80 lines with a one-line setting, measured by `workbench zoo`."""
