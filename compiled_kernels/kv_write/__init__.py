from compiled_kernels.kv_write.api import kv_write

__all__ = ["kv_write"]
