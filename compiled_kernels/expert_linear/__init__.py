from compiled_kernels.expert_linear.api import expert_linear

__all__ = ["expert_linear"]
