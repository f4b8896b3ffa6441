"""An experiment is one value: YAML in, YAML out, equal; whatever is wrong in it is named by its path."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.helpers.refusals import refuses
from tests.measure.experiments import finite, values, words
from workbench.errors import WorkbenchError
from workbench.experiment import yaml as yaml_text
from workbench.experiment.experiment import Experiment
from workbench.files import read_yaml

SMALL = """
question: why?
sampling: {temperature: 0.5, seed: 3}
workload: {kind: prompts, prompts: ["a", "b"]}
"""


@given(values)
def test_yaml_out_and_in_is_equal(given_values: dict) -> None:
    experiment = Experiment.from_values(given_values)
    again = Experiment.from_yaml(experiment.to_yaml())
    assert again == experiment
    assert again.to_yaml() == experiment.to_yaml()


@given(values)
def test_what_a_person_writes_as_yaml_means_the_same(given_values: dict) -> None:
    assert Experiment.from_yaml(yaml_text.write_yaml(given_values)) == Experiment.from_values(given_values)


def test_a_prompt_of_several_lines_is_written_as_it_looks() -> None:
    workload = {"kind": "prompts", "prompts": ["def f():\n    pass\n"]}
    text = Experiment.from_values({"question": "q", "workload": workload}).to_yaml()
    assert "  - |\n    def f():\n        pass\n" in text


def test_the_value_is_frozen() -> None:
    experiment = Experiment.from_yaml(SMALL)
    for part, name in ((experiment, "backend"), (experiment.sampling, "seed"), (experiment.workload, "copies")):
        with pytest.raises(ValidationError):
            setattr(part, name, 1)


@pytest.mark.parametrize(
    ("override", "reached"),
    [
        ("sampling.seed=9", lambda e: e.sampling.seed == 9),
        ("sampling.temperature=1e-1", lambda e: e.sampling.temperature == 0.1),
        ("backend=eager", lambda e: e.backend == "eager"),
        ("model.name=a=b", lambda e: e.model.name == "a=b"),
        ("measure.threads=2", lambda e: e.measure.threads == 2),
        ('workload.prompts=["x: y", z]', lambda e: e.workload.prompts == ("x: y", "z")),
        ("workload={kind: random, requests: 2}", lambda e: e.workload.requests == 2),
        ("sampling.logit_bias.7=-1.5", lambda e: e.sampling.logit_bias == {7: -1.5}),
        ("question=[a, why?", lambda e: e.question == "[a, why?"),  # not YAML, so a text
        ("question=2026-99-99", lambda e: e.question == "2026-99-99"),  # a date that YAML fails to read
    ],
)
def test_overrides(override: str, reached) -> None:
    changed = Experiment.from_yaml(SMALL, (override,))
    assert reached(changed)
    assert changed != Experiment.from_yaml(SMALL)
    assert Experiment.from_yaml(SMALL).with_(override) == changed


def test_the_last_override_wins() -> None:
    assert Experiment.from_yaml(SMALL, ("sampling.seed=1", "sampling.seed=2")).sampling.seed == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("schedul.max_num_seqs=1", "schedul: unknown key; did you mean 'schedule'?"),
        ("workload.promts=[a]", "workload.promts: unknown key; did you mean 'prompts'?"),
        ("sampling.temprature=1", "sampling.temprature: unknown key; did you mean 'temperature'?"),
        ("sampling.filters=[{paht: x}]", "sampling.filters.0.paht: unknown key; did you mean 'path'?"),
        ("workload.kind=promts", "workload.kind: 'promts' is unknown; did you mean 'prompts'?"),
        ("workload={prompts: [a]}", "workload.kind: is missing; known: prompts, random"),
        ("workload.kind=json:dumps", "workload.kind: 'json:dumps' is no workload: its class must be derived from"),
        ("workload.kind=own.py:A", "workload.kind: own.py:A: there is no file own.py"),
        ("workload=3", "workload: must be a group of settings"),
        ("model=3", "model: must be a group of settings (activations, context, custom, device, dtype, expert_weights,"),
        ("model.activations=int4", "model.activations: Input should be 'float' or 'int8' (given 'int4')"),
        ("workload.prompts=[]", "workload.prompts: "),
        ("workload.prompts=a", "workload.prompts: "),
        ("workload.copies=-1", "workload.copies: Input should be greater than or equal to 1 (given -1)"),
        ("workload.copies=many", "workload.copies: Input should be a valid integer"),
        ("measure.warmup=-1", "measure.warmup: "),
        ("measure.warmup=1.5", "measure.warmup: "),
        ("measure.threads=0", "measure.threads: "),
        ("measure.threads=10000000", "measure.threads: "),
        ("cache.pages=0", "cache.pages: "),
        ("cache.page_size=-4", "cache.page_size: "),
        ("cache.prefix.kind=radx", "cache.prefix.kind: 'radx' is unknown; did you mean 'radix'?"),
        ("cache.prefix={kind: radix, tll: 3}", "tll: unknown key; did you mean 'ttl'?"),
        ("cache.prefix={kind: radix, ttl: 0}", "ttl: Input should be greater than 0 (given 0)"),
        ("cache.offload=disk", "cache.offload.kind: 'disk' is unknown"),
        ("cache.offload={kind: file}", "cache.offload.path: Field required"),
        ("sampling.n=0", "sampling.n: "),
        ("schedule.max_num_batched_tokens=0", "schedule.max_num_batched_tokens: "),
        ("schedule.overflow=wrap", "schedule.overflow: Input should be 'refuse' or 'cut_oldest' (given 'wrap')"),
        ("model.dtype=fp16", "model.dtype: Input should be 'auto', 'float32'"),
        ("sampling.temperature=.nan", "sampling.temperature: "),
        ("sampling.temperature=.inf", "sampling.temperature: must be a finite number (given inf)"),
        ("sampling.temperature=-1", "sampling.temperature: "),
        ("sampling.max_tokens=-3", "sampling.max_tokens: "),
        ("question=[a]", "question: Input should be a valid string"),
        ("sampling.seed=", "sampling.seed: Input should be a valid integer (given None)"),
        ("sampling", "--set sampling: write it as path=value, for example --set sampling.seed=7"),
        ("=3", "write it as path=value"),
        ("question.x=1", "--set question.x=1: question is a value, not a group of settings"),
        ("workload.prompts.0=x", "prompts is a value, not a group of settings"),
    ],
)
def test_a_mistake_is_named_by_its_path(override: str, expected: str) -> None:
    with pytest.raises(WorkbenchError) as caught:
        Experiment.from_yaml(SMALL, (override,), "my.yaml")
    assert expected in str(caught.value)
    assert override.startswith("--set") or "--set" in str(caught.value) or str(caught.value).startswith("my.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("cache.prefix=off", {"kind": "off"}),
        ("cache.prefix.kind=off", {"kind": "off"}),  # which YAML reads as False
        ("cache.prefix=radix", {"kind": "radix", "ttl": None, "pinned_share": 0.5, "tenant_pinned_share": 0.5}),
        (
            "cache.prefix={kind: radix, ttl: 60}",
            {"kind": "radix", "ttl": 60.0, "pinned_share": 0.5, "tenant_pinned_share": 0.5},
        ),
        ("cache.offload=none", {"kind": "none"}),
        ("cache.offload=memory", {"kind": "memory", "bytes": 2**30}),
        ("cache.offload={kind: file, path: p, bytes: 9}", {"kind": "file", "path": "p", "bytes": 9}),
    ],
)
def test_a_kind_alone_is_enough(override: str, kept: dict) -> None:
    experiment = Experiment.from_yaml(SMALL, (override,))
    part = override.split("=")[0].split(".")[1]
    assert getattr(experiment.cache, part).model_dump() == kept
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment


def test_ten_thousand_stops_are_refused_in_one_line() -> None:
    with pytest.raises(WorkbenchError, match="sampling.stop: at most 64 stop strings, 10000 were given") as caught:
        Experiment.from_values({"question": "q", "workload": {"kind": "random"}, "sampling": {"stop": ["x"] * 10_000}})
    assert len(str(caught.value)) < 300


EVICTING = "question: q\nworkload: {kind: random}\ncache: {evict: {kind: window, budget: 128}}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("question: [", "my.yaml: not YAML: "),
        ("question: 2026-99-99", "my.yaml: not YAML: month must be in"),
        ("[" * 5000, "my.yaml: YAML nested more than 64 deep; write it flatter (line 1, column 66)"),
        ("question: " + "9" * 5000, "my.yaml: a number of more than 100 digits; write a smaller one"),
        ("question: !!python/object/apply:os.getcwd []", "my.yaml: not YAML: could not determine a constructor"),
        ("", "my.yaml: must be a mapping"),
        ("- a", "my.yaml: must be a mapping with `question` and `workload`, not list"),
        ("question: why?", "my.yaml: workload: Field required"),
        ("1: 2\nquestion: q\nworkload: {kind: random}", "my.yaml: 1: "),
        ("question: &a [*a]\nworkload: {kind: random}", "my.yaml: the alias *a is inside the value that it repeats"),
        (f"batch_invariant: true\n{EVICTING}", "my.yaml: batch_invariant: not with cache.evict: the tokens that"),
        (f"speculate: prompt_lookup\n{EVICTING}", "my.yaml: speculate: not with cache.evict: a policy may weigh"),
    ],
)
def test_what_is_no_experiment_is_refused(text: str, expected: str) -> None:
    refuses(f"^{re.escape(expected)}", Experiment.from_yaml, text, where="my.yaml")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_bytes(b"question: why?\n\xff\xfe\x00")
    refuses("my.yaml: not YAML: line 2 is not UTF-8; save it as UTF-8", Experiment.from_file, tmp_path / "my.yaml")


@pytest.mark.parametrize("make", [lambda p: None, Path.mkdir])
def test_a_file_that_cannot_be_read(tmp_path: Path, make) -> None:
    path = tmp_path / "my.yaml"
    make(path)
    refuses("my.yaml: cannot read the experiment .*; pass a YAML file", Experiment.from_file, path)


def test_a_file_is_named_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(SMALL + "schedul: {}\n")
    refuses("my.yaml: schedul: unknown key", Experiment.from_file, path)


plain = finite | words | st.booleans() | st.none() | st.integers()


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(words, inner)))
def test_plain_values_survive_yaml(value: object) -> None:
    assert read_yaml(yaml_text.write_yaml(value)) == value


def test_nan_is_no_number_that_survives() -> None:
    assert math.isnan(read_yaml(yaml_text.write_yaml(math.nan)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name: demo}\ncache:\n  format: int8\n  page_size: 64\n  format: int4\n",
         "cache.format is given twice, in lines 3 and 5"),
        ("model: {name: demo, dtype: float32, name: demo-draft}\n", "model.name is given twice, in lines 1 and 1"),
        ("variants:\n  a: {}\n  b: {}\n  a: {}\n", "variants.a is given twice, in lines 2 and 4"),
        ("- {a: 1}\n- {b: 1, b: 2}\n", "1.b is given twice, in lines 2 and 2"),
    ],
)  # fmt: skip
def test_a_key_that_stands_twice_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_yaml(text)


def test_keys_of_one_name_in_different_places_and_aliases_are_fine() -> None:
    assert read_yaml("a: &x {b: 1}\nc: {b: 2, a: *x}\n1: 3\n'1': 4\n") == {
        "a": {"b": 1}, "c": {"b": 2, "a": {"b": 1}}, 1: 3, "1": 4,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["", "a b", "1st", "\ud800"])
def test_arguments_have_names_as_in_python(name: str) -> None:
    judge = {"path": "a:b", "arguments": {name: 1}}
    refuses("names as in Python", Experiment.from_values, {**read_yaml(SMALL), "judge": judge})
