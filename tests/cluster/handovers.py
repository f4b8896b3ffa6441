"""Models and requests whose pages go from one engine to another."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.engine.tiny import layer, request, spec_of
from workbench.request import Request

FORMATS = (
    {"format": "dense"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"format": "int8", "quant_group": 8, "columns": 8, "residual_length": 4, "num_sink_tokens": 2},
    {"format": "int4", "quant_group": 8, "columns": 8, "residual_length": 9},
    {"format": "fp8", "quant_group": 8, "columns": 8, "residual_length": 1},
    {"keys": "int8", "values": "fp8", "quant_group": 8, "columns": 8, "residual_length": 3, "rotate": True},
    {"codec": "tests.engine.tiny:Halved"},
)
WINDOWS = spec_of(layer(2, 1, 8), layer(2, 1, 8, sliding_window=5), layer(4, 2, 8, sliding_window=9, num_sink_tokens=3))


def drawn_requests(data: st.DataObject, name: str) -> list[Request]:
    """Requests of which some begin alike, and whose tokens depend on every one before."""
    draw, made = data.draw, list[Request]()
    for number in range(draw(st.integers(1, 4))):
        penalty = draw(st.sampled_from([1.0, 1.3]))
        heat = draw(st.sampled_from([0.0, 1.0]))
        made.append(
            request(
                f"{name}{draw(st.integers(0, 1))}", draw(st.integers(1, 26)), draw(st.integers(1, 14)),
                temperature=heat, seed=number, repetition_penalty=penalty,
            )
        )  # fmt: skip
    return [Request(f"{each.request_id}-{number}", each.prompt_ids, each.sampling) for number, each in enumerate(made)]


LAYERS = spec_of(layer(4, 2, 16), layer(4, 2, 16)).model_copy(update={"hidden_size": 64})
