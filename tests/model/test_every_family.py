"""Every family that is read, on random checkpoints of transformers' own: logits and greedy tokens equal theirs."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compiled_kernels import Backend, backend_problems
from tests.engine.steps import forced
from tests.engine.tiny import finals, runner_of
from tests.model.families import (
    BOUND,
    CASES,
    GGUF_CASES,
    LATENT,
    LLAMA_BOUND,
    NEEDS_TRANSFORMERS,
    YARN,
    Changes,
    assert_equal,
    draw_ids,
    logits_of,
    named,
    ours_of,
    read_model,
)
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.executors.build import build_step_runner
from workbench.executors.requirements import Requirements
from workbench.executors.select import Backends
from workbench.model.hf.families import FAMILIES, read_spec
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import load_weights, random_weights
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters
from workbench.testing.family_checkpoints import (
    CONFIGS,
    FAMILY_CASES,
    NAMES_OF_ITS_OWN,
    SIZES,
    WITHOUT_GROUPS,
    random_checkpoint,
)

pytestmark = NEEDS_TRANSFORMERS
# A state's output is normed by head, however small it is: in some sizes transformers' own logits, in float32, are
# further than BOUND from exact ones. Ours are held to exact ones there.
NORMED_STATES = ("qwen3_next", "mamba2", "bamba", "falcon_h1")
LLAMAS = [case for case in CASES if case[0] == "llama"]
COMPILED = [
    (Backend.MLIR, "mistral", {"sliding_window": 7}),
    (Backend.MLIR, "gemma2", GGUF_CASES["gemma2"][0]),
    (Backend.MLIR, "deepseek_v3", {**LATENT, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    (Backend.INDUCTOR, "gpt_oss", CONFIGS["gpt_oss"][0]),
]


def test_every_family_has_a_case() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@named(CASES)
def test_logits_and_tokens_are_theirs(tmp_path: Path, family: str, changes: Changes) -> None:
    """Whole, without cache; in chunks and token by token from pages; batched with others, after a prefix hit."""
    theirs = random_checkpoint(family, changes)
    model, ids = ours_of(theirs, tmp_path), draw_ids(40, 1)
    assert model.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model.spec.eos_token_ids == (3,)
    expected, bound = logits_of(theirs, ids), LLAMA_BOUND if family == "llama" else BOUND
    assert_equal(naive.logits(model, ids), expected, bound)
    assert_equal(model.logits(ids), expected, bound)
    assert_equal(forced(model, ids, chunks=(11, 6)), expected[[10, *range(16, len(ids))]])
    prompts = {"a": ids[:21].tolist(), "b": draw_ids(9, 2).tolist(), "c": ids[:26].tolist(), "d": ids[:21].tolist()}
    runner = runner_of(model, prefix="radix", max_num_seqs=2, pages=60)
    greedy = SamplingParameters(temperature=0, max_tokens=4, ignore_eos=True)
    found = finals(runner, [Request(name, tuple(each), greedy) for name, each in prompts.items()])
    for name, prompt in prompts.items():
        rows = logits_of(theirs, torch.tensor([*prompt, *found[name]]))[len(prompt) - 1 : -1]
        for place, (row, token) in enumerate(zip(rows, found[name], strict=True)):
            best = row.topk(2)
            clear = best.values[0] - best.values[1] > 4 * BOUND * best.values[0].abs()
            assert not clear or token == int(best.indices[0]), f"request {name}, token {place}"


@st.composite
def sizes(draw: st.DrawFn, family: str, changes: Changes, length: int) -> Changes:
    """Draw fields that make a config which the family accepts: groups whose share differs from their number, widths
    that are no power of 2, windows around the text's `length`."""
    groups_and_shares = [(3, 2), (2, 3), (3, 1), (1, 2), (4, 1), (1, 4)]
    if family == "mpt":  # the slopes of its bias: heads are a power of 2
        groups_and_shares = [(1, 2), (4, 1), (1, 4)]
    groups, share = draw(st.sampled_from(groups_and_shares))
    heads, dim = groups * share, draw(st.sampled_from([8, 12, 16]))
    layers, window = draw(st.integers(1, 4)), draw(st.integers(max(1, length - 2), length + 2))
    drawn: Changes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads * dim}
    if family not in WITHOUT_GROUPS:
        drawn["num_key_value_heads"] = heads if family.startswith("deepseek") else groups
    of_some_families = {
        "head_dim": dim, "num_kv_heads": groups, "sliding_window": window, "word_embed_proj_dim": heads * dim,
        "num_heads": 2 * heads,  # of a state, which is twice as wide as the model
        "num_kv_shared_layers": max(0, layers - 2),
    }  # fmt: skip
    drawn |= {key: value for key, value in of_some_families.items() if changes.get(key)}
    if dim == 12:  # a quarter of it, as in some families, is no number of pairs
        drawn |= {"partial_rotary_factor": 0.5} if "partial_rotary_factor" in changes or family == "qwen3_next" else {}
        drawn |= {"rotary_pct": 0.5} if "rotary_pct" in changes else {}
    for key, value in changes.items():
        if isinstance(value, list) and len(value) == SIZES["num_hidden_layers"]:
            drawn[key] = value[:layers]  # one of each layer
    if draw(st.booleans()):  # a head that is the embedding has no bias
        biased = family in ("phi", "gptj") or changes.get("lm_head_bias", False)
        drawn["tie_word_embeddings"] = not biased and not family.startswith("deepseek")
    own = NAMES_OF_ITS_OWN.get(family, {})
    return {**changes, **{own.get(key, key): value for key, value in drawn.items()}}


