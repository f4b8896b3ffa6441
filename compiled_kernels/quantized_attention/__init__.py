from compiled_kernels.quantized_attention.api import quantized_attention
from compiled_kernels.quantized_attention.hadamard import hadamard_rotate
from compiled_kernels.quantized_attention.packed import QuantFormat, QuantizedTensor, bits_per_number, dequantize, codes_per_word, storage_shapes
from compiled_kernels.quantized_attention.quantize import quantize
from compiled_kernels.quantized_attention.rule import QuantizationRule
from compiled_kernels.quantized_attention.settle import TokenGroups, PageFormat, quantize_pages

__all__ = [
    "Groups",
    "Kind",
    "Packed",
    "PageFormat",
    "Settling",
    "bits_per_number",
    "dequantize",
    "codes_per_word",
    "quantize",
    "quantized_attention",
    "rotate",
    "settle",
    "storage",
]
