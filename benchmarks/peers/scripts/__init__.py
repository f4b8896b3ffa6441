"""Scripts that run in other tools' Python interpreters; none except `run_workbench` imports workbench."""
