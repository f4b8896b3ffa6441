"""Open a model's files; the format is chosen by the files in the folder."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import Checkpoint
from workbench.model.formats.gguf.checkpoint import gguf_config, open_parts, read_gguf
from workbench.model.formats.gguf.file import GGUFFile
from workbench.model.formats.quantization import unpacked
from workbench.model.formats.safetensors_files import INDEX_FILE, SINGLE_FILE, stored_tensors
from workbench.model.formats.torch_files import SINGLE_TORCH_FILE, TORCH_INDEX_FILE, torch_tensors
from workbench.model.hf.fields import ConfigFields, read_object


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the model at `path` (a folder or GGUF file); only headers are read and checked.

    Raises WorkbenchError for missing, pickled, corrupt or truncated weights, and for unsupported formats.
    """
    path = Path(path)
    if (file := gguf_file(path)) is not None:
        return read_gguf(file)
    config = read_config(path)
    quantization = _quantization(path, config)
    torch_files = any((path / name).exists() for name in (SINGLE_TORCH_FILE, TORCH_INDEX_FILE))
    if torch_files and not _has_safetensors(path):
        stored, format = torch_tensors(path), "PyTorch"
    else:
        stored, format = stored_tensors(path), "safetensors"
    if quantization is None:
        return Checkpoint(path, config, stored, format)
    return Checkpoint(path, config, *unpacked(quantization, stored))


def open_gguf_files(path: str | Path) -> list[GGUFFile]:
    """Open the GGUF files of the model at `path`, if there are any. As long as they are open, their headers are read
    only once.
    """
    file = gguf_file(Path(path))
    return [] if file is None else open_parts(file)


def is_quantized(path: str | Path) -> bool:
    """Return whether the model at `path` may have quantized weights: its config says so, or it is a GGUF file."""
    path = Path(path)
    return gguf_file(path) is not None or _quantization(path, read_config(path)) is not None


def _quantization(path: Path, config: ConfigFields) -> ConfigFields | None:
    """Return the quantization section of the config, or the separate file that older packers wrote."""
    for key in ("quantization_config", "compression_config"):
        if (section := config.nested(key)) is not None:
            return section
    file = path / "quantize_config.json"
    return ConfigFields({"quant_method": "gptq", **read_object(file)}, str(file)) if file.is_file() else None


def _has_safetensors(path: Path) -> bool:
    return (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists()


def read_config(path: str | Path) -> ConfigFields:
    """Return the config.json of the model in the folder `path`, or its equivalent from a GGUF file's metadata. Raises
    WorkbenchError if there is none.
    """
    path = Path(path)
    if (found := gguf_file(path)) is not None:
        return gguf_config(found)
    file = path / "config.json"
    if not file.is_file():
        fault = "no config.json in it" if path.is_dir() else "no such folder"
        raise WorkbenchError(f"{path}: {fault}; a model is a folder with config.json and *.safetensors")
    return ConfigFields(read_object(file), str(file))


def gguf_file(path: Path) -> Path | None:
    """Return `path` if it is a GGUF file, or the GGUF file in a folder without safetensors; None if there is none.
    Raises WorkbenchError for a folder with several GGUF files that are not parts of one model.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or _has_safetensors(path):
        return None
    found = sorted(path.glob("*.gguf"))
    first = [file for file in found if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(first) > 1:
        names = ", ".join(file.name for file in first)
        raise WorkbenchError(f"{path}: holds several GGUF files ({names}); name the file to load")
    return first[0] if first else None
