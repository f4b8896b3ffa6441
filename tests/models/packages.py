"""Tiny packages that carry a model, and package clients that bring them, or fail."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

from workbench.models.known import KNOWN, KnownModel, PackagedFile


def carried(*contents: bytes, name: str = "smollm2") -> KnownModel:
    """Return a known model whose file is these pieces, each in a package of its own: carrier0, carrier1, ..."""
    whole = b"".join(contents)
    pieces = (PackagedFile(f"carrier{n}", "1.0", f"carrier{n}/model.bin") for n in range(len(contents)))
    return replace(KNOWN[name], bytes=len(whole), sha256=hashlib.sha256(whole).hexdigest(), pieces=tuple(pieces))


def write_wheel(folder: Path, content: bytes, package: str = "carrier0", version: str = "1.0") -> Path:
    """Write a wheel with one file, `model.bin`, into the folder."""
    place, about = folder / f"{package}-{version}-py3-none-any.whl", f"{package}-{version}.dist-info"
    files = {
        f"{package}/model.bin": content,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {**files, f"{about}/RECORD": "".join(f"{each},,\n" for each in files)}.items():
            archive.writestr(name, text)
    return place
