"""AArch64 code run on an x86-64 machine: linked with a main of the tests' own, run by qemu-user, on two threads."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compiled_kernels.mlir.ahead import compile_ahead
from compiled_kernels.mlir.pipeline import PACKED_PREFIX
from tests.patience import limit

LINKER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
# Reads every file named in its arguments, calls the kernel on all threads, writes every file.
MAIN = """
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
extern void ENTRY(void **);
int main(int count, char **names) {
  void *values[64], *pointers[64]; long sizes[64]; int threads = atoi(names[1]);
  for (int i = 2; i < count; i++) {
    FILE *file = fopen(names[i], "rb");
    fseek(file, 0, SEEK_END); sizes[i] = ftell(file); rewind(file);
    values[i] = aligned_alloc(64, (sizes[i] / 64 + 1) * 64); pointers[i] = &values[i];
    if (fread(values[i], 1, sizes[i], file) != (size_t)sizes[i]) return 3;
    fclose(file);
  }
  #pragma omp parallel num_threads(threads)
  ENTRY(pointers + 2);
  for (int i = 2; i < count; i++) {
    FILE *file = fopen(names[i], "wb");
    if (fwrite(values[i], 1, sizes[i], file) != (size_t)sizes[i]) return 4;
    fclose(file);
  }
  return 0;
}
"""


def missing() -> str | None:
    """Return the name of the missing tool; None where AArch64 code can run."""
    for tool, package in ((LINKER, "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"), (EMULATOR, "qemu-user")):
        if shutil.which(tool) is None:
            return f"{tool} is missing: apt install {package}"
    return None


class Emulated:
    """One function of a module, compiled for AArch64; its `address` is what `call` below takes for one."""

    def __init__(self, folder: Path, text: str, entry: str, lowered_from: str = "vector"):
        name = hashlib.sha256(f"{entry}{lowered_from}{text}".encode()).hexdigest()[:12]
        self.folder, self.program = folder, folder / name
        main, code = folder / f"{name}.c", folder / f"{name}.o"
        main.write_text(MAIN.replace("ENTRY", PACKED_PREFIX + entry))
        code.write_bytes(compile_ahead(text, lowered_from).code)
        command = [LINKER, "-static", "-fopenmp", str(main), str(code), "-o", str(self.program), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)

    @property
    def address(self) -> Emulated:
        return self

    def run(self, tensors: Sequence[Tensor], threads: int = 2) -> None:
        """Run it on the tensors' own numbers, in place."""
        stored = [_stored(each) for each in tensors]
        files = [self.folder / f"argument{i}" for i in range(len(tensors))]
        for file, numbers in zip(files, stored, strict=True):
            file.write_bytes(numbers.view(torch.uint8).numpy().tobytes())
        subprocess.run([EMULATOR, str(self.program), str(threads), *map(str, files)], check=True, timeout=limit(300))
        for file, numbers in zip(files, stored, strict=True):
            if numbers.numel():
                numbers.copy_(torch.frombuffer(bytearray(file.read_bytes()), dtype=numbers.dtype))


def call(emulated: Emulated, tensors: Sequence[Tensor]) -> Callable[..., None]:
    """Run a kernel in the emulator, in place of `openmp.Call`."""
    return lambda threads=None: emulated.run(tensors, threads or 2)


def _stored(tensor: Tensor) -> Tensor:
    """Return the memory from a tensor's first number to its last."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((n - 1) * stride for n, stride in extents) if tensor.numel() else 0,), (1,))
