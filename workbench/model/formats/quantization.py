"""Choose the format of a quantized folder by `quant_method`, and give its quantized matrices their dense names."""

from __future__ import annotations

from collections.abc import Callable

from workbench.errors import WorkbenchError, nearest
from workbench.model.formats.awq import awq_tensors
from workbench.model.formats.bitsandbytes import bitsandbytes_tensors
from workbench.model.formats.checkpoint import StoredTensor
from workbench.model.formats.compressed_tensors import ACTIVATION_PARTS, compressed_tensors
from workbench.model.formats.fp8 import fp8_tensors
from workbench.model.formats.gptq import gptq_tensors
from workbench.model.formats.mxfp4 import mxfp4_tensors
from workbench.model.formats.packed import Stored
from workbench.model.hf.fields import ConfigFields

# Each maps the config's section and the stored tensors to the packed tensors and a description of the format.
METHODS: dict[str, Callable[[ConfigFields, Stored], tuple[dict[str, StoredTensor], str]]] = {
    "gptq": gptq_tensors,
    "awq": awq_tensors,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes_tensors,
    "fp8": fp8_tensors,
    "mxfp4": mxfp4_tensors,
}
# Name endings of the parts of packed tensors, which are only read as parts.
PACKED_ENDS = (
    ".qweight", ".qzeros", ".scales", ".g_idx",
    ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx",
    ".weight_scale_inv", ".activation_scale", ".SCB", ".weight_format",
    ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", "_blocks", "_scales",
    *(f".{part}" for part in ACTIVATION_PARTS),
)  # fmt: skip


def unpacked(config: ConfigFields, stored: Stored) -> tuple[dict[str, StoredTensor], str]:
    """Return every tensor of a folder with this `quantization_config` under its dense name, and a description of the
    format. Raises WorkbenchError for an unsupported method, and if tensors disagree with the config.
    """
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # older files leave it out
    if not isinstance(method, str) or method not in METHODS:
        given = "is missing" if method is None else f"{method!r} is not supported"
        hint = nearest(method, METHODS) if isinstance(method, str) else ""
        raise WorkbenchError(f"{config.source}: quant_method {given}; supported: {', '.join(METHODS)}{hint}")
    found, words = METHODS[method](config, stored)
    if not found:
        raise WorkbenchError(f"{config.source}: says {method}, and no tensor has this format; remove the key")
    modules = {name.removesuffix(".weight") for name in found}
    return found | {
        name: tensor for name, tensor in stored.items() if name not in found and not _is_part(name, modules)
    }, words


def _is_part(name: str, modules: set[str]) -> bool:
    """Return whether a stored tensor is a part of one of the packed `modules`."""
    if ".weight.quant_state." in name:
        return name.partition(".weight.quant_state.")[0] in modules
    return any(name.endswith(end) and name.removesuffix(end) in modules for end in PACKED_ENDS)
