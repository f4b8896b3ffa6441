"""Run engines in several processes: replicas, and pools of prefill and of decode."""
