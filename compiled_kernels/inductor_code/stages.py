"""Show the compilation stages of the backend inductor for a case, and the kernels in the module that Inductor wrote.
They are taken from the compilation of the code that runs."""

from __future__ import annotations

import ast
from typing import Any

from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.cases import Case, Suite
from compiled_kernels.inductor_code.fusion import fusion, fusion_text
from compiled_kernels.inductor_code.watch import code_digest, trace_compilation
from compiled_kernels.stage import CompilerStage, CompilerStages

LANGUAGES = {"cpp_pybinding": "cpp", "cpp": "cpp", "triton": "triton"}  # methods of async_compile
ORDER = ("graph", "decomposed", "post_grad", "ir", "fused_ir", "fusion", "cpp", "triton", "python")
COMMENT = {"cpp": "//", "triton": "#"}


def kernels(code: str) -> dict[str, dict[str, str]]:
    """Return {"cpp" or "triton": {kernel's name: its source}}; other languages are left out."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(code)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        method, target = node.value.func, node.targets[0]
        if not (isinstance(method, ast.Attribute) and isinstance(target, ast.Name) and method.attr in LANGUAGES):
            continue
        texts = [each.value for each in node.value.args if isinstance(each, ast.Constant)]
        text = max((each for each in texts if isinstance(each, str)), key=len, default="")
        found.setdefault(LANGUAGES[method.attr], {})[target.id] = text
    return found


def stages(suite: Suite, case: Case) -> CompilerStages:
    """Return the compiler's stages in order: graph (traced), decomposed, post_grad (after the graph's passes), ir (the
    scheduler's nodes), fused_ir, fusion (see fusion.py), cpp or triton (kernels), python (the module that calls them).

    Raises BackendError with the compiler's message if the case does not compile to one graph.
    """

    def call(*inputs: Any) -> Any:
        return suite.call(*inputs, backend=Backend.INDUCTOR)

    try:
        seen = trace_compilation(call, suite.make_inputs(case))
    except Exception as error:  # Inductor raises exceptions of many kinds
        words = " ".join(str(error).split())[:200]
        raise BackendError(f"{suite.operator}: {case.name} does not compile to one graph: {words}") from error
    found = {name: CompilerStage(text) for name, text in seen.texts.items()}
    if seen.groups:
        data = fusion(seen)
        found["fusion"] = CompilerStage(fusion_text(data), data)
    for language, sources in kernels(seen.code).items():
        text = "\n".join(f"{COMMENT[language]} {name}\n{source}" for name, source in sources.items())
        found[language] = CompilerStage(text, sources)
    if seen.code:
        found["python"] = CompilerStage(seen.code)
    ordered = {name: found[name] for name in ORDER if name in found}
    return CompilerStages(code_digest(seen.code), "the generated module, which then ran on this case", ordered)
