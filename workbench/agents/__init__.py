"""Run agents: tools that a model may call, and rounds of calls until an answer."""
