"""Manage the KV cache: pages, their manager, prefixes, formats, stores and offloading. This package may not import
models, schedulers or executors; the files that track page ownership import no torch.
"""
