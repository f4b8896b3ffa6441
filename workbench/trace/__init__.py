"""Events of a run, their recorder, and traces for Perfetto. It may not import torch or any room of the workbench."""
