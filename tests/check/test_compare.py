"""A difference from transformers is named where it arises: planted ones in every module, of several families."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.tiny import layer, spec_of
from tests.model.families import NEEDS_TRANSFORMERS
from tests.thorough import some
from workbench.check import compare
from workbench.check.compare import ModelComparison, compare_models
from workbench.check.lengths import GREEDY_TOKENS, long_length, thresholds_of
from workbench.check.place_differences import LOCAL_BOUND, _difference
from workbench.check.places import Place, places_of
from workbench.model.attention_spec import RotaryConfig
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.formats.open import read_config
from workbench.model.hf.families import read_names, read_spec
from workbench.model.hf.weights import load_weights
from workbench.model.spec import ActivationSpec, ModelSpec
from workbench.model.transformer import Transformer
from workbench.testing.family_checkpoints import CONFIGS, FAMILY_CASES, random_checkpoint

pytestmark = NEEDS_TRANSFORMERS


def family_name(each: object) -> str:
    return each if isinstance(each, str) else ""


State = dict[str, Tensor]


@functools.cache
def family(name: str, case: int = 0) -> tuple[Any, ModelSpec, State, CheckpointNames]:
    """A model of theirs, and its spec, weights and names as they are read here."""
    theirs = random_checkpoint(name, CONFIGS[name][case])
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        spec = read_spec(folder)
        state = {key: tensor.clone() for key, tensor in load_weights(folder, spec, torch.float32).items()}
        return theirs, spec, state, read_names(read_config(folder))


def compared(name: str, change: Callable[[ModelSpec, State], ModelSpec | None], case: int = 0) -> ModelComparison:
    """Compare with a model of ours in which `change` has planted a difference."""
    theirs, spec, state, names = family(name, case)
    state = copy.deepcopy(state)
    return compare_models(Transformer.from_state(change(spec, state) or spec, state), theirs, names)


@pytest.mark.parametrize(("name", "changes"), some(FAMILY_CASES, 16), ids=family_name)
def test_a_model_that_is_right_has_no_difference(name: str, changes: dict[str, Any]) -> None:
    found = compared(name, lambda spec, state: None, CONFIGS[name].index(changes))
    feedforwards = all(kind.intermediate_size for kind in family(name, CONFIGS[name].index(changes))[1].layers)
    assert (
        found.equal
        and found.places >= (36 if feedforwards else 24)
        and found.largest < LOCAL_BOUND / 4
        and len(found.tokens[0]) >= 4
    )


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1.001])
def test_first_position_whose_logits_differ_is_named(wrong: float) -> None:
    theirs = torch.ones(5, 3)
    assert compare._compare_logits(theirs, theirs) == (0.0, None)
    ours = theirs.index_put((torch.tensor([2, 4]), torch.tensor([1, 0])), torch.tensor(wrong))
    difference, position = compare._compare_logits(ours, theirs)
    assert position == 2 and difference > compare.LOGIT_BOUND


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1.001])
def test_place_whose_tensor_differs_is_named_by_position_and_column(wrong: float) -> None:
    place, theirs = Place(0, "norm", "norm", ("norm",)), torch.ones(600, 2, 3)
    assert _difference(place, theirs, theirs).size == 0
    ours = theirs.index_put((torch.tensor([300, 500]), torch.tensor([1, 0]), torch.tensor([2, 0])), torch.tensor(wrong))
    found = _difference(place, ours, theirs)
    assert (found.position, found.column) == (300, 5) and found.size > LOCAL_BOUND


def test_lengths_are_within_the_context_with_the_tokens_that_follow() -> None:
    longest = 128 - GREEDY_TOKENS
    for window, is_reached in ((longest - 1, True), (longest, False)):
        kinds = layer(sliding_window=window)
        spec = spec_of(kinds).model_copy(update={"max_position_embeddings": 128})
        assert [each.tokens for each in thresholds_of(spec)] == [longest] * is_reached
        assert long_length(spec, 1000.0) == (longest if is_reached else None)
        assert long_length(spec, longest - 1) is None


def scaled(name: str) -> Callable[[ModelSpec, State], None]:
    """Change one number of a parameter."""

    def change(spec: ModelSpec, state: State) -> None:
        state[name].view(-1)[-1] += 0.2

    return change


def with_layer(index: int, **changes: Any) -> Callable[[ModelSpec, State], ModelSpec]:
    """Change fields of one layer, or of its attention."""

    def change(spec: ModelSpec, state: State) -> ModelSpec:
        layers = list(spec.layers)
        own = {key: value for key, value in changes.items() if key in type(layers[index]).model_fields}
        inner = {key: value for key, value in changes.items() if key not in own}
        own["attention"] = layers[index].attention.model_copy(update=inner)
        layers[index] = layers[index].model_copy(update=own)
        return spec.model_copy(update={"layers": tuple(layers)})

    return change


def with_model(**changes: Any) -> Callable[[ModelSpec, State], ModelSpec]:
    return lambda spec, state: spec.model_copy(update=changes)


def with_norm(**changes: Any) -> Callable[[ModelSpec, State], ModelSpec]:
    return lambda spec, state: spec.model_copy(update={"norm": spec.norm.model_copy(update=changes)})


def other_choice(spec: ModelSpec, state: State) -> ModelSpec:
    experts = spec.layers[2].experts
    assert experts is not None
    router = experts.router.model_copy(update={"renormalize": not experts.router.renormalize})
    return with_layer(2, experts=experts.model_copy(update={"router": router}))(spec, state)


PLANTED: list[tuple[str, Any, int | None, str]] = [
    ("llama", scaled("embedding.weight"), None, "embedding"),
    ("llama", scaled("head.weight"), None, "head"),
    ("llama", scaled("blocks.1.attention_norm.weight"), 1, "attention norm"),
    ("llama", scaled("blocks.2.attention.qkv.weight"), 2, "value projection"),
    ("llama", scaled("blocks.0.attention.output.weight"), 0, "output projection"),
    ("llama", scaled("blocks.3.feedforward_norm.weight"), 3, "feed-forward norm"),
    ("llama", scaled("blocks.3.feedforward.gate_up.weight"), 3, "gate and up projections"),
    ("llama", scaled("blocks.1.feedforward.down.weight"), 1, "down projection"),
    ("llama", scaled("norm.weight"), None, "last norm"),
    ("llama", with_model(rotary=RotaryConfig(rope_theta=9_000.0)), 0, "rotary angles"),
    ("llama", with_layer(2, rotary=RotaryConfig(rope_theta=9_000.0)), 2, "rotary angles"),
    ("llama", with_norm(eps=2e-5), 0, "attention norm"),
    ("llama", with_layer(1, scale=0.3), 1, "attention (positions, scores, mask or softmax)"),
    ("llama", with_layer(1, position="none"), 1, "attention (positions, scores, mask or softmax)"),
    ("llama", with_layer(2, activation=ActivationSpec(kind="gelu")), 2, "activation"),
    ("mistral", with_layer(1, sliding_window=8), 1, "attention (positions, scores, mask or softmax)"),
    ("gemma2", with_layer(1, softcap=40.0), 1, "attention (positions, scores, mask or softmax)"),
    ("gemma2", with_model(embedding_scale=7.5), None, "embedding"),
    ("gemma2", scaled("blocks.2.attention_post_norm.weight"), 2, "norm after attention"),
    ("gemma2", scaled("blocks.2.feedforward_post_norm.weight"), 2, "norm after the feed-forward"),
    ("gemma2", with_model(final_logit_softcapping=29.0), None, "head"),
    ("granite", with_model(residual_scale=0.29), 0, "sum after attention"),
    ("granite", with_model(logit_scale=0.6), None, "head"),
    ("qwen3", scaled("blocks.1.attention.query_norm.weight"), 1, "norm of queries"),
    ("qwen3", scaled("blocks.1.attention.key_norm.weight"), 1, "norm of keys"),
    ("cohere", scaled("blocks.1.attention_norm.weight"), 1, "attention norm"),
    ("cohere", scaled("blocks.1.feedforward.down.weight"), 1, "down projection"),
    ("glm", with_model(rotary=RotaryConfig(rope_theta=9_000.0)), 0, "rotary angles"),
    ("gpt2", scaled("blocks.2.attention.qkv.bias"), 2, "value projection"),
    ("bloom", scaled("embedding_norm.weight"), None, "embedding"),
    ("bloom", scaled("blocks.1.feedforward.up.bias"), 1, "up projection"),
    ("bloom", with_layer(1, position="none"), 1, "attention (positions, scores, mask or softmax)"),
    ("mixtral", scaled("blocks.1.feedforward.router.weight"), 1, "router"),
    ("mixtral", other_choice, 2, "router"),
    ("mixtral", scaled("blocks.1.feedforward.down"), 1, "mixture of experts"),
    ("deepseek_v3", scaled("blocks.1.attention.down.weight"), 1, "projections to the latents"),
    ("deepseek_v3", scaled("blocks.2.attention.latent_norm.weight"), 2, "norm of the latent"),
    ("deepseek_v3", with_layer(1, rope_interleave=False), 1, "attention (positions, scores, mask or softmax)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "layer", "module"), PLANTED, ids=family_name)
def test_a_planted_difference_is_named(name: str, change: Any, layer: int | None, module: str) -> None:
    found = compared(name, change)
    assert not found.equal and found.first is not None
    assert (found.first.place.layer, found.first.place.module) == (layer, module), found.as_json()


def test_a_window_differs_from_its_first_position_on() -> None:
    """The prompt's first eight tokens see the same with windows of 7 and 8 but for the last."""
    found = compared("mistral", with_layer(1, sliding_window=8))
    assert found.first is not None and found.first.position == 7


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 60,
            "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.3 * pair for pair in range(8)]}  # fmt: skip
