"""Pack codes of few bits into words of 32 bits, and unpack them.

A code is a sum of planes; the first plane has its lowest bits. A word of a plane of b bits holds 32 / b columns: column
4 r + o is at bits b r + 8 i, with i = (0, 2, 1, 3)[o]. Shifted by b r and masked, the bytes of a word are four columns
in the order 0, 2, 1, 3: the two even bytes are adjacent columns, and so are the two odd bytes.

    4 bits, columns by byte:   byte 0: 0 4    byte 1: 2 6    byte 2: 1 5    byte 3: 3 7
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Int32, UInt8
from torch import Tensor

from compiled_kernels.blocked.layout import BYTE_OF_COLUMN
from compiled_kernels.linear.matrix_format import WORD_BITS, SubScales


def pack_planes(codes: Tensor, planes: tuple[int, ...]) -> Int32[Tensor, "... word"]:
    """Pack codes [..., column], integers below 2**sum(planes), into words: first the words of the first plane, then
    those of the next.
    """
    words, done = [], 0
    for bits in planes:
        plane = (codes >> done).to(torch.uint8) & (1 << bits) - 1
        rows = rearrange(plane, "... (word row column) -> ... word row column", row=8 // bits, column=4)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        octets = (rows << shifts[:, None]).sum(-2, dtype=torch.uint8)
        words.append(octets[..., BYTE_OF_COLUMN].view(torch.int32)[..., 0])
        done += bits
    return torch.cat(words, -1)


def unpack_planes(words: Int32[Tensor, "... word"], planes: tuple[int, ...]) -> UInt8[Tensor, "... column"]:
    """Return the codes that `pack_planes` packed into `words`."""
    columns, done, codes = words.shape[-1] * WORD_BITS // sum(planes), 0, None
    for bits, plane in zip(planes, words.split([bits * columns // WORD_BITS for bits in planes], -1), strict=True):
        moved = (plane ^ plane >> 8) & 0xFF00  # bytes 1 and 2 change places, and are in the order of columns
        plane, mask = plane ^ moved ^ moved << 8, ((1 << bits) - 1) * 0x01010101
        rows = [plane] if bits == 8 else [plane >> first & mask for first in range(0, 8, bits)]
        part = torch.stack(rows, -1).view(torch.uint8).flatten(-2)
        codes = part if codes is None else codes | part << done
        done += bits
    assert codes is not None
    return codes


def pack_sub_scales(scales: Tensor, minima: Tensor | None, layout: SubScales) -> Int32[Tensor, "... word"]:
    """Pack the sub-scales of a block's groups [..., group], and those of its minima, into words as they are stored."""
    words = torch.zeros(*scales.shape[:-1], layout.words, dtype=torch.int64, device=scales.device)
    for numbers, fields in ((scales, layout.scale), (minima, layout.minimum)):
        done = 0
        for bits, first in fields:
            assert numbers is not None
            bit = first + bits * torch.arange(numbers.shape[-1], device=scales.device)
            field = (numbers.to(torch.int64) >> done & (1 << bits) - 1) << bit % WORD_BITS
            words.index_add_(-1, bit // WORD_BITS, field)
            done += bits
    return words.to(torch.int32)


def unpack_sub_scales(words: Int32[Tensor, "... word"], fields: tuple[tuple[int, int], ...], groups: int) -> Tensor:
    """Return the sub-scales of `groups` groups, assembled from the bits of the words that `fields` lists."""
    integers, done = torch.zeros((), dtype=torch.int32, device=words.device), 0
    for bits, first in fields:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
        every = (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
        integers, done = integers | every[..., first // bits : first // bits + groups] << done, done + bits
    return integers
