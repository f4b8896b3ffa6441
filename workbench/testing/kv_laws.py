"""Laws of a cache format: stored codes, and equal results however texts are chunked, batched, paged and shared.

Models compute in float64, so that only a broken law makes a difference.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import torch

from compiled_kernels import Lane, LaneError, lane_problems
from compiled_kernels.cases import Case, Work, disagreement, suite_of
from compiled_kernels.check import device_of, moved
from compiled_kernels.quantized_attention import dequantize, quantize
from workbench.cache.format import CacheFormat
from workbench.cache.shapes import CacheShape, shapes_of
from workbench.cache.store import KVStore
from workbench.cache.tables import tables_of
from workbench.engine.packed_lanes import problem_of
from workbench.testing.attention_scenes import must_agree
from workbench.testing.holding import held
from workbench.testing.kv_scenes import DIM, KVScene, group_of, layers_of, rows_of, scenes
from workbench.testing.report import Broken, Law


def _half_a_step(format: CacheFormat, scene: KVScene) -> None:
    generator = torch.Generator().manual_seed(scene.seed)
    for layer in range(scene.layers):
        for kind in format.of(layer).kinds:
            numbers = torch.randn(DIM, format.of(layer).group, generator=generator) * 10.0 ** (scene.seed % 7 - 4)
            packed = quantize(numbers, kind, numbers.shape[1])
            away = (dequantize(packed, torch.float64) - numbers.double()).abs()
            if packed.scales is None:
                allowed = torch.zeros(DIM, 1)
            elif packed.minima is None:  # e4m3: three bits after the leading one
                allowed = torch.maximum(numbers.abs() / 16, packed.scales.float().T * 2**-10)
            else:
                allowed = packed.scales.float().T / 2
            if not bool((away <= allowed.double() * (1 + 1e-4)).all()):
                far = f"{float(away.max()):.3g}"
                raise Broken(f"layer {layer}: a number is {far} away from its {kind} code, on {scene}")


def _counted(format: CacheFormat, scene: KVScene) -> None:
    store = _store(format, scene)
    if store.bytes != store.formula_bytes:
        raise Broken(f"its tensors hold {store.bytes} bytes, the formula says {store.formula_bytes}, on {scene}")


def _scrubbed(format: CacheFormat, scene: KVScene) -> None:
    store = _store(format, scene)
    for table in range(len(store.tables)):
        for tensor in store.paged(table):
            tensor.view(torch.uint8).fill_(255)
        store.scrub(table, [1])
        if any(tensor[1].view(torch.uint8).any() for tensor in store.paged(table)):
            raise Broken(f"table {table}: something is left in a scrubbed page, on {scene}")


def _batched(format: CacheFormat, scene: KVScene) -> None:
    together = rows_of(scene, format)
    for name, ids in scene.texts().items():
        alone = rows_of(scene, format, {name: ids})
        must_agree(alone, together, "beside other texts it gives other rows than alone", scene)


def _chunked(format: CacheFormat, scene: KVScene) -> None:
    whole = rows_of(scene, format)
    for budget in (scene.budget, 1):
        chunked = rows_of(scene, format, max_num_batched_tokens=budget, max_num_seqs=1)
        must_agree(chunked, whole, f"in steps of {budget} tokens it gives other rows than at once", scene)


def _paged(format: CacheFormat, scene: KVScene) -> None:
    shuffle, pages = random.Random(scene.seed), 40
    tables = len(tables_of(shape.tables for shape in scene.model().cache_shapes(format)))
    orders = tuple(shuffle.sample(range(1, pages + 1), pages) for _ in range(tables))
    size = group_of(format)
    scattered = rows_of(scene, format, page_size=size, pages=pages, page_orders=orders)
    wide = rows_of(scene, format, page_size=4 * size)
    told = f"in pages of {size} tokens in random order it gives other rows than in wide ones"
    must_agree(scattered, wide, told, scene)


def _warm(format: CacheFormat, scene: KVScene) -> None:
    """Check texts with a common beginning, one after another: later ones reuse pages of the first."""
    longest = max(scene.texts().values(), key=len)
    texts = {f"{i}": longest[: len(longest) - i] for i in range(3) if len(longest) - i > 1}
    size = group_of(format)
    warm = rows_of(scene, format, texts, prefix="radix", max_num_seqs=1, page_size=size)
    cold = rows_of(scene, format, texts, max_num_seqs=1, page_size=size)
    must_agree(warm, cold, "on a prefix found in the cache it gives other rows than on one computed", scene)


LAWS: dict[str, Callable[[CacheFormat, KVScene], None]] = {
    "every number within half a step of its code": _half_a_step,
    "bytes counted from the tensors = the formula": _counted,
    "a scrubbed page holds nothing": _scrubbed,
    "batched = alone": _batched,
    "chunked = whole = decoded one by one": _chunked,
    "pages of any size in any order = wide pages": _paged,
    "a warm prefix = a cold one": _warm,
}


def lane_law(lane: Lane, format: CacheFormat, examples: int) -> Law:
    """Check `backend` against the reference. A backend that refuses with a reason is not tried."""
    name = f"lane {lane}: agrees with the einops reference in float64"
    if problem := lane_problems()[lane]:
        return Law(name, True, f"not tried: {problem}", tried=False)
    shapes = shapes_of([(2, DIM, None, 0, None)] * layers_of(format), format)
    packed = tuple({shape.format: shape for shape in shapes if shape.format.packed}.values())
    if not packed:
        told = "not tried: a dense layer is paged_attention's, which has cases of its own"
        return Law(name, True, told, tried=False)
    if problem := problem_of(lane, shapes, torch.float32, torch.float32):
        return Law(name, True, f"not claimed: {problem}", tried=False)
    return held(name, functools.partial(_agree, lane, packed), examples, scenes(format))


def _agree(lane: Lane, shapes: tuple[CacheShape, ...], scene: KVScene) -> None:
    for shape in shapes:
        _agrees(lane, shape, scene)


def _agrees(lane: Lane, shape: CacheShape, scene: KVScene) -> None:
    suite, format, rule = suite_of("quantized_attention"), shape.format, shape.rule
    # A kernel compiled for decodes does not depend on span lengths, and compiling takes long.
    spans = [1 if lane is Lane.INDUCTOR else 1 + (scene.seed + i) % length for i, length in enumerate(scene.lengths)]
    arguments = {
        "contexts": scene.lengths, "spans": sorted(spans), "groups": scene.groups, "share": 2, "dim": DIM,
        "size": scene.parts * format.group, "dtype": torch.float32, "formats": format.kinds, "run": format.group,
        "columns": format.columns, "lag": rule.lag, "first": rule.first,
    }  # fmt: skip
    arguments["contexts"] = tuple(max(pair) for pair in zip(scene.lengths, arguments["spans"], strict=True))
    inputs = moved(suite.inputs(torch.Generator().manual_seed(scene.seed), **arguments), device_of(lane))
    try:
        wrong = disagreement(suite, Case("drawn", arguments, Work(0, 0)), inputs, lane)
    except LaneError as error:
        wrong = f"raised {error}"
    if wrong:
        raise Broken(f"{wrong}, on {scene}, queries of {', '.join(map(str, arguments['spans']))} tokens")


def _store(format: CacheFormat, scene: KVScene) -> KVStore:
    shapes = scene.model().cache_shapes(format)
    tables = len(tables_of(shape.tables for shape in shapes))
    return KVStore(shapes, tuple(range(1, tables + 1)), scene.page_size(format), torch.float32)
