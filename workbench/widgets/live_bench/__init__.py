"""Load, mix, policy and chunk size changed while requests are served; all that happens over one axis of time."""
