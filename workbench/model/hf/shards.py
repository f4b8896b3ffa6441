"""Write tensors as the safetensors files of a folder: a single file, or shards with their index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from workbench.files import write_atomically
from workbench.model.formats.safetensors_files import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 5_000_000_000


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write tensors as they arrive; a new file begins when the next tensor would exceed `shard_bytes`. Return the
    files.

    After the last tensor the files get their final names, and the files of an earlier model are removed.

    Raises:
        OSError, SafetensorError: if a file cannot be written.
    """
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    used = total = 0

    def write() -> None:
        part = folder / f".part-{len(parts) + 1}.safetensors"
        parts.append((part, list(held)))
        write_atomically(part, lambda file: save_file(held, file.name, metadata={"format": "pt"}))
        held.clear()

    try:
        for name, tensor in tensors:
            own = tensor.detach().to("cpu", copy=True).contiguous()  # parts of one parameter share memory
            if held and used + own.nbytes > shard_bytes:
                write()
                used = 0
            held[name] = own
            used, total = used + own.nbytes, total + own.nbytes
        write()
        names = [SINGLE_FILE]
        if len(parts) > 1:
            names = [f"model-{index + 1:05}-of-{len(parts):05}.safetensors" for index in range(len(parts))]
        files = [folder / name for name in names]
        for (part, _), file in zip(parts, files, strict=True):
            part.replace(file)
    except BaseException:
        for part, _ in parts:
            part.unlink(missing_ok=True)
        raise
    stale = {*folder.glob("model-*-of-*.safetensors"), *folder.glob(SINGLE_FILE), *folder.glob(INDEX_FILE)}
    if len(parts) > 1:
        places = {each: name for name, (_, own) in zip(names, parts, strict=True) for each in own}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
        stale.discard(folder / INDEX_FILE)
    for file in stale.difference(files):
        file.unlink()
    return files


def write_json(file: Path, value: object) -> None:
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(file, lambda out: out.write(text.encode()))
