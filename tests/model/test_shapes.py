from __future__ import annotations

import math

import pytest

from workbench.model.hf.families import config_from_spec, spec_from_config
from workbench.model.model_parameters import parameter_shapes
from workbench.model.shapes import SHAPES, named_shape

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-2-13b": 13_015_864_320,
    "olmoe-1b-7b": 6_919_161_856,
}
LLAMAS = [name for name, spec in SHAPES.items() if not spec.layers[0].experts]


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name: str, count: int) -> None:
    assert named_shape(name).num_parameters == count


@pytest.mark.parametrize("name", SHAPES)
def test_the_count_is_the_sum_over_the_parameters(name: str) -> None:
    spec = named_shape(name)
    assert sum(math.prod(shape) for shape in parameter_shapes(spec).values()) == spec.num_parameters


@pytest.mark.parametrize("name", LLAMAS)
def test_shapes_are_llama_configs(name: str) -> None:
    assert named_shape(name).name == name
    assert spec_from_config(config_from_spec(named_shape(name)), name) == named_shape(name)


def test_only_llama_31_scales_its_rotary() -> None:
    scaled = {name: spec.rotary.scaling for name, spec in SHAPES.items() if spec.rotary.scaling.kind != "default"}
    assert list(scaled) == ["llama-3.1-8b", "llama-3.1-70b"]
    scaling = scaled["llama-3.1-8b"]
    assert (scaling.kind, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (
        "llama3",
        8.0,
        1.0,
        4.0,
    )
    assert scaling.original_max_position_embeddings == 8192


