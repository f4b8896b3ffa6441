"""Train the demo models that ship with the package, judge them and write their cards."""
