"""IREE's runtime on torch's memory: nothing is copied on the way in or out."""

# The stubs of these optional packages, where installed, do not list what they export.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from iree import runtime
from iree.runtime import HalElementType
from torch import Tensor

runtime._binding.disable_leak_checker()  # it prints a page at exit about objects that end with the process

ELEMENTS = {
    torch.float32: HalElementType.FLOAT_32,
    torch.float64: HalElementType.FLOAT_64,
    torch.float16: HalElementType.FLOAT_16,
    torch.bfloat16: HalElementType.BFLOAT_16,
    torch.int8: HalElementType.SINT_8,
    torch.uint8: HalElementType.UINT_8,
    torch.int32: HalElementType.SINT_32,
    torch.int64: HalElementType.SINT_64,
    torch.bool: HalElementType.BOOL_8,
}
MEMORY = int(runtime.MemoryType.HOST_LOCAL | runtime.MemoryType.DEVICE_VISIBLE)
USAGE = int(runtime.BufferUsage.DEFAULT | runtime.BufferUsage.MAPPING)


class Program:
    """One module of a vmfb file with its parameters, on this CPU; `threads` of 1 runs in the caller's own."""

    def __init__(self, path: Path, parameters: Mapping[str, Tensor], scope: str, threads: int):
        self.device = _device(threads)
        self.arrays = {name: _array(each) for name, each in parameters.items()}  # kept alive: IREE reads them here
        index: Any = runtime.ParameterIndex()
        for name, array in self.arrays.items():
            index.add_buffer(name, memoryview(array.reshape(-1)).cast("B"))
        instance = _instance()
        modules: list[Any] = [
            runtime.create_io_parameters_module(instance, index.create_provider(scope)),
            runtime.create_hal_module(instance, self.device),
            runtime.VmModule.mmap(instance, str(path)),
        ]
        context: Any = runtime.VmContext  # its stub takes no arguments
        self.context = context(instance, modules)
        self.function = modules[-1].lookup_function("main")

    def view(self, tensor: Tensor) -> Any:
        """Return the tensor's own memory as IREE sees it, kept alive by the view."""
        buffer = self.device.allocator.import_host_allocation(_array(tensor), MEMORY, USAGE)
        return runtime.HalBufferView(buffer, list(tensor.shape), ELEMENTS[tensor.dtype])

    def __call__(self, views: Sequence[Any], results: int) -> list[Tensor]:
        arguments, outputs = runtime.VmVariantList(len(views)), runtime.VmVariantList(results)
        for view in views:
            arguments.push_ref(view)
        self.context.invoke(self.function, arguments, outputs)
        made = (outputs.get_as_ref(place).deref(runtime.HalBufferView) for place in range(results))
        return [torch.from_dlpack(self.device.create_dlpack_capsule(view, 1, 0)) for view in made]


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@cache
def _instance() -> Any:
    return runtime.VmInstance()


@cache
def _device(threads: int) -> Any:
    if threads == 1:
        return runtime.get_driver("local-sync").create_default_device()
    runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
    return runtime.get_driver("local-task").create_default_device()
