"""Peak rates of hardware from data sheets. Rates are dense: figures with sparsity are halved."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from workbench.errors import WorkbenchError, nearest

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Hardware(BaseModel):
    """One accelerator. Rates are per second and one way; `source` names the origin of the figures."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "given"
    flops: Rate  # of bfloat16 products
    bandwidth: Rate  # bytes of its memory
    memory: Rate  # bytes
    link: Rate = 450e9  # bytes to its neighbours in one machine
    network: Rate = 50e9  # bytes to another machine
    host: Rate = 64e9  # bytes to the host's memory
    source: str = "given by the user"


def _sheet(name: str, source: str, **figures: float) -> Hardware:
    return Hardware(name=name, source=source, **figures)


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _sheet(
            "h100", "NVIDIA H100 Tensor Core GPU data sheet, SXM; DGX H100: one 400 Gb/s adapter a GPU",
            flops=989.5e12, bandwidth=3.35e12, memory=80e9, link=450e9, network=50e9, host=64e9,
        ),
        _sheet(
            "h200", "NVIDIA H200 Tensor Core GPU data sheet, SXM; DGX H200: one 400 Gb/s adapter a GPU",
            flops=989.5e12, bandwidth=4.8e12, memory=141e9, link=450e9, network=50e9, host=64e9,
        ),
        _sheet(
            "a100", "NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM; DGX A100: one 200 Gb/s adapter a GPU",
            flops=312e12, bandwidth=2.039e12, memory=80e9, link=300e9, network=25e9, host=32e9,
        ),
        _sheet(
            "b200", "NVIDIA HGX B200 data sheet: 4.5 PFLOP/s of bfloat16 with sparsity; one 400 Gb/s adapter a GPU",
            flops=2.25e15, bandwidth=7.7e12, memory=180e9, link=900e9, network=50e9, host=64e9,
        ),
        _sheet(
            "rtx-4090", "NVIDIA Ada GPU architecture whitepaper: products of 16 bits summed in 32; no NVLink, PCIe 4.0",
            flops=165.2e12, bandwidth=1.008e12, memory=24e9, link=32e9, network=3.1e9, host=32e9,
        ),
        _sheet(
            "m2-ultra", "Apple, M2 Ultra with 76 GPU cores: 27.2 TFLOP/s in float32, 192 GB shared with the processor",
            flops=27.2e12, bandwidth=800e9, memory=192e9, link=10e9, network=1.25e9, host=800e9,
        ),
    )
}  # fmt: skip


def named_hardware(name: str) -> Hardware:
    """Return the hardware of this name. Raises WorkbenchError for a name that is not in `HARDWARE`."""
    if name not in HARDWARE:
        raise WorkbenchError(f"no hardware {name!r}{nearest(name.lower(), HARDWARE)}; known: {', '.join(HARDWARE)}")
    return HARDWARE[name]
