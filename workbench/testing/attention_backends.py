"""Compare the backends that support an attention variant with the einops reference in float64."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_kernels import Backend, BackendError, backend_problems
from compiled_kernels.agreement import on_nan_memory, output_disagreement
from compiled_kernels.cases import Case, CaseCost, suite_of
from compiled_kernels.check import device_of, to_device
from compiled_kernels.masks import AndMask, seen_by_head
from compiled_kernels.paged_attention import unsupported_reason
from workbench.executors.select import Backends
from workbench.model.attention_spec import AttentionSpec, MLASpec
from workbench.model.custom import build_mask, build_score
from workbench.model.hf.weights import random_weights
from workbench.model.transformer import Transformer
from workbench.testing.attention_laws import require_oracle_logits
from workbench.testing.attention_scenarios import CLASSES, AttentionScenario, attention_scenarios, sampled_logits
from workbench.testing.law import Law, LawBroken, check_law

Change = Mapping[str, Any]
LONGEST = 90  # maximum tokens of a context
CLASSES_OF = {Backend.INDUCTOR: 1, Backend.MLIR: 3}  # number of shapes tried on backends with slow compilation
FLOAT32_ROUNDING = 1e-4  # rounding error of two small layers


def backend_law(backend: Backend, change: Change, examples: int, page_size: int | None = None) -> Law:
    """Check that `backend` agrees with the reference, and return the result; a backend that does not support the
    variant is not tried. A selection among pages of `page_size` tokens is checked in a model, because the backend's
    step selects the pages.
    """
    name = f"backend {backend}: agrees with the einops reference, and blind queries give zeros"
    if problem := backend_problems()[backend]:
        return Law(name, True, f"not tried: {problem}", tried=False)
    if change.get("module") is not None:
        message = "not tried: a module is no operator; its model is held to the oracle above"
        return Law(name, True, message, tried=False)
    if page_size is not None:
        scenarios = attention_scenarios(page_size=page_size, classes=1)
        if backend is Backend.TRITON:
            return Law(name, True, "not tried: its whole model is not run in an interpreter", tried=False)
        return check_law(name, functools.partial(_chooses_alike, backend, change), examples, scenarios)
    attention = AttentionScenario(0, 1, 2, 4, (2,), 1, 1).spec(change).layers[0].attention
    if problem := unsupported_reason(backend, build_mask(attention), build_score(attention)):
        return Law(name, True, f"not claimed: {problem}", tried=False)
    if backend is Backend.INDUCTOR:
        # Compile different sizes first: the compiler would specialize on sizes that happen to be equal.
        with suppress(Exception):  # the law finds the error again, with a minimal example
            heads, share, dim, page = CLASSES[0]
            _agrees(backend, change, AttentionScenario(1, heads, share, dim, (LONGEST, 75, 61), 1, page))
    scenarios = attention_scenarios(LONGEST, classes=CLASSES_OF.get(backend))
    return check_law(name, functools.partial(_agrees, backend, change), examples, scenarios)


@dataclass(frozen=True)
class _EveryOther:
    """A mask with which odd queries see no key."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (query % 2 == 0) & (key >= 0)


def _chooses_alike(backend: Backend, change: Change, scenario: AttentionScenario) -> None:
    """Check that a model in float32 on `backend` gives the oracle's logits."""
    spec = scenario.spec(change)
    model = Transformer.from_state(spec, random_weights(spec, torch.float32, scenario.seed), backend)
    texts = {f"{i}": text for i, text in enumerate(scenario.texts())}
    sampled = sampled_logits(model, texts, backends=Backends(backend, backend, backend, "asked for"))
    require_oracle_logits(model, sampled, FLOAT32_ROUNDING, scenario)


def _agrees(backend: Backend, change: Change, scenario: AttentionScenario) -> None:
    attention = scenario.spec(change).layers[0].attention
    assert isinstance(attention, AttentionSpec | MLASpec)  # scenarios have attention layers
    suite = suite_of("paged_attention")
    decodes = len(scenario.lengths) - 1
    spans = [1 if i < decodes else 1 + (scenario.seed + i) % length for i, length in enumerate(scenario.lengths)]
    arguments = {
        "contexts": scenario.lengths, "spans": spans,
        "num_kv_heads": attention.num_kv_heads, "queries_per_kv": attention.queries_per_kv,
        "dim": attention.head_dim, "size": scenario.page_size, "dtype": torch.float32,
        "softcap": attention.softcap, "sinks": attention.sink_logits,
    }  # fmt: skip
    score = build_score(attention)
    for mask in (build_mask(attention), AndMask(build_mask(attention), _EveryOther())):
        if unsupported_reason(backend, mask, score):
            continue
        generator = torch.Generator().manual_seed(scenario.seed)
        *inputs, parameters = suite.input_maker(generator, **arguments, mask=mask)
        inputs = to_device((*inputs, parameters._replace(score=score)), device_of(backend))
        try:
            # One run for both laws: torch compiles again for memory that is not filled with NaN.
            out = on_nan_memory(suite, inputs, backend)
            wrong = output_disagreement(suite, Case("drawn", arguments, CaseCost(0, 0)), inputs, out)
        except BackendError as error:
            raise LawBroken(f"raised {error}, on {scenario}") from error
        if wrong:
            raise LawBroken(f"{wrong}, on {scenario}, queries of {', '.join(map(str, spans))} tokens")
        _blind_rows_are_zero(out, inputs, scenario)


def _blind_rows_are_zero(out: Tensor, inputs: tuple, scenario: AttentionScenario) -> None:
    _, _, spans, parameters = inputs
    for _, place, context in spans.listed():
        rows = out[place].transpose(0, 1)  # [head, token, dim]
        head, key = (torch.arange(count, device=out.device) for count in (len(rows), context))
        query = key[context - rows.shape[1] :]
        blind = ~seen_by_head(parameters.mask, query[:, None], key, head[:, None, None]).any(-1)
        if bool(rows.isnan().any()) or bool(rows[blind.expand(rows.shape[:2])].any()):
            raise LawBroken(f"a query that sees nothing gives no zeros, on {scenario}")
