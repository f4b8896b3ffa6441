from compiled_kernels.rms_norm.api import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