LATE = {
    "mistral": {"sliding_window": 60},
    "llama4_text": CONFIGS["llama4_text"][0] | {"attention_chunk_size": 60, "floor_scale": 70},
    "phi3": {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 60},
}


def with_long_factors(spec: ModelSpec, state: State) -> ModelSpec:
    scaling = spec.rotary.scaling.model_copy(update={"long_factors": (1.0,) * 8})
    return spec.model_copy(update={"rotary": spec.rotary.model_copy(update={"scaling": scaling})})


def late(name: str, change: Callable[[ModelSpec, State], ModelSpec | None]) -> ModelComparison:
    """Compare a model with mechanisms that set in after the short text."""
    theirs = random_checkpoint(name, LATE[name])
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        spec = read_spec(folder)
        state = load_weights(folder, spec, torch.float32)
        return compare_models(
            Transformer.from_state(change(spec, state) or spec, state), theirs, read_names(read_config(folder))
        )


@pytest.mark.parametrize(
    ("name", "reached", "length"),
    [
        ("mistral", ("the window of 60 tokens",), 77),
        ("llama4_text", ("chunks of 60 tokens", "the attention temperature"), 86),
        ("phi3", ("longrope scaling beyond 60 tokens",), 77),
    ],
)
def test_texts_reach_past_every_length_at_which_something_sets_in(
    name: str, reached: tuple[str, ...], length: int
) -> None:
    found = late(name, lambda spec, state: None)
    assert found.equal and (found.reached, found.not_reached, found.lengths) == (reached, (), (47, length))


