"""The experts that a run used."""