@named(FAMILY_CASES)
@settings(max_examples=tries(18))
@given(st.data())
def test_sizes_that_are_drawn_are_accepted(family: str, changes: Changes, data: st.DataObject) -> None:
    """By transformers and here, for every family: the law of logits meets but some of them in a run."""
    with torch.device("meta"), tempfile.TemporaryDirectory() as folder:
        theirs = random_checkpoint(family, data.draw(sizes(family, changes, data.draw(st.integers(2, 24)))))
        theirs.config.save_pretrained(folder)
        assert read_spec(Path(folder)).num_parameters >= theirs.num_parameters()  # some buffers are weights


@settings(max_examples=tries(24))
@given(st.data())
def test_logits_are_theirs_for_sizes_of_any_kind(data: st.DataObject) -> None:
    family, changes = data.draw(st.sampled_from(FAMILY_CASES))
    length = data.draw(st.integers(2, 24))
    theirs = random_checkpoint(family, data.draw(sizes(family, changes, length)), length)
    with tempfile.TemporaryDirectory() as folder:
        model = ours_of(theirs, Path(folder))
    ids = draw_ids(length, 3)
    expected = logits_of(theirs, ids)
    if family in NORMED_STATES:
        exact = naive.logits(model, ids, torch.float64)
        away, scale = (expected - exact).abs().max().item(), max(1.0, exact.abs().max().item())
        assert away <= 20 * BOUND * scale
        assert (model.logits(ids) - exact).abs().max() <= 4 * away + BOUND * scale
        return
    assert_equal(naive.logits(model, ids), expected)
    assert_equal(model.logits(ids), expected)


@named(LLAMAS)
def test_a_folder_that_is_written_here_is_the_same_model_there(tmp_path: Path, family: str, changes: Changes) -> None:
    """In shards, and the first one whole."""
    import transformers

    random_checkpoint(family, changes).config.save_pretrained(tmp_path / "a")
    spec = read_spec(tmp_path / "a")
    state = random_weights(spec, torch.float32, seed=3)
    save_folder(tmp_path / "b", spec, state, torch.float32, shard_bytes=50_000 if changes else 10**9)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    ids = draw_ids(40, 1)
    assert_equal(Transformer.from_state(spec, state).logits(ids), logits_of(back, ids))


def test_shards_and_stored_bfloat16_are_read(tmp_path: Path) -> None:
    import transformers

    theirs, ids = random_checkpoint("llama", {}), draw_ids(40, 1)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    assert_equal(read_model(tmp_path / "shards").logits(ids), logits_of(theirs, ids))
    theirs.bfloat16().save_pretrained(tmp_path / "m")
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert_equal(read_model(tmp_path / "m").logits(ids), logits_of(wide, ids))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("backend", "family", "changes"), COMPILED)
def test_compiled_backends_equal_transformers(tmp_path: Path, backend: Backend, family: str, changes: Changes) -> None:
    if problem := backend_problems()[backend]:
        pytest.skip(f"backend {backend}: {problem}")
    layers = 2 if family == "gemma2" else 1
    theirs, ids = random_checkpoint(family, {**changes, "num_hidden_layers": layers}), draw_ids(20, 1)
    theirs.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    model = Transformer.from_state(spec, load_weights(tmp_path, spec, torch.float32), backend)

    def executor(model, store):
        needs = Requirements.from_model(model, store)
        return build_step_runner(model, store, Backends.uniform(backend, "asked for", needs))

    rows = forced(model, ids, chunks=(11, 6), executor=executor)
    assert_equal(rows, logits_of(theirs, ids)[[10, *range(16, len(ids))]])


@pytest.mark.parametrize(
    ("family", "extra", "ignored"),
    [
        ("deepseek_v3", "layers.4.eh_proj", True), ("qwen3_next", "mtp.fc", True), ("llama", "layers.4.eh_proj", False),
        ("gemma3n_text", "layers.3.self_attn.k_proj", True), ("gemma3n_text", "layers.3.self_attn.j_proj", False),
    ],
)  # fmt: skip
def test_weights_that_published_files_have_besides_are_ignored(
    tmp_path: Path, family: str, extra: str, ignored: bool
) -> None:
    """Layers that predict further tokens, and keys and values of layers that share another's; no others."""
    random_checkpoint(family, CONFIGS[family][0]).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", extra if extra.startswith("mtp") else f"model.{extra}"
    save_file({**load_file(file), f"{name}.weight": torch.ones(3, 3)}, file, {"format": "pt"})
    with nullcontext() if ignored else pytest.raises(WorkbenchError, match="has extra"):
        load_weights(tmp_path, read_spec(tmp_path), torch.float32)
