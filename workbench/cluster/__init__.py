"""Several engines behind one front, each in a process of its own: replicas, and pools of prefill and of decode."""
