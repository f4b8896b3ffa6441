"""Run offline batches: files of requests in OpenAI's format become files of responses, by the server's own dialects.
Does not import sweeps, reports or widgets, nor packages that only a server needs.
"""
