"""Serve requests with several engines, each in its own process: replicas, and prefill and decode pools."""
