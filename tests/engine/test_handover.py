"""Prefill and decode in two engines: a sequence that is handed over goes on as if it had stayed, in every cache format,
and no page is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.apart import engines_apart
from tests.engine.test_recurrent import models as recurrent_models
from tests.engine.tiny import Oracle, finals, layer, model_of, request, runner_of, spec_of
from tests.thorough import tries

FORMATS = (
    {"format": "dense"},
    {"format": "int8", "quant_group": 8, "columns": 8, "residual_length": 4, "num_sink_tokens": 2},
    {"format": "int4", "quant_group": 8, "columns": 8, "residual_length": 9},
    {"format": "fp8", "quant_group": 8, "columns": 8, "residual_length": 1},
    {"keys": "int8", "values": "fp8", "quant_group": 8, "columns": 8, "residual_length": 3, "rotate": True},
    {"codec": "tests.engine.tiny:Halved"},
)
WINDOWS = spec_of(layer(2, 1, 8), layer(2, 1, 8, sliding_window=5), layer(4, 2, 8, sliding_window=9, num_sink_tokens=3))


def drawn_requests(draw: st.DrawFn, name: str) -> list:
    """Requests of which some begin alike, and whose tokens depend on every one before."""
    made = []
    for number in range(draw(st.integers(1, 4))):
        penalty = draw(st.sampled_from([1.0, 1.3]))
        heat = draw(st.sampled_from([0.0, 1.0]))
        made.append(
            request(
                f"{name}{draw(st.integers(0, 1))}", draw(st.integers(1, 26)), draw(st.integers(1, 14)),
                temperature=heat, seed=number, repetition_penalty=penalty,
            )
        )  # fmt: skip
    return [
        type(each)(f"{each.request_id}-{number}", each.prompt_ids, each.sampling) for number, each in enumerate(made)
    ]


@settings(max_examples=tries(60), deadline=None)
@given(st.data())
def test_two_engines_give_what_one_gives(data: st.DataObject) -> None:
    """Any format, windows, prefix hits on both sides, pages that run out, and handovers that come late."""
    draw = data.draw
    model = model_of(draw(st.one_of(st.just(WINDOWS), st.just(spec_of(layer(2, 1, 8), layer(2, 1, 8))))))
    cache = dict(draw(st.sampled_from(FORMATS)), prefix=draw(st.sampled_from(["off", "radix"])))
    chosen = {
        "cache": cache,
        "page_size": draw(st.sampled_from([8, 16])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 16])),
    }
    asked = drawn_requests(draw, f"{draw(st.integers(0, 99))}-")
    alone = finals(runner_of(model, **chosen, pages=40), asked)
    few = {"pages": draw(st.sampled_from([8, 40]))}
    apart = engines_apart(model, draw(st.booleans()), few, **chosen, pages=40)
    for runner in (apart.prefill, apart.decode):
        Oracle(runner) if cache["format" if "format" in cache else "prefix"] == "dense" else None
    hold = draw(st.integers(0, 3))
    assert apart.run(asked, hold) == alone
    assert {name: tuple(ids) for name, ids in apart.emitted.items()} == alone, "each token is emitted once"
    apart.check_no_page_leaks()


@settings(max_examples=tries(40), deadline=None)
@given(st.data())
def test_states_of_recurrent_layers_go_along(data: st.DataObject) -> None:
    model = model_of(data.draw(recurrent_models()))
    chosen = {"cache": {"prefix": data.draw(st.sampled_from(["off", "radix"]))}, "page_size": 4}
    asked = drawn_requests(data.draw, f"{data.draw(st.integers(0, 99))}-")
    apart = engines_apart(model, data.draw(st.booleans()), {"pages": data.draw(st.sampled_from([12, 40]))}, **chosen)
    Oracle(apart.prefill)
    Oracle(apart.decode)
    found = apart.run(asked, data.draw(st.integers(0, 2)))
    assert found == finals(runner_of(model, **chosen), asked)
    apart.check_no_page_leaks()
