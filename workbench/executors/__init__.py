"""Select backends, and compute the plan of a step by programs on them: the executors. This package may not import
speculation, the engine or experiments.
"""
