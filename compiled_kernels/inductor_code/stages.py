"""The stages of the lane inductor, of the very compilation whose code then ran on the case."""

from __future__ import annotations

from typing import Any

from compiled_kernels.cases import Case, Suite
from compiled_kernels.inductor_code.fusion import fusion, text_of
from compiled_kernels.inductor_code.sources import kernels
from compiled_kernels.inductor_code.watch import code_digest, watched
from compiled_kernels.lanes import Lane, LaneError
from compiled_kernels.stages import Stage, Stages

ORDER = ("graph", "decomposed", "post_grad", "ir", "fused_ir", "fusion", "cpp", "triton", "python")
COMMENT = {"cpp": "//", "triton": "#"}


def stages(suite: Suite, case: Case) -> Stages:
    """Return the compiler's stages in order.

    They are graph (traced), decomposed, post_grad (the graph's passes done), ir (the scheduler's nodes), fused_ir,
    fusion (the operations of each kernel, and the reasons against others), cpp or triton (kernels), python (the module
    that calls them).

    Raises LaneError where the case does not compile to one graph, with the compiler's words.
    """

    def call(*inputs: Any) -> Any:
        return suite.call(*inputs, lane=Lane.INDUCTOR)

    try:
        seen = watched(call, suite.make(case))
    except Exception as error:  # the compiler's own, of which there are many kinds
        words = " ".join(str(error).split())[:200]
        raise LaneError(f"{suite.operator}: {case.name} does not compile to one graph: {words}") from error
    found = {name: Stage(text) for name, text in seen.texts.items()}
    if seen.groups:
        data = fusion(seen)
        found["fusion"] = Stage(text_of(data), data)
    for language, sources in kernels(seen.code).items():
        text = "\n".join(f"{COMMENT[language]} {name}\n{source}" for name, source in sources.items())
        found[language] = Stage(text, sources)
    if seen.code:
        found["python"] = Stage(seen.code)
    ordered = {name: found[name] for name in ORDER if name in found}
    return Stages(code_digest(seen.code), "the generated module, which then ran on this case", ordered)
