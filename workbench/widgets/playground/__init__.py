"""A prompt played under any experiment's settings."""
