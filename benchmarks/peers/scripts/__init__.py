"""Scripts that run in other tools' interpreters and never import workbench (`run_workbench` apart)."""
