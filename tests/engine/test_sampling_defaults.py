"""The sampling of generation_config.json holds where a request does not say, in the library and in the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.engine.load import load
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.errors import WorkbenchError
from workbench.model.hf.generation import GENERATION_FILE, read_sampling_defaults
from workbench.request import SamplingParameters
from workbench.sampling.filters import build_filters
from workbench.serve.call import Call
from workbench.serve.served_model import ServedModel


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "bos_token_id": 1},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"repetition_penalty": 1.05, "min_p": None, "temperature": 1.0}, {"repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"eos_token_id": 3}, {}),
        ({"top_k": -1, "temperature": 1}, {}),
    ],
)  # fmt: skip
def test_what_is_read(tmp_path: Path, values: dict[str, Any], found: dict[str, Any]) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    (tmp_path / GENERATION_FILE).write_text(json.dumps(values))
    assert read_sampling_defaults(tmp_path) == found


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 7), ("do_sample", "false"), ("do_sample", 0), ("top_k", True), ("temperature", "1")]
)
def test_a_wrong_value_is_named(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / GENERATION_FILE).write_text(json.dumps({name: value}))
    with pytest.raises(WorkbenchError, match=f"{GENERATION_FILE}.*{name}"):
        read_sampling_defaults(tmp_path)


def test_they_hold_where_a_request_does_not_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in BUNDLED_MODELS["demo"].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / GENERATION_FILE).write_text('{"temperature": 0.5, "top_k": 7}')
    runner = load(str(tmp_path), backend="eager")
    made = lambda **values: runner.make_requests("a", values)[0].sampling  # noqa: E731 (short)
    assert (made().temperature, made().top_k) == (0.5, 7)
    assert (made(temperature=0).temperature, made(top_k=0).top_k, made(beams=2).top_k) == (0, 0, 0)
    served = ServedModel("m", runner)
    assert "temperature 0.5, top_k 7" in caplog.text
    call = Call("c", "openai.completions", "m", ("a",), SamplingParameters(max_tokens=1, top_k=0))
    (prepared,) = served.prepare(call)
    found = prepared.request.sampling
    assert (found.temperature, found.top_k) == (0.5, 0)
    assert call.notes["sampling_defaults"] == {"of": GENERATION_FILE, "temperature": 0.5}
    served.thread.close()


def test_top_p_of_zero_keeps_the_likeliest_alone() -> None:
    import torch

    logits = torch.tensor([[0.1, 2.0, 0.3], [0.0, 0.0, 1e-6]])
    for each in build_filters(SamplingParameters(top_p=0.0)):
        logits = each(logits, ())
    assert (logits.softmax(-1).max(-1).values == 1).all() and logits.argmax(-1).tolist() == [1, 2]
