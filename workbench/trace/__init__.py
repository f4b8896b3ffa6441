"""Events of a run, their recorder, and traces for Perfetto. Imports neither torch nor any other folder of the
workbench.
"""
