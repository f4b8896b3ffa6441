"""Folders of tiny quantized models, each beside the dense model that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workbench.model.formats.checkpoint import StoredTensor
from workbench.model.formats.quantization import unpacked
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import random_weights
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.testing import packers
from workbench.testing.packers import Packer, pack_folder

TINY = named_shape("tiny")
PACKERS: dict[str, Packer] = {
    **{f"gptq {bits} bits": partial(packers.gptq, bits=bits) for bits in (2, 3, 4, 8)},
    "gptq v2": partial(packers.gptq, version=2, zero=True),
    "gptq with zeros": partial(packers.gptq, zero=True),
    "gptq, one group": partial(packers.gptq, group=-1),
    "gptq without g_idx": partial(packers.gptq, index=False),
    "gptq in the order of activations": partial(packers.gptq, order=torch.Generator().manual_seed(1), zero=True),
    "awq": packers.awq,
    "awq, symmetric": partial(packers.awq, zero=False),
    "int4": packers.pack_quantized,
    "int4 with zeros": partial(packers.pack_quantized, zero=True),
    "int4 by row": partial(packers.pack_quantized, group=None),
    "int3": partial(packers.pack_quantized, bits=3),
    "int8 packed": partial(packers.pack_quantized, bits=8, zero=True),
    "int8": packers.int_quantized,
    "fp8 by row": packers.float_quantized,
    "fp8, one scale": partial(packers.float_quantized, tensor=True),
    "fp8 by block": partial(packers.float_quantized, block=(48, 40)),
    "fp8, DeepSeek's": partial(packers.fp8, block=(48, 40)),
    "mxfp4, packed": packers.mxfp4_pack,
    "nf4": packers.nf4,
    "nf4, nested": partial(packers.nf4, nested=True, block=16),
    "fp4": partial(packers.nf4, kind="fp4"),
    "bitsandbytes int8": packers.bnb_int8,
}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def write_quantized(
    folder: Path, pack: Packer, spec: ModelSpec = TINY, skip: tuple[str, ...] = (), dtype: torch.dtype = torch.float32
) -> Path:
    """Write a model of `spec` with the matrices of its blocks packed into `folder`, and beside it one of the dense
    matrices that they stand for, whose path is returned. Modules with a part of `skip` in their names stay dense."""
    dense = folder.with_name(folder.name + "-dense")
    save_folder(dense, spec, random_weights(spec, dtype, seed=3), dtype)
    matrices = pack_folder(dense, folder, pack, skip)
    save_file(load_file(dense / "model.safetensors") | matrices, dense / "model.safetensors")
    return dense


class InMemory(StoredTensor):
    """A stored tensor that is a tensor."""

    NAMES = {torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.int8: "I8",
             torch.uint8: "U8", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}  # fmt: skip

    def __init__(self, tensor: Tensor):
        super().__init__(Path("file"), self.NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        object.__setattr__(self, "tensor", tensor)

    def read(self) -> Tensor:
        return vars(self)["tensor"]


def read_packed(packed: packers.Packed) -> StoredTensor:
    """Read a packed matrix as ours."""
    stored = {f"x.q_proj.{end}": InMemory(tensor) for end, tensor in packed.tensors.items()}
    found, _ = unpacked(ConfigFields(packed.config, "config"), stored)
    assert list(found) == ["x.q_proj.weight"]
    return found["x.q_proj.weight"]


def write_gpt_oss(folder: Path, widen: Callable[[Tensor, Tensor], Tensor]) -> Path:
    """Write gpt-oss with experts of MXFP4 into `folder`, and beside it the dense model, whose path is returned.

    `widen` makes a dense stack of packed codes and exponents.
    """
    import transformers

    dense = folder.with_name("dense")
    config = transformers.GptOssConfig(
        vocab_size=266, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=5, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(dense)
    folder.mkdir()
    fields = json.loads((dense / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(fields))
    plain = load_file(dense / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = packed.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts, out, width // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = widen(blocks.flatten(2), scales)
    save_file(packed, folder / "model.safetensors")
    save_file(plain, dense / "model.safetensors")
    return dense
