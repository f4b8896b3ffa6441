"""Show the compiler stages between an operator's specification and the code that runs, on any backend."""

from __future__ import annotations

import hashlib
import importlib
import inspect

from compiled_kernels import attention
from compiled_kernels.backends import Backend, BackendError, backend_problems
from compiled_kernels.cases import Case, Suite, case_of
from compiled_kernels.stage import CompilerStage, CompilerStages


def stages_of(suite: Suite, case: Case | None, backend: Backend) -> CompilerStages:
    """Return the compilation stages of one case (the first timed one unless given) on one backend, in order.

    The backend triton is compiled ahead of time for its own examples, not for cases. Raises BackendError if a case is
    given there, if the backend does not have this operator, or if it does not work here.
    """
    if backend is Backend.TRITON:
        if case is not None:
            raise BackendError(f"{suite.operator}: backend triton shows all of its examples; remove the case")
        return _triton(suite)
    case = case or case_of(suite, None)
    if problem := backend_problems()[backend]:
        raise BackendError(f"backend {backend} does not work here: {problem}")
    if backend is Backend.EAGER:
        return _eager(suite)
    if backend is Backend.INDUCTOR:
        from compiled_kernels import inductor_code

        return inductor_code.stages(suite, case)
    return _mlir(suite, case)


def _eager(suite: Suite) -> CompilerStages:
    package = inspect.getmodule(suite.input_maker)
    name = package.__name__.rpartition(".")[0] if package else ""
    try:
        api = importlib.import_module(f"{name}.api")
        specification = inspect.getsource(getattr(api, f"{suite.operator}_reference", attention))
        called = inspect.getsource(api)
    except (ImportError, OSError) as error:
        raise BackendError(f"{suite.operator}: its source cannot be read: {error}") from None
    note = "the specification, and what is called: it runs as written, or as torch's own operation where `api` says so"
    stages = {"source": CompilerStage(specification), "api": CompilerStage(called)}
    return CompilerStages(digest(specification + called), note, stages)


def _triton(suite: Suite) -> CompilerStages:
    try:
        from compiled_kernels.triton_code import artifacts, stages
    except ImportError as error:
        raise BackendError(f"backend triton: its code cannot be imported: {error}") from None
    made = artifacts(suite.operator)
    data = [
        {
            "kernel": each.name,
            "sm": each.sm,
            "constants": {name: str(value) for name, value in each.constexprs.items()},
            "warps": each.num_warps,
            "registers": each.registers,
            "shared_bytes": each.shared_bytes,
            "spill_bytes": each.spill_bytes,
            "cubin": digest(each.cubin),
        }
        for each in made
    ]
    texts = {name: CompilerStage(text, data) for name, text in stages(suite.operator).items()}
    whole = digest(b"".join(each.cubin for each in made))
    note = f"its cubins for sm_{made[0].sm}, compiled ahead of time as Triton would on a GPU"
    return CompilerStages(whole, note, texts)


def _mlir(suite: Suite, case: Case) -> CompilerStages:
    try:
        from compiled_kernels.mlir import stages
    except ImportError as error:
        raise BackendError(f"backend mlir: its stages cannot be imported: {error}") from None
    made = stages(suite.operator, case)
    texts = {name: CompilerStage(text) for name, text in made.stages.items()}
    return CompilerStages(made.digest, "the entry in the cache of artifacts that runs", texts)


def digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
