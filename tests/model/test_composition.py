"""A composition says for each layer what changes, and a mistake in one is reported by its path."""

from __future__ import annotations

import pytest

from tests.helpers.refusals import refuses
from workbench.model.attention_config import AttentionChange, AttentionConfig
from workbench.model.attention_spec import AttentionSpec, RotaryConfig
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.variants import change_spec

LAYER = LayerSpec(attention=AttentionSpec(num_heads=6, num_kv_heads=6, head_dim=4), intermediate_size=8)
SPEC = ModelSpec(name="six", vocab_size=11, hidden_size=24, layers=(LAYER,) * 6, max_position_embeddings=64)
IDLE_SINKS = {"sliding_window": "full", "num_sink_tokens": 2}


def attention_of(kind: LayerSpec) -> AttentionSpec:
    assert isinstance(kind.attention, AttentionSpec)
    return kind.attention


def varied(**values: object) -> list[AttentionSpec]:
    return list(map(attention_of, change_spec(SPEC, AttentionConfig.parse(values)).layers))


def test_nothing_changes_nothing() -> None:
    assert change_spec(SPEC, AttentionConfig()) == SPEC
    assert AttentionConfig().is_unchanged and not AttentionConfig(sliding_window=3).is_unchanged


def test_every_slot_reaches_every_layer() -> None:
    slots = {
        "num_kv_heads": 2, "sliding_window": 9, "num_sink_tokens": 2, "softcap": 3.0, "scale": 0.2, "qk_norm": True,
        "rotary": RotaryConfig(rope_theta=7.0), "sink_logits": True,
    }  # fmt: skip
    assert {attention.position for attention in varied(position="none")} == {"none"}
    others = {
        "num_heads", "head_dim", "position", "mask", "score", "pages", "module", "kv_shared_with", "chunk_size",
        "temperature",
    }  # fmt: skip
    assert set(slots) | others == set(AttentionChange.model_fields)
    (shared,) = [kind for kind in varied(layers={2: {"kv_shared_with": 0}}) if kind.kv_shared_with is not None]
    assert shared == LAYER.attention.model_copy(update={"kv_shared_with": 0})
    late = {"chunk_size": 4, "temperature": {"strength": 0.1, "floor": 8}}
    for attention in varied(**late):
        assert attention == AttentionSpec.model_validate(dict(LAYER.attention) | late)
    for attention in varied(**slots):
        assert attention == AttentionSpec.model_validate(dict(LAYER.attention) | slots)


def test_full_layers_have_neither_window_nor_chunks() -> None:
    kinds = {"chunk": {"chunk_size": 4}}
    found = varied(pattern=["chunk", "full"], kinds=kinds, layers={2: {"sliding_window": "full"}})
    assert [each.chunk_size for each in found] == [4, None, None, None, 4, None]
    chunks = {"chunk_size": 4, "sliding_window": "full"}
    swapped = change_spec(change_spec(SPEC, AttentionConfig(sliding_window=9)), AttentionConfig.parse(chunks))
    assert {(each.sliding_window, each.chunk_size) for each in map(attention_of, swapped.layers)} == {(None, 4)}


def test_previous_is_the_last_layer_that_has_its_own() -> None:
    kinds = {"shared": {"kv_shared_with": "previous"}}
    found = varied(pattern=["full", "shared", "shared"], kinds=kinds)
    assert [each.kv_shared_with for each in found] == [None, 0, 0, None, 3, 3]
    refuses(
        "layer 0: kv_shared_with: previous: no layer before it has", varied, pattern=["shared", "full"], kinds=kinds
    )
    refuses(
        "its sliding_window is 9, but None there", varied, sliding_window=9, pattern=["full", "shared"], kinds=kinds
    )


def test_kinds_and_single_layers_stand_on_top() -> None:
    found = varied(
        softcap=2.0, sliding_window=9, pattern=["near", "window"],
        kinds={"near": {"sliding_window": 3, "position": "none"}},
        layers={5: {"sliding_window": "full"}, 0: {"softcap": 0}},
    )  # fmt: skip
    assert [a.sliding_window for a in found] == [3, 9, 3, 9, 3, None]
    assert [a.softcap for a in found] == [0, 2, 2, 2, 2, 2]
    assert [a.position for a in found] == ["none", "rotary"] * 3


@pytest.mark.parametrize(("num_kv_heads", "right"), [("multi_head", 6), ("multi_query", 1), (3, 3)])
def test_groups_by_number_or_name(num_kv_heads: object, right: int) -> None:
    assert {a.num_kv_heads for a in varied(num_kv_heads=num_kv_heads)} == {right}


def test_what_a_single_layer_gives_up_is_no_contradiction() -> None:
    """Sinks and rotary that all other layers have are idle in one that sees all, or has no positions."""
    layers = {1: {"sliding_window": "full"}, 2: {"position": "none"}}
    found = varied(sliding_window=4, num_sink_tokens=2, rotary={"rope_theta": 9.0}, layers=layers)[:3]
    assert [(each.sliding_window, each.num_sink_tokens, each.position) for each in found] == [
        (4, 2, "rotary"), (None, 0, "rotary"), (4, 2, "none"),
    ]  # fmt: skip


def test_a_part_may_be_named_by_its_place_alone() -> None:
    mask = AttentionConfig.parse({"mask": "mine.py:Mask"}).given["mask"]
    assert (mask.path, mask.arguments) == ("mine.py:Mask", {})
