"""The engine: load a model, run requests step by step, and deliver their outputs. It may not import experiments,
measurements, runs or widgets."""
