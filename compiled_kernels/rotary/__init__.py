from compiled_kernels.rotary.api import rotary

__all__ = ["rotary"]
