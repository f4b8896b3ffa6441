"""Record one compilation by torch.compile while it runs. All use of torch's private names is in this file.

Inductor's debug folder has the graphs, the scheduler's nodes and the code; its log of fusions has the reasons; the
backends' `define_kernel` gives the nodes of a kernel. If this version of torch lacks one of them, that part is empty.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

FILES = {
    "decomposed": "fx_graph_readable.py",
    "post_grad": "fx_graph_transformed.py",
    "ir": "ir_pre_fusion.txt",
    "fused_ir": "ir_post_fusion.txt",
}
CODE = "output_code.py"
GRAPH_COUNTER = re.compile(r"^# AOT ID: .*$", re.MULTILINE)
FUSION_REFUSED = re.compile(r"cannot fuse (\S+) with (\S+): (.*)", re.DOTALL)
BACKENDS = (
    ("torch._inductor.codegen.cpp", "CppScheduling"),
    ("torch._inductor.codegen.triton", "TritonScheduling"),
)


@dataclass
class CompilationTrace:
    """The record of one compilation: `texts` by stage; `nodes` before fusion and the `groups` they became; `reasons`
    why pairs were not fused; the nodes of each kernel; the generated `code`."""

    texts: dict[str, str] = field(default_factory=dict)
    nodes: list[dict] = field(default_factory=list)
    groups: list[dict] = field(default_factory=list)
    reasons: list[tuple[str, str, str]] = field(default_factory=list)
    nodes_of_kernel: dict[str, list[str]] = field(default_factory=dict)
    code: str = ""


def trace_compilation(call: Callable[..., Any], inputs: tuple) -> CompilationTrace:
    """Compile `call` for these inputs, run it, and return the record of the compilation."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    seen = CompilationTrace()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for part in (_kernels(seen), _reasons(seen), _silent(), warnings.catch_warnings(), torch.inference_mode()):
            stack.enter_context(part)
        warnings.simplefilter("ignore")
        # Do not take whole graphs from the cache, so that they are recorded; the generated code is the same.
        stack.enter_context(autograd.patch(enable_autograd_cache=False))
        debug = {"trace.enabled": True, "trace.debug_dir": folder, "fx_graph_cache": False}
        hooks = {"_pre_fusion_custom_pass": _noting(seen.nodes), "_post_fusion_custom_pass": _noting(seen.groups)}
        stack.enter_context(inductor.patch({**debug, **hooks}))
        torch.compile(call, fullgraph=True, dynamic=False, backend=_backend(seen))(*inputs)
        for file in sorted(Path(folder).rglob("*")):
            for stage in (stage for stage, name in FILES.items() if name == file.name):
                seen.texts[stage] = file.read_text()
            if file.name == CODE:
                seen.code = file.read_text()
    return seen


def loaded_code() -> dict[str, str]:
    """Return the source of each generated module that this process runs, by its digest."""
    from torch._inductor.codecache import PyCodeCache

    files = [Path(module.__file__) for module in PyCodeCache.modules if module.__file__]
    sources = [file.read_text() for file in files if file.is_file()]
    return {code_digest(source): source for source in sources}


def code_digest(code: str) -> str:
    """Return the SHA-256 of generated code, without the line that counts the process's graphs."""
    return hashlib.sha256(GRAPH_COUNTER.sub("", code).strip().encode()).hexdigest()


def _backend(seen: CompilationTrace) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        from torch._inductor.compile_fx import compile_fx

        seen.texts["graph"] = graph.print_readable(print_output=False)
        return compile_fx(graph, inputs)

    return backend


def _noting(found: list[dict]) -> Callable[[list], list]:
    """Return a pass over the scheduler's nodes that changes nothing."""

    def note(nodes: list) -> list:
        found.extend(_node(node) for node in nodes)
        return nodes

    return note


def _node(node: Any) -> dict:
    parts = list(node.get_nodes())
    return {
        "name": node.get_name(),
        "kind": type(node).__name__,
        "parts": [part.get_name() for part in parts],
        "origins": sorted({origin.name for part in parts for origin in _origins(part)}),
        "iteration": [_iteration(part) for part in parts],
        "reads": sorted(dep.name for dep in node.read_writes.reads),
        "writes": sorted(dep.name for dep in node.read_writes.writes),
        "bytes": _bytes(node),
        "library": next((_library(part) for part in parts if _library(part)), ""),
    }


def _origins(part: Any) -> list:
    return list(part.node.get_origins()) if getattr(part, "node", None) is not None else []


def _iteration(part: Any) -> str:
    """Return the loop lengths of a node, `512 x 64`; reduction loops follow a bar, `512 | 64`."""
    group = getattr(part, "group", None)
    sizes = group[1] if group and isinstance(group[1], tuple) else ()
    return " | ".join(" x ".join(map(str, each)) for each in sizes if each) or "no loops of its own"


def _bytes(node: Any) -> int | None:
    """Return the bytes that a node reads and writes in memory, as the scheduler estimates them."""
    try:
        return int(node.get_read_write_buffers_sizes())
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return None


def _library(part: Any) -> str:
    """Return the library function that a node calls, if it is not a loop of Inductor."""
    node = getattr(part, "node", None)
    name = getattr(node, "python_kernel_name", None) or getattr(node, "op_overload", None)
    return str(name) if name else ""


@contextmanager
def _kernels(seen: CompilationTrace) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in BACKENDS:
            backend = getattr(__import__(module, fromlist=[name]), name, None)
            original = getattr(backend, "define_kernel", None)
            if original is not None:
                stack.enter_context(mock.patch.object(backend, "define_kernel", _telling(seen, original)))
        yield


def _telling(seen: CompilationTrace, original: Callable) -> Callable:
    def define_kernel(self: Any, code: Any, nodes: Any, *rest: Any, **named: Any) -> Any:
        kernel = original(self, code, nodes, *rest, **named)
        names = [part.get_name() for node in nodes if hasattr(node, "get_nodes") for part in node.get_nodes()]
        seen.nodes_of_kernel.setdefault(str(kernel), []).extend(names)
        return kernel

    return define_kernel


class FusionLogHandler(logging.Handler):
    def __init__(self, seen: CompilationTrace):
        super().__init__(logging.DEBUG)
        self.seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        found = FUSION_REFUSED.match(record.getMessage())
        if found:
            first, second, reason = found.groups()
            self.seen.reasons.append((first, second, " ".join(reason.split())))


@contextmanager
def _reasons(seen: CompilationTrace) -> Iterator[None]:
    from torch._inductor import scheduler

    log = getattr(scheduler, "fusion_log", None)
    if log is None:
        yield
        return
    listener, level, upwards = FusionLogHandler(seen), log.level, log.propagate
    log.addHandler(listener)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
        log.propagate = upwards


@contextmanager
def _silent() -> Iterator[None]:
    """Silence Inductor, which announces its debug folder as a warning."""
    log = logging.getLogger("torch._inductor.debug")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
