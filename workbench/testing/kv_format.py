"""Check a cache format against its laws: the stored codes, and equal results for all ways to chunk, batch, page and
share texts.

Models compute in float64, so that only a broken law makes a difference.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from compiled_kernels import Backend, BackendError, backend_problems
from compiled_kernels.agreement import disagreement
from compiled_kernels.cases import Case, CaseCost, suite_of
from compiled_kernels.check import device_of, to_device
from compiled_kernels.quantized_attention import dequantize, quantize
from workbench.executors.capabilities import unsupported
from workbench.executors.requirements import Requirements
from workbench.kv_cache.codec import SIDES, stored_layout
from workbench.kv_cache.format import CacheFormat, KVCacheSpec, build_cache_specs, parse_cache_format
from workbench.kv_cache.pages import build_cache_groups
from workbench.kv_cache.store import KVStore
from workbench.testing.attention_scenarios import require_equal_logits
from workbench.testing.kv_scenarios import (
    HEAD_DIM,
    KVScenario,
    kv_scenarios,
    num_test_layers,
    quant_group_tokens,
    sampled_kv_logits,
    shrink_to_test_layers,
)
from workbench.testing.law import ConformityReport, Law, LawBroken, check_law


def _row_by_row(format: CacheFormat, scenario: KVScenario) -> None:
    """Check each codec on random rows or blocks: a row has the same code alone and in a batch, and all codes have one
    layout.
    """
    generator = torch.Generator().manual_seed(scenario.seed)
    for spec in _test_specs(format):
        if spec.codec is None:
            continue
        heads, codec = (spec.num_kv_heads, HEAD_DIM), spec.codec.ready(spec.num_kv_heads, HEAD_DIM)
        shape, one = (5, *codec.block_shape, *heads), "row" if codec.group is None else "block"
        for side, layout in zip(SIDES, stored_layout(codec, *heads, torch.float64), strict=True):
            rows = torch.randn(shape, generator=generator).double()
            rows = rows * 10.0 ** torch.arange(-2, 3).double().view(-1, *[1] * (len(shape) - 1))
            together = codec.encode(rows, side)
            if tuple((tuple(each.shape[1:]), each.dtype) for each in together) != layout:
                raise LawBroken(f"{spec.format}: shapes or types of {side} differ from those of zeros, on {scenario}")
            for row in range(len(rows)):
                alone = codec.encode(rows[row : row + 1], side)
                if not all(torch.equal(each[0], many[row]) for each, many in zip(alone, together, strict=True)):
                    message = f"a {one} of {side} has another code in a batch than alone"
                    raise LawBroken(f"{spec.format}: {message}, on {scenario}")
            if not bool(codec.decode(together, *heads, side).isfinite().all()):
                raise LawBroken(f"{spec.format}: finite numbers are decoded to others, on {scenario}")


def _calibrated(format: CacheFormat, scenario: KVScenario) -> None:
    """Check each codec with calibration: the same sample gives the same codes twice, and all samples give one layout.
    """
    for layer, spec in enumerate(_test_specs(format)):
        if spec.codec is None or not spec.codec.needs_calibration:
            continue
        heads, generator = (spec.num_kv_heads, HEAD_DIM), torch.Generator().manual_seed(scenario.seed)
        rows = torch.randn(5, *spec.codec.block_shape, *heads, generator=generator).double()
        layout = stored_layout(spec.codec, *heads, torch.float64)
        for tokens, scale in ((64, 1.0), (300, 30.0)):
            sample = scale * torch.randn(2, tokens, *heads, generator=generator)
            first, again = (spec.codec.calibrate(layer, *sample.clone()) for _ in range(2))
            for side in SIDES:
                codes = zip(first.encode(rows, side), again.encode(rows, side), strict=True)
                if not all(torch.equal(*pair) for pair in codes):
                    raise LawBroken(f"{spec.format}: calibrated twice it has other codes for {side}, on {scenario}")
            if stored_layout(first, *heads, torch.float64) != layout:
                raise LawBroken(f"{spec.format}: the sizes of its tensors depend on the sample, on {scenario}")


def _half_a_step(format: CacheFormat, scenario: KVScenario) -> None:
    generator = torch.Generator().manual_seed(scenario.seed)
    for layer in range(scenario.layers):
        for kind in format.for_layer(layer).key_value_formats:
            numbers = torch.randn(HEAD_DIM, format.for_layer(layer).quant_group, generator=generator) * 10.0 ** (
                scenario.seed % 7 - 4
            )
            quantized = quantize(numbers, kind, numbers.shape[1])
            away = (dequantize(quantized, torch.float64) - numbers.double()).abs()
            if quantized.scales is None:
                allowed = torch.zeros(HEAD_DIM, 1)
            elif quantized.minima is None:  # e4m3: three mantissa bits
                allowed = torch.maximum(numbers.abs() / 16, quantized.scales.float().T * 2**-10)
            else:
                allowed = quantized.scales.float().T / 2
            if not bool((away <= allowed.double() * (1 + 1e-4)).all()):
                far = f"{float(away.max()):.3g}"
                raise LawBroken(f"layer {layer}: a number is {far} away from its {kind} code, on {scenario}")


def _counted(format: CacheFormat, scenario: KVScenario) -> None:
    store = _store(format, scenario)
    if store.bytes != store.expected_bytes:
        raise LawBroken(f"its tensors hold {store.bytes} bytes, the formula says {store.expected_bytes}, on {scenario}")


def _scrubbed(format: CacheFormat, scenario: KVScenario) -> None:
    store = _store(format, scenario)
    for table in range(len(store.groups)):
        for tensor in store.page_tensors(table):
            tensor.view(torch.uint8).fill_(255)
        store.zero_pages(table, [1])
        if any(tensor[1].view(torch.uint8).any() for tensor in store.page_tensors(table)):
            raise LawBroken(f"table {table}: something is left in a scrubbed page, on {scenario}")


def _batched(format: CacheFormat, scenario: KVScenario) -> None:
    together = sampled_kv_logits(scenario, format)
    for name, ids in scenario.texts().items():
        alone = sampled_kv_logits(scenario, format, {name: ids})
        require_equal_logits(alone, together, "in a batch with other texts it gives other rows than alone", scenario)


def _chunked(format: CacheFormat, scenario: KVScenario) -> None:
    whole = sampled_kv_logits(scenario, format)
    for budget in (scenario.max_num_batched_tokens, 1):
        chunked = sampled_kv_logits(scenario, format, max_num_batched_tokens=budget, max_num_seqs=1)
        require_equal_logits(chunked, whole, f"in steps of {budget} tokens it gives other rows than at once", scenario)


def _paged(format: CacheFormat, scenario: KVScenario) -> None:
    shuffle, pages = random.Random(scenario.seed), 40
    tables = len(build_cache_groups(shape.cache_groups for shape in scenario.model().cache_shapes(format)))
    orders = tuple(shuffle.sample(range(1, pages + 1), pages) for _ in range(tables))
    size = quant_group_tokens(format)
    scattered = sampled_kv_logits(scenario, format, page_size=size, pages=pages, page_orders=orders)
    wide = sampled_kv_logits(scenario, format, page_size=4 * size)
    message = f"in pages of {size} tokens in random order it gives other rows than in wide ones"
    require_equal_logits(scattered, wide, message, scenario)


def _warm(format: CacheFormat, scenario: KVScenario) -> None:
    """Check texts with a common prefix, one after another: later texts reuse pages of the first."""
    longest = max(scenario.texts().values(), key=len)
    texts = {f"{i}": longest[: len(longest) - i] for i in range(3) if len(longest) - i > 1}
    size = quant_group_tokens(format)
    warm = sampled_kv_logits(scenario, format, texts, prefix="radix", max_num_seqs=1, page_size=size)
    cold = sampled_kv_logits(scenario, format, texts, max_num_seqs=1, page_size=size)
    require_equal_logits(
        warm, cold, "on a prefix found in the cache it gives other rows than on one computed", scenario
    )


CODEC_LAW = "a row or block is encoded by itself, to finite numbers"
CALIBRATED_LAW = "calibrated twice it is the same codec, of one layout for every sample"
QUANTIZED_LAW = "every number within half a step of its code"
KV_LAWS: dict[str, Callable[[CacheFormat, KVScenario], None]] = {
    CODEC_LAW: _row_by_row,
    CALIBRATED_LAW: _calibrated,
    QUANTIZED_LAW: _half_a_step,
    "bytes counted from the tensors = the formula": _counted,
    "a scrubbed page holds nothing": _scrubbed,
    "batched = alone": _batched,
    "chunked = whole = decoded one by one": _chunked,
    "pages of any size in any order = wide pages": _paged,
    "a warm prefix = a cold one": _warm,
}


def backend_law(backend: Backend, format: CacheFormat, examples: int) -> Law:
    """Check that `backend` agrees with the reference, and return the result; a backend that does not support the format
    is not tried.
    """
    name = f"backend {backend}: agrees with the einops reference in float64"
    if problem := backend_problems()[backend]:
        return Law(name, True, f"not tried: {problem}", tried=False)
    shapes = _test_specs(format)
    quantized = tuple({shape.format: shape for shape in shapes if shape.format.quantized}.values())
    if not quantized:
        return Law(
            name, True, "not tried: dense and decoded pages are paged_attention's, which has cases of its own",
            tried=False,
        )  # fmt: skip
    if refusal := unsupported(backend, Requirements(cache=shapes, device=device_of(backend)), "attention"):
        return Law(name, True, f"not claimed: {refusal.reason}", tried=False)
    return check_law(name, functools.partial(_agree, backend, quantized), examples, kv_scenarios(format))


def _test_specs(format: CacheFormat) -> tuple[KVCacheSpec, ...]:
    return build_cache_specs([(2, HEAD_DIM, None, 0, None)] * num_test_layers(format), format)


def _agree(backend: Backend, shapes: tuple[KVCacheSpec, ...], scenario: KVScenario) -> None:
    for shape in shapes:
        _agrees(backend, shape, scenario)


def _agrees(backend: Backend, shape: KVCacheSpec, scenario: KVScenario) -> None:
    suite, format, rule = suite_of("quantized_attention"), shape.format, shape.quantization_rule
    # A kernel compiled for decode does not depend on span lengths, and compilation is slow.
    spans = [
        1 if backend is Backend.INDUCTOR else 1 + (scenario.seed + i) % length
        for i, length in enumerate(scenario.lengths)
    ]
    arguments = {
        "contexts": scenario.lengths, "spans": sorted(spans), "num_kv_heads": scenario.num_kv_heads,
        "queries_per_kv": 2, "dim": HEAD_DIM, "size": scenario.quant_groups_per_page * format.quant_group,
        "dtype": torch.float32, "formats": format.key_value_formats, "run": format.quant_group,
        "columns": format.columns, "lag": rule.residual_length, "first": rule.num_sink_tokens,
    }  # fmt: skip
    arguments["contexts"] = tuple(max(pair) for pair in zip(scenario.lengths, arguments["spans"], strict=True))
    inputs = to_device(suite.input_maker(torch.Generator().manual_seed(scenario.seed), **arguments), device_of(backend))
    try:
        wrong = disagreement(suite, Case("drawn", arguments, CaseCost(0, 0)), inputs, backend)
    except BackendError as error:
        wrong = f"raised {error}"
    if wrong:
        raise LawBroken(f"{wrong}, on {scenario}, queries of {', '.join(map(str, arguments['spans']))} tokens")


def _store(format: CacheFormat, scenario: KVScenario) -> KVStore:
    shapes = scenario.model().cache_shapes(format)
    tables = len(build_cache_groups(shape.cache_groups for shape in shapes))
    return KVStore(shapes, tuple(range(1, tables + 1)), scenario.page_size(format), torch.float32)


def check_kv_format(
    format: str | Mapping[str, Any] | CacheFormat, examples: int = 6, backends: Iterable[str] = tuple(Backend)
) -> ConformityReport:
    """Try `format` in small models, and report for each law whether it holds.

    Args:
        format: as for `load(cache=...)`: a name (`int4`) or settings (`{"format": "int4", "rotate": True}`,
            `{"codec": {"path": "mine.py:Codec"}}`), or only the path of a codec (`mine.py:Codec`). The model has layers
            of every kind that the format defines.
        examples: number of sets of texts tried for each law, the same in every call, long enough to quantize tokens.
        backends: backends to compare with the einops reference, if they support the format.

    Raises:
        WorkbenchError: if the format is invalid, or its codec is not a codec.
    """
    given = parse_cache_format(format)
    tried = shrink_to_test_layers(given)
    for spec in _test_specs(tried):
        assert spec.bytes_per_token(torch.float32)  # calls the codec
    drawn = kv_scenarios(tried)
    codecs = [spec.codec for spec in _test_specs(tried)]
    calibrated = any(codec is not None and codec.needs_calibration for codec in codecs)
    idle = {
        *([] if any(codecs) else [CODEC_LAW]),
        *([] if calibrated else [CALIBRATED_LAW]),
        *([QUANTIZED_LAW] if all(codecs) else []),
    }
    names = [name for name in KV_LAWS if name not in idle]
    laws = [check_law(name, functools.partial(KV_LAWS[name], tried), examples, drawn) for name in names]
    laws += [backend_law(Backend(backend), tried, examples) for backend in backends]
    return ConformityReport(f"cache format {given.model_dump(exclude_defaults=True)}", tuple(laws))
