"""One prompt and seed played under two settings: the first token that differs, times, a history, an experiment."""
