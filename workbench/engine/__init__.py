"""Load a model, run requests step by step, and deliver their outputs: the engine. It may not import experiments,
measurements, runs or widgets."""
