"""What a model, its weights, its cache or a backend cannot do is refused at once, in one line that says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from compiled_kernels import Backend
from tests.engine import eviction_policies
from tests.engine.eviction_policies import MergesLayers, Uneven
from tests.engine.kinds import LATENT, MIXTURE
from tests.engine.tiny import HERE, layer, model_of, runner_of, spec_of
from workbench.custom import register
from workbench.engine.load import load
from workbench.engine.uncached import disable_cache
from workbench.errors import WorkbenchError
from workbench.executors.select import Backends
from workbench.inspect.whole_text import TextAttention
from workbench.model.attention_config import AttentionConfig
from workbench.model.recurrent_spec import ShortConvSpec
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.variants import change_attention
from workbench.request import CustomPart

LAYERS = "workbench.model.layers:Attention"
POLICIES = eviction_policies.__name__ + ":"
BY_ALL = {"kind": "heavy_hitters", "budget": 12}
LOADED: list[tuple[str, dict[str, Any]]] = [
    ("no shape 'smolm2-135m'; did you mean 'smollm2-135m'", {"model": "shape:smolm2-135m"}),
    ("known: tiny, smollm2-135m", {"model": "shape:"}),
    ("no model 'demmo': .*; did you mean 'demo'", {"model": "demmo"}),
    ("did you mean 'demo-draft'", {"model": "demo-darft"}),
    ("not a folder here, nor one of demo, demo-draft, demo-chat, shape:NAME", {"model": "nowhere/at/all"}),
    ("model.dtype: Input should be 'auto', .* [(]given 'flaot32'[)]; did you mean 'float32'", {"dtype": "flaot32"}),
    ("model.dtype: Input should be 'auto', .* [(]given 'int8'[)]", {"dtype": torch.int8}),
    ("unknown backend 'egaer'; did you mean 'eager'[?]; known here: auto, eager, inductor, triton, mlir",
     {"backend": "egaer"}),
    ("device 'cdua' does not work here", {"device": "cdua"}),
    ("device 'cuda:77' does not work here .*; cpu always does", {"device": "cuda:77"}),
    ("schedule.overflow: Input should be 'refuse' or 'cut_oldest'", {"overflow": "wrap"}),
    ("model.activations: Input should be 'float' or 'int8'", {"weights": "int8", "activations": "int4"}),
    ("activations: int8 want weights in int8, not dense; set weights: int8 too", {"activations": "int8"}),
    ("activations: int8 want weights in int8, not int4", {"weights": "int4", "activations": "int8"}),
    ("max_num_seqs", {"max_num_seqs": 0}),
    ("max_num_batched_tokens", {"max_num_batched_tokens": -1}),
    ("cache.page_size: Input should be greater than or equal to 1 [(]given 0[)]", {"page_size": 0}),
    ("cache.page_size: Input should be greater", {"page_size": -64}),
    ("cache.pages: Input should be greater", {"pages": 0}),
    ("cache.pages: Input should be greater", {"pages": -3}),
    ("no setting 'page_sise'; did you mean 'page_size'", {"page_sise": 16}),
    ("page_size: given twice, by itself and within cache", {"page_size": 16, "cache": {"page_size": 16}}),
    ("cache: must be a group of settings", {"cache": 3}),
    ("cache.fromat: unknown key; did you mean 'format'", {"cache": {"fromat": "int8"}}),
    ("attention.sliding_windw: unknown key; did you mean 'sliding_window'", {"attention": {"sliding_windw": 4}}),
    ("'nothing at all': write package.module:Name or folder/file.py:Name", {"attention": {"mask": "nothing at all"}}),
    ("there is no file no/file.py", {"attention": {"mask": "no/file.py:mask"}}),
    (r"mask tests.engine.tiny:farther: takes .*, must take \(query, key\)", {"attention": {"mask": HERE + "farther"}}),
    (r"score tests.engine.tiny:even: takes .*, must take \(score, head, query, key\)",
     {"attention": {"score": HERE + "even"}}),
    (r"tiny:VOCAB: not callable; it needs __call__\(self, query, key\)", {"attention": {"mask": HERE + "VOCAB"}}),
    ("module tests.engine.tiny:even: is no module; extend workbench.model.layers",
     {"attention": {"module": HERE + "even"}}),
    ("module torch.nn:Linear: has no qkv_proj", {"attention": {"module": {"path": "torch.nn:Linear"}}}),
    ("module workbench.model.layers:Attention: could not be built with depth=2: TypeError",
     {"attention": {"module": {"path": LAYERS, "arguments": {"depth": 2}}}}),
    ("4 query heads cannot share 5 key/value heads evenly", {"attention": {"num_kv_heads": 5}}),
    ("backend 'mlir' cannot carry out this cache: layer 0 has dense keys, int4 values: keys and values are both",
     {"backend": "mlir", "cache": {"keys": "dense", "values": "int4"}}),
    ("bfloat16 weights and a float32 cache: it reads both in one type",
     {"backend": "mlir", "cache": {"format": "int8", "dtype": "float32"}}),
    ("groups of 64 tokens do not divide pages of 16", {"cache": "int4", "page_size": 16}),
    ("batch_invariant: backend 'eager' cannot keep it: linear: torch's matrix product chooses its kernel",
     {"batch_invariant": True}),
    ("batch_invariant: backend 'inductor' cannot keep it", {"batch_invariant": True, "backend": "inductor"}),
    ("batch_invariant: .*does not rotate heads",
     {"batch_invariant": True, "backend": "auto", "cache": {"format": "int8", "rotate": True}}),
    ("batch_invariant: .*bfloat16 weights and a float32 cache",
     {"batch_invariant": True, "backend": "auto", "cache": {"dtype": "float32"}}),
    ("batch_invariant: .*computed in float32 or bfloat16",
     {"batch_invariant": True, "backend": "auto", "dtype": "float16"}),
    ("batch_invariant: .*what stays of a prompt depends on its chunks",
     {"batch_invariant": True, "backend": "auto", "evict": BY_ALL}),
    ("batch_invariant: .*layer 1",
     {"batch_invariant": True, "backend": "auto", "attention": {"layers": {1: {"kv_shared_with": 0}}}}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "settings"), LOADED, ids=[words for words, _ in LOADED])
def test_what_cannot_be_loaded_is_refused(words: str, settings: dict[str, Any]) -> None:
    settings = {"backend": "eager", **settings}
    with pytest.raises(WorkbenchError) as refused:
        load(settings.pop("model", "shape:tiny"), **settings)
    assert re.search(words, str(refused.value)) and "\n" not in str(refused.value)


PAIR = spec_of(layer(4, 2, 6), layer(2, 2, 6, kv_shared_with=0))
SHORT_CONV = LayerSpec(attention=ShortConvSpec(channels=6), intermediate_size=12)
HYBRID = spec_of(SHORT_CONV, layer(), SHORT_CONV)
MLIR = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "decode")
BUILT: list[tuple[str, ModelSpec, dict[str, Any]]] = [
    ("layer 0 has experts", spec_of(MIXTURE), {"batch_invariant": True}),
    ("float64 weights: everything is computed in float32 or bfloat16", spec_of(),
     {"backends": MLIR, "dtype": torch.float64}),
    ("backend mlir: decodes no step of tiny: .*latent attention",
     spec_of(LayerSpec(attention=LATENT, intermediate_size=12)), {"backends": MLIR}),
    ("layer 1 reads the keys and values of layer 0; set that layer's format", PAIR,
     {"cache": {"layers": {1: {"format": "int8"}}}}),
    ("cache.evict: layer 0 keeps a state", HYBRID, {"evict": BY_ALL}),
    ("cache.layers: layer 0 keeps a state", HYBRID, {"cache": {"layers": {0: {"format": "int8"}}}}),
    ("INT8 is a format of keys|int8 is a format of keys", spec_of(SHORT_CONV), {"cache": "int8", "page_size": 64}),
    ("cache.prefix radix with cache.evict", spec_of(), {"evict": BY_ALL, "prefix": "radix"}),
    ("layer 0 is kept as int8", spec_of(),
     {"evict": BY_ALL, "cache": {"format": "int8", "quant_group": 8}, "page_size": 8}),
    ("layer 1 has a window of 5", spec_of(layer(), layer(sliding_window=5)), {"evict": BY_ALL}),
    ("layer 0 looks by distance", spec_of(layer(position="alibi")), {"evict": BY_ALL}),
    ("layer 0 looks by distance", spec_of(layer(mask=CustomPart(path=HERE + "even"))), {"evict": BY_ALL}),
    ("layer 0 has its values as columns of its keys",
     spec_of(LayerSpec(attention=LATENT, intermediate_size=12)), {"evict": MergesLayers(budget=12)}),
    ("cache.evict: backend 'mlir' cannot carry out this cache: its attention", spec_of(),
     {"evict": Uneven(budget=12), "backends": MLIR}),
    ("give exactly one of budget", spec_of(), {"evict": {"path": POLICIES + "Newest"}}),
    ("could not be built with budget=12, size=3", spec_of(),
     {"evict": {"path": POLICIES + "Newest", "arguments": {"budget": 12, "size": 3}}}),
    ("has no 'Nwest'; did you mean 'Newest'", spec_of(), {"evict": {"path": POLICIES + "Nwest"}}),
    ("is no eviction policy: it needs gives_up, observes, budget_for, and select or", spec_of(),
     {"evict": {"path": HERE + "Halved"}}),
    ("cache.evict.budget: unknown key; known: arguments, kind, path", spec_of(),
     {"evict": {"path": POLICIES + "Newest", "budget": 12}}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "spec", "settings"), BUILT, ids=[words for words, *_ in BUILT])
def test_what_no_runner_carries_out_is_refused(words: str, spec: ModelSpec, settings: dict[str, Any]) -> None:
    model = model_of(spec, dtype=settings.get("dtype", torch.float32))
    with pytest.raises(WorkbenchError, match=words):
        runner_of(model, **{name: value for name, value in settings.items() if name != "dtype"})


MADE: list[tuple[str, Callable[[], object]]] = [
    ("layer 0 reads the keys and values of layer 0, which is not before it", lambda: spec_of(layer(kv_shared_with=0))),
    ("layer 1 reads the keys and values of layer 2, which is not before it",
     lambda: spec_of(layer(), layer(kv_shared_with=2), layer())),
    ("layer 2 reads the keys and values of layer 1, which has none of its own",
     lambda: spec_of(layer(), layer(kv_shared_with=0), layer(kv_shared_with=1))),
    ("layer 1 reads the keys and values of layer 0, whose sliding_window is 3; its own is None",
     lambda: spec_of(layer(sliding_window=3), layer(kv_shared_with=0))),
    ("whose head_dim is 4; its own is 6", lambda: spec_of(layer(dim=4), layer(dim=6, kv_shared_with=0))),
    ("whose position is none; its own is rotary", lambda: spec_of(layer(position="none"), layer(kv_shared_with=0))),
    ("kv_shared_with beside output_gate", lambda: layer(kv_shared_with=0, output_gate=True)),
    ("layer 1 reads the keys and values of layer 0, whose num_kv_heads is 1",
     lambda: change_attention(spec_of(layer(4, 2), layer(4, 2)), {}, AttentionConfig.parse(
         {"layers": {0: {"num_kv_heads": 1}, 1: {"kv_shared_with": 0}}}))),
    ("give it a plain name, without a colon", lambda: register("")),
    ("give it a plain name, without a colon", lambda: register("a:b")),
    ("uncached needs all pages: a recurrent state", lambda: disable_cache(runner_of(model_of(HYBRID)))),
    ("layer 0 has a recurrent state", lambda: TextAttention(model_of(HYBRID))),
]  # fmt: skip


@pytest.mark.parametrize(("words", "make"), MADE, ids=[words for words, _ in MADE])
def test_what_cannot_be_made_is_refused(words: str, make: Callable[[], object]) -> None:
    with pytest.raises((WorkbenchError, ValidationError), match=words):
        make()
