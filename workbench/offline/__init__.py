"""Offline batches: files of requests in OpenAI's shape, run to files of responses. It may not import sweeps, reports or
widgets."""
