"""Describe this machine: processor, environment, measured ceilings, and the check `workbench doctor`. It may not import
runs, measurements or reports."""