@pytest.mark.parametrize(
    ("name", "change", "module", "position"),
    [
        ("mistral", with_layer(1, sliding_window=61), "attention (positions, scores, mask or softmax)", 60),
        ("mistral", with_layer(1, sliding_window=None), "attention (positions, scores, mask or softmax)", 60),
        ("llama4_text", with_layer(0, chunk_size=64), "attention (positions, scores, mask or softmax)", 60),
        ("phi3", with_long_factors, "rotary angles", None),
    ],
)
def test_a_difference_that_sets_in_late_is_found(name: str, change: Any, module: str, position: int | None) -> None:
    found = late(name, change)
    assert found.first is not None and found.first.place.module == module, found.as_json()
    assert position is None or found.first.position == position
    assert found.lengths[0] == 47 and len(found.lengths) == 2


def test_a_text_that_would_take_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "MAX_SECONDS", 0.0)
    found = late("mistral", lambda spec, state: None)
    assert found.equal and found.lengths == (47,) and not found.reached
    (reason,) = found.not_reached
    assert reason.startswith("the window of 60 tokens (a text of this length would take more than 0 s")


def test_the_places_that_were_not_compared_are_named() -> None:
    """A place counts where its tensor was compared."""
    theirs, spec, state, names = family("llama")
    places, lacking = places_of(spec, names, theirs)
    found = compared("llama", lambda spec, state: None)
    assert found.places == len(places) and not lacking and not found.left_out
    hidden = copy.deepcopy(theirs)
    del hidden.model.layers[1].mlp.down_proj
    left = places_of(spec, names, hidden)[1]
    assert [(place.layer, place.module) for place in left] == [(1, "activation"), (1, "down projection")]


def test_a_changed_weight_is_named_with_its_column() -> None:
    found = compared("llama", scaled("blocks.1.feedforward.down.weight"))
    assert found.first is not None and found.first.column == family("llama")[1].hidden_size - 1
    assert found.first.place.theirs == ("model.layers.1.mlp.down_proj",)
