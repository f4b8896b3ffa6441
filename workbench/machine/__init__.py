"""This machine: its processor, environment and measured ceilings, and the check `workbench doctor`. It may not import
runs, measurements or reports."""
