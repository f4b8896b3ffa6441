from compiled_kernels.quantized_attention.api import quantized_attention
from compiled_kernels.quantized_attention.hadamard import rotate
from compiled_kernels.quantized_attention.packed import Kind, Packed, bits_per_number, dequantize, per_word, storage
from compiled_kernels.quantized_attention.quantize import quantize
from compiled_kernels.quantized_attention.rule import Settling
from compiled_kernels.quantized_attention.settle import Groups, PageFormat, settle

__all__ = [
    "Groups",
    "Kind",
    "Packed",
    "PageFormat",
    "Settling",
    "bits_per_number",
    "dequantize",
    "per_word",
    "quantize",
    "quantized_attention",
    "rotate",
    "settle",
    "storage",
]
