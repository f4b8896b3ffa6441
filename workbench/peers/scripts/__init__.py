"""What runs inside another tool's interpreter: plain scripts that never import workbench (`run_workbench` apart)."""
