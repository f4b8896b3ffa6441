"""Show the compiler stages of the backend inductor. Importing this package does not import the compiler."""

from compiled_kernels.inductor_code.stages import stages
from compiled_kernels.inductor_code.watch import code_digest, loaded_code

__all__ = ["code_digest", "loaded_code", "stages"]
