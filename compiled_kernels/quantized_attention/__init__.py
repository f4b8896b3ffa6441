from compiled_kernels.quantized_attention.api import QuantizedKV, quantized_attention
from compiled_kernels.quantized_attention.pages import PageFormat, QuantizationRule, TokenGroups, quantize_pages
from compiled_kernels.quantized_attention.quantize import (
    QUANTIZED_NAMES,
    SCALED_FORMATS,
    QuantFormat,
    QuantizedTensor,
    bits_per_number,
    codes_per_word,
    dequantize,
    hadamard_rotate,
    quantize,
    storage_shapes,
)

__all__ = [
    "QUANTIZED_NAMES",
    "SCALED_FORMATS",
    "PageFormat",
    "QuantFormat",
    "QuantizationRule",
    "QuantizedKV",
    "QuantizedTensor",
    "TokenGroups",
    "bits_per_number",
    "codes_per_word",
    "codes_per_word",
    "dequantize",
    "hadamard_rotate",
    "quantize",
    "quantize_pages",
    "quantized_attention",
    "storage_shapes",
]
