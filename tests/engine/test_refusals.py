"""Refuse at once, in one line that says why, what a model, its cache, a backend or a request cannot have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import workbench
from compiled_kernels import Backend
from tests.engine import eviction_policies
from tests.engine.at_rest import at_rest
from tests.engine.eviction_policies import MergesLayers, Uneven
from tests.engine.kinds import LATENT, MIXTURE
from tests.engine.own_rules import BACKWARDS
from tests.engine.tiny import CONTEXT, HERE, VOCAB, finals, layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.prompt.samples import byte_level
from workbench.cluster.apart.page_layout import describe_layout
from workbench.custom import register
from workbench.engine.beam_search import beam_search
from workbench.engine.config import EngineConfig
from workbench.engine.load import load
from workbench.engine.loaded_model import DEMO_FOLDER
from workbench.engine.speculator import check_same_vocabulary
from workbench.engine.uncached import disable_cache
from workbench.errors import WorkbenchError
from workbench.executors.select import Backends
from workbench.inspect.forward_pass import record_forward_pass
from workbench.inspect.whole_text import TextAttention
from workbench.model.attention_config import AttentionConfig
from workbench.model.recurrent.spec import ShortConvSpec
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.variants import change_attention
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import CustomPart, PrefixPin, Request, SamplingParameters
from workbench.response_format import Choices
from workbench.trace.events import Finished

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
    ("activations: int8 needs integer weights, not dense; set weights: int8 or int4", {"activations": "int8"}),
    ("activations: int8 needs integer weights, not dense", {"weights": "dense", "activations": "int8"}),
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
    ("module tests.engine.tiny:even: is not a module; extend workbench.model.layers",
     {"attention": {"module": HERE + "even"}}),
    ("module torch.nn:Linear: has no qkv_proj", {"attention": {"module": {"path": "torch.nn:Linear"}}}),
    ("module workbench.model.layers:Attention: could not be built with depth=2: .*; a class takes AttentionSpec, int, ",
     {"attention": {"module": {"path": LAYERS, "arguments": {"depth": 2}}}}),
    ("backend 'mlir' does not support this model: layer 1 has .*:no_arithmetic: .*own_rules.py.*cumsum",
     {"backend": "mlir", "attention": {"layers": {1: {"mask": "tests.engine.own_rules:no_arithmetic"}}}}),
    ("layer 0 has mask tests.engine.own_rules:untraceable, which cannot be traced",
     {"backend": "inductor", "attention": {"mask": "tests.engine.own_rules:untraceable"}}),
    ("4 query heads cannot share 5 key/value heads evenly", {"attention": {"num_kv_heads": 5}}),
    ("cache.offload.kind: 'disk' is unknown; known: none, memory, file", {"offload": "disk"}),
    ("give at least", {"offload": {"kind": "memory", "bytes": 10}}),
    ("cannot write .*No such file", {"offload": {"kind": "file", "path": "no/such/folder/pages"}}),
    ("cache.prefix.ttl: Input should be greater than 0", {"prefix": {"kind": "radix", "ttl": -1}}),
    ("preemption_mode: offload needs a place", {"preemption_mode": "offload"}),
    ("ttft", {"policy": {"kind": "deadline", "ttft": 0}}),
    ("policy.kind: 'shortest' is unknown", {"policy": "shortest"}),
    ("starvation_limt: unknown key; did you mean 'starvation_limit'[?]",
     {"policy": {"kind": "fair", "starvation_limt": 3}}),
    ("chunk_tokens must be from 1 to", {"chunk_tokens": 4096}),
    ("chunk_tokens needs chunked_prefill", {"chunk_tokens": 3, "chunked_prefill": False}),
    ("schedule.kind: ", {"schedule": {"kind": "statik"}}),
    ("speculate.kind: 'drafts' is unknown; did you mean 'draft'", {"speculate": "drafts"}),
    ("num_speculative_tokens: .*greater than or equal to 1",
     {"speculate": {"kind": "draft", "num_speculative_tokens": 0}}),
    ("min_ngram 5 is above max_ngram 4", {"speculate": {"kind": "prompt_lookup", "min_ngram": 5}}),
    ("tokens: Extra inputs|tokens: unknown key", {"speculate": {"kind": "draft", "tokens": 4}}),
    ("confidence_threshold: .*less than or equal to 1", {"speculate": {"kind": "draft", "confidence_threshold": 40}}),
    ("confidence_threshold: .*finite", {"speculate": {"kind": "draft", "confidence_threshold": math.nan}}),
    ("confidence_threshold: Extra inputs|confidence_threshold: unknown key",
     {"speculate": {"kind": "prompt_lookup", "confidence_threshold": 0.4}}),
    ("backend 'mlir' does not support this cache: layer 0 has dense keys, int4 values: keys and values are both",
     {"backend": "mlir", "cache": {"keys": "dense", "values": "int4"}}),
    ("bfloat16 weights and a float32 cache: it reads both in one dtype",
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
    ("batch_invariant: .*the tokens that remain of a prompt depend on its chunks",
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
TINY, LONG = model_of(spec_of()), spec_of().model_copy(update={"max_position_embeddings": 4096})
MLIR = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "decode")
BUILT: list[tuple[str, ModelSpec, dict[str, Any]]] = [
    ("layer 0 has experts", spec_of(MIXTURE), {"batch_invariant": True}),
    ("float64 weights: everything is computed in float32 or bfloat16", spec_of(),
     {"backends": MLIR, "dtype": torch.float64}),
    ("backend mlir: cannot decode tiny: .*latent attention",
     spec_of(LayerSpec(attention=LATENT, intermediate_size=12)), {"backends": MLIR}),
    ("layer 1 reads the keys and values of layer 0; set that layer's format", PAIR,
     {"cache": {"layers": {1: {"format": "int8"}}}}),
    ("cache.evict: layer 0 keeps a state", HYBRID, {"evict": BY_ALL}),
    ("cache.layers: layer 0 keeps a state", HYBRID, {"cache": {"layers": {0: {"format": "int8"}}}}),
    ("INT8 is a format of keys|int8 is a format of keys", spec_of(SHORT_CONV), {"cache": "int8", "page_size": 64}),
    ("cache.prefix: not with cache.evict", spec_of(), {"evict": BY_ALL, "prefix": "radix"}),
    ("layer 0 is kept as int8", spec_of(),
     {"evict": BY_ALL, "cache": {"format": "int8", "quant_group": 8}, "page_size": 8}),
    ("layer 1 has a window of 5", spec_of(layer(), layer(sliding_window=5)), {"evict": BY_ALL}),
    ("layer 0 needs distances", spec_of(layer(position="alibi")), {"evict": BY_ALL}),
    ("layer 0 needs distances", spec_of(layer(mask=CustomPart(path=HERE + "even"))), {"evict": BY_ALL}),
    ("layer 0 has its values as columns of its keys",
     spec_of(LayerSpec(attention=LATENT, intermediate_size=12)), {"evict": MergesLayers(budget=12)}),
    ("cache.evict: backend 'mlir' does not support this cache: its attention", spec_of(),
     {"evict": Uneven(budget=12), "backends": MLIR}),
    ("give exactly one of budget", spec_of(), {"evict": {"path": POLICIES + "Newest"}}),
    ("could not be built with budget=12, size=3", spec_of(),
     {"evict": {"path": POLICIES + "Newest", "arguments": {"budget": 12, "size": 3}}}),
    ("has no 'Nwest'; did you mean 'Newest'", spec_of(), {"evict": {"path": POLICIES + "Nwest"}}),
    ("is not an eviction policy: it needs gives_up, observes, budget_for, and select or", spec_of(),
     {"evict": {"path": HERE + "Halved"}}),
    ("cache.evict.budget: unknown key; known: arguments, kind, path", spec_of(),
     {"evict": {"path": POLICIES + "Newest", "budget": 12}}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "spec", "settings"), BUILT, ids=[words for words, *_ in BUILT])
def test_what_no_runner_carries_out_is_refused(words: str, spec: ModelSpec, settings: dict[str, Any]) -> None:
    model = model_of(spec, dtype=settings.get("dtype", torch.float32))
    with pytest.raises(WorkbenchError, match=words):
        runner_of(model, **{name: value for name, value in settings.items() if name != "dtype"})


NO_TEXTS: tuple[Any, ...] = [], [VOCAB], [-1], [0] * (CONTEXT + 1), [0.5]
MADE: list[tuple[str, Callable[[], object]]] = [
    ("layer 0 reads the keys and values of layer 0, which is not before it", lambda: spec_of(layer(kv_shared_with=0))),
    ("layer 1 reads the keys and values of layer 2, which is not before it",
     lambda: spec_of(layer(), layer(kv_shared_with=2), layer())),
    ("layer 2 reads the keys and values of layer 1, which has none of its own",
     lambda: spec_of(layer(), layer(kv_shared_with=0), layer(kv_shared_with=1))),
    ("layer 1 reads the keys and values of layer 0: its sliding_window is None, but 3 there",
     lambda: spec_of(layer(sliding_window=3), layer(kv_shared_with=0))),
    ("its head_dim is 6, but 4 there", lambda: spec_of(layer(dim=4), layer(dim=6, kv_shared_with=0))),
    ("its position is rotary, but none there", lambda: spec_of(layer(position="none"), layer(kv_shared_with=0))),
    ("kv_shared_with with output_gate", lambda: layer(kv_shared_with=0, output_gate=True)),
    ("layer 1 reads the keys and values of layer 0: its num_kv_heads is",
     lambda: change_attention(spec_of(layer(4, 2), layer(4, 2)), {}, AttentionConfig.parse(
         {"layers": {0: {"num_kv_heads": 1}, 1: {"kv_shared_with": 0}}}))),
    ("give it a plain name, without a colon", lambda: register("")),
    ("give it a plain name, without a colon", lambda: register("a:b")),
    ("uncached needs all pages: a recurrent state", lambda: disable_cache(runner_of(model_of(HYBRID)))),
    ("layer 0 has a recurrent state", lambda: TextAttention(model_of(HYBRID))),
    ("a codec that is calibrated", lambda: describe_layout(
        TINY, EngineConfig.build(cache={"codec": "tests.engine.test_calibration:ByHead"}))),
    ("tiny: no layer is a mixture of experts", lambda: runner_of(TINY).record_experts()),
    ("max_tokens: a Request brings its own", lambda: runner_of(TINY).stream(request("a", 3, 3), max_tokens=2)),
    ("one non-empty row", lambda: record_forward_pass(TINY, ())),
    ("at most 512", lambda: record_forward_pass(model_of(LONG), [1] * 600)),
    ("no stage 'router'", lambda: record_forward_pass(TINY, (1,)).values("router", 0)),
    ("response_format", lambda: workbench.trace_grammar(byte_level(), {"kind": "prose"}, [1])),
    *((words, lambda other=other, vocab=vocab: check_same_vocabulary(
        "x", Tokenizer.from_folder(DEMO_FOLDER / other) if other else None,
        spec_of().model_copy(update={"vocab_size": vocab}), Tokenizer.from_folder(DEMO_FOLDER / "target"), spec_of(),
    )) for words, other, vocab in (
        ("a draft must have the target's tokenizer; token .* is .*, but .* in", "bytes", VOCAB),
        ("the draft has no tokenizer", None, VOCAB), ("vocabulary has 128256 tokens", None, 128256),
    )),
    ("5 beams, and max_num_seqs is 4; raise it or ask for fewer beams",
     lambda: beam_search(runner_of(TINY), (1, 2), 5, 4)),
    # Three whole pages of the prompt are shared, each beam has four more.
    ("in 3 beams, need 15 pages of 4 tokens, the cache has 12",
     lambda: beam_search(runner_of(TINY, pages=12), (1,) * 13, 3, 16)),
    ("no tokenizer", lambda: beam_search(runner_of(TINY), "text", 2, 4)),
    *((".*", lambda ids=ids: TINY.logits(ids)) for ids in NO_TEXTS),
    *((words, lambda given=given: SamplingParameters.model_validate(given)) for words, given in (
        ("beams 2 is less than n", {"beams": 2, "n": 3}), ("give one", {"beams": 2, "best_of": 2}),
        ("leave out temperature", {"beams": 2, "temperature": 0.7}), ("leave out top_k", {"beams": 2, "top_k": 3}),
        ("give stop_token_ids in place of stop", {"beams": 2, "stop": "x"}),
        ("leave out prompt_logprobs", {"beams": 2, "prompt_logprobs": 0}),
        ("prompt_logprobs", {"prompt_logprobs": 101}),
        ("leave out response_format", {"beams": 2, "response_format": {"kind": "choices", "choices": ["a"]}}),
        ("best_of 2 is less than n", {"n": 3, "best_of": 2}), ("^1 validation error.*\nn\n", {"n": 0}),
        ("leave out logprobs_of", {"best_of": 2, "logprobs_of": "filtered"}),
        ("set beams, and leave out n", {"search": {"path": "x"}}),
        ("set beams, and leave out n", {"search": {"path": "x"}, "beams": 2, "n": 2}),
        *(("set best_of above n", {"ranking": {"path": "x"}, **more})
          for more in ({}, {"best_of": 1}, {"n": 2}, {"n": 2, "best_of": 2})),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("words", "make"), MADE, ids=[words for words, _ in MADE])
def test_what_cannot_be_made_is_refused(words: str, make: Callable[[], object]) -> None:
    with pytest.raises((WorkbenchError, ValidationError), match=words) as refused:
        make()
    assert "\n" not in str(refused.value) or isinstance(refused.value, ValidationError)


# Bad values for a token id, and for the ids of a prompt: each is refused, none breaks a step.
WRONG_IDS = [None, True, 1.0, "1", b"1", (1,), [], {}, 10**30, math.nan, np.int64(1), torch.tensor(1), -1, 1.5, VOCAB]
NO_IDS = [None, 5, "abc", b"abc", {1, 2}, {1: 2}, range(3), np.array([1, 2]), torch.tensor([1, 2]), iter((1, 2))]
WHOLE = SamplingParameters(prompt_logprobs=3)
REQUESTS: list[tuple[str, Any, dict[str, Any]]] = [
    ("prompt is empty", {"prompt_ids": ()}, {}),
    (f"token id {VOCAB}, the vocabulary is 0..{VOCAB - 1}", {"prompt_ids": (1, VOCAB)}, {}),
    *((f"token id {each!r}", {"prompt_ids": (1, each)}, {}) for each in WRONG_IDS),
    *((f"prompt_ids is of type {type(each).__name__}", {"prompt_ids": each}, {}) for each in NO_IDS),
    ("arrival is soon", {"arrival": "soon"}, {}),
    ("arrival is nan", {"arrival": math.nan}, {}),
    ("already taken", {"request_id": "a"}, {}),
    ("overflow: cut_oldest", {"prompt_ids": (1,) * CONTEXT}, {}),
    ("stop strings need a tokenizer", {"sampling": SamplingParameters(stop=("a",))}, {}),
    ("no tokenizer", {"sampling": SamplingParameters(response_format=Choices(choices=("a",)))}, {}),
    ("stop_token_ids has token id 99", {"sampling": SamplingParameters(stop_token_ids=(99,))}, {}),
    ("99", {"sampling": SamplingParameters(logit_bias={99: 1.0})}, {}),
    ("has one second stream; leave one of them out",
     {"sampling": SamplingParameters.model_validate({"filters": 2 * BACKWARDS["filters"]})}, {}),
    ("generated_ids has token id 9999", {"generated_ids": (7, 9999)}, {}),
    *(("a pin of", {"prompt_ids": (1, 2, 3), "pins": (PrefixPin(*pin),)}, {})
      for pin in ((5, 1.0), (1, 0.0), (-1, 1.0), (1, math.inf), (1, math.nan))),
    # A snapshot is of the whole prompt, whose pages are needed at once.
    ("need 5 pages of 4 tokens, the cache has 4",
     {"prompt_ids": (1,) * 17, "sampling": SamplingParameters(max_tokens=4)},
     {"evict": {"kind": "snapkv", "budget": 12, "observe": 4, "pool": 3}, "pages": 4}),
    ("17 prompt tokens do not fit into one step of 16", {"prompt_ids": (1,) * 17}, {"chunked_prefill": False}),
    ("switch chunked_prefill on", {"prompt_ids": (1,) * 200, "sampling": WHOLE},
     {"pages": 100, "page_size": 16, "chunked_prefill": False, "max_num_batched_tokens": 512}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "wrong", "settings"), REQUESTS, ids=[words for words, *_ in REQUESTS])
def test_a_bad_request_is_refused_and_the_others_run(
    words: str, wrong: dict[str, Any], settings: dict[str, Any]
) -> None:
    good = [request("a", 4, 5), request("b", 3, 5)]
    model = model_of(LONG) if "page_size" in settings else TINY
    alone = finals(runner_of(model, **settings), good)
    runner = runner_of(model, **settings)
    bad = Request(**{"request_id": "x", "prompt_ids": (1,), **wrong})
    ends = of(Finished, runner.stream([good[0], bad, good[1]]))
    (refused,) = (event for event in ends if event.reason == "refused")
    assert refused.request_id == bad.request_id and words in refused.error and "\n" not in refused.error
    assert {event.request_id: event.token_ids for event in ends if event.reason != "refused"} == alone
    at_rest(runner)
