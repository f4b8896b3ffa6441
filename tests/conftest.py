"""Settings for every test: examples have no deadline (machines are shared), and torch stays on one thread."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("workbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("workbench")
torch.set_num_threads(1)  # tiny tensors: a second thread only waits
