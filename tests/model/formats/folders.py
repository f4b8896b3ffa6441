"""Folders of tiny quantized models, each beside the dense model that it stands for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import random_weights
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.testing.packers import Packer, pack_folder

TINY = named_shape("tiny")


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
