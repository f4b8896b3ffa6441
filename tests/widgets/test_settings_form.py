"""Every setting of a schema has a control, and what the controls say is what was said to them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

import ipywidgets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from tests.helpers.widgets import controls, inside
from tests.measure import experiments
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.settings import field_comments
from workbench.widgets.playground.settings import EXCLUDED_SETTINGS, setting_suggestions
from workbench.widgets.settings_form.fields import to_yaml_line
from workbench.widgets.settings_form.form import FieldGroup, SettingsForm, sentence_about

BESIDES = {"question": "q", "workload": {"kind": "prompts", "prompts": ["a"]}}


@pytest.fixture(scope="module")
def form() -> SettingsForm:
    return SettingsForm(Experiment, EXCLUDED_SETTINGS, setting_suggestions())


def schema_leaves(node: dict[str, Any], defs: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The same paths by another way: pydantic's JSON schema."""
    node = defs[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    kinds = [each for each in node.get("anyOf", ()) if each.get("type") != "null"]
    if "oneOf" in node:
        yield ()
        for each in node["oneOf"]:
            inner = defs[each["$ref"].rpartition("/")[2]]
            label = inner["properties"]["kind"]["const"]
            yield from ((label, *path) for path in schema_leaves(inner, defs) if path)
    elif len(kinds) == 1:
        yield from schema_leaves(kinds[0], defs)
    elif "properties" in node:
        for name, each in node["properties"].items():
            if "const" not in each:
                yield from ((name, *path) for path in schema_leaves(each, defs))
    else:
        yield ()


def test_every_leaf_of_the_schema_that_one_played_request_has_is_a_control(form: SettingsForm) -> None:
    schema = Experiment.model_json_schema()
    paths = {".".join(path) for path in schema_leaves(schema, schema["$defs"])}
    left = tuple(each.replace(":", ".") for each in EXCLUDED_SETTINGS)
    wanted = {path for path in paths if not any(path == each or path.startswith(f"{each}.") for each in left)}
    assert set(form.field_paths()) == wanted and len(wanted) > 100
    assert len(form.field_paths()) == len(wanted)


more = st.fixed_dictionaries(
    {},
    optional={
        "speculate": st.sampled_from(["none", "prompt_lookup", {"kind": "draft", "backend": "eager"}]),
        "compile": st.sampled_from(["block", "step"]),
        "executor": st.sampled_from([{"kind": "real"}, {"kind": "uncached", "oracle": True}]),
    },
)
caches = st.fixed_dictionaries(
    {"format": st.sampled_from(["dense", "int8", "int4"])},
    optional={
        "keys": st.none() | st.just("fp8"),
        "quant_group": st.sampled_from([8, 64]),
        "layers": st.dictionaries(st.integers(0, 9), st.just({"format": "int8"}), max_size=2),
        "evict": st.none() | st.just({"kind": "snapkv", "budget": 99}) | st.just({"kind": "window", "ratio": 0.5}),
    },
)
schedules = st.fixed_dictionaries(
    {"policy": st.sampled_from(["fcfs", "mine.py:policy", {"kind": "priority", "starvation_limit": 3}])},
    optional={"chunk_tokens": st.none() | st.just(7), "preemption_mode": st.sampled_from(["auto", "recompute"])},
)


@settings(max_examples=tries(40))
@given(experiments.values, more, caches, schedules)
def test_from_settings_to_controls_and_back_is_equal(
    form: SettingsForm, values: dict, more: dict, cache: dict, schedule: dict
) -> None:
    cache, schedule = {**values.get("cache", {}), **cache}, {**values.get("schedule", {}), **schedule}
    if more.get("speculate", "none") != "none":
        cache.pop("evict", None)  # which exclude each other
    whole = Experiment.from_values({**values, **more, "cache": cache, "schedule": schedule})
    form.write(whole.model_dump(mode="json"))
    besides = whole.model_dump(mode="json", include={"question", "workload", "measure"})
    assert form.validated(besides) == whole


class Inner(BaseModel):
    """A group."""

    kind: Literal["inner"] = "inner"
    # from zero
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    names: tuple[str, ...] = ()  # who


class Other(BaseModel):
    kind: Literal["other"] = "other"


class Outer(BaseModel):
    count: Annotated[int, Field(ge=2, lt=9, multiple_of=2)] = 4
    word: str | None = Field(default=None, description="said by the field itself")
    part: Annotated[Inner | Other, Field(discriminator="kind")] = Inner()
    size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    switch: bool | Literal["never"] = False


def control(form: SettingsForm, name: str) -> Any:
    """The control called so, wherever it is now."""
    panels = (panel.widget for panel in form.panels.values())
    return next(found[name] for found in map(controls, panels) if name in found)


def test_types_have_controls_of_their_own_with_their_limits() -> None:
    form = SettingsForm(Outer)
    count, share = control(form, "count"), control(form, "share")
    assert isinstance(count, ipywidgets.BoundedIntText) and (count.min, count.max, count.step) == (2, 8, 2)
    assert isinstance(share, ipywidgets.FloatSlider) and (share.min, share.max, share.value) == (0, 1, 0.5)
    assert isinstance(control(form, "word"), ipywidgets.Checkbox)
    assert isinstance(control(form, "part"), ipywidgets.Dropdown)
    assert [label for label, _ in control(form, "switch").options] == ["false", "true", "never"]
    assert [label for label, _ in control(form, "size").options] == ["not set", "auto", "a number"]


def test_what_the_source_says_of_a_field_is_its_tooltip() -> None:
    assert field_comments(Inner) == {"share": "from zero", "names": "who"}
    assert field_comments(Outer) == {"word": "said by the field itself"}
    form = SettingsForm(Outer)
    assert control(form, "share").tooltip == "from zero"
    assert control(form, "word").tooltip == "said by the field itself"


def test_a_change_by_hand_is_reported_once_and_read() -> None:
    changes: list[dict] = []
    form = SettingsForm(Outer, on_change=lambda: changes.append(form.values))
    control(form, "word").value = True
    control(form, "part").value = 1
    control(form, "size").value = 2
    assert len(changes) == 3
    assert changes[-1] == {"count": 4, "word": "", "part": {"kind": "other"}, "size": 1, "switch": False}
    form.write({"part": {"kind": "inner", "share": 0.25, "names": ["a, b", "c"]}})
    assert len(changes) == 4 and changes[-1]["part"]["names"] == ["a, b", "c"] and changes[-1]["size"] == 1


def test_what_is_wrong_is_said_at_its_control_in_one_line() -> None:
    form = SettingsForm(Outer)
    control(form, "share").value = 0
    form.buttons.value = "part"
    assert form.validated({}) is None
    (line,) = (each.value for each in shown_alerts(form))
    assert 'role="alert"' in line and "part.share: Input should be greater than 0" in line
    boxes = (each.children for each in inside(form.widget) if hasattr(each, "children"))
    pairs = (pair for children in boxes for pair in pairwise(children))
    assert [above.description for above, below in pairs if getattr(below, "value", "") == line] == ["share"]
    control(form, "share").value = 0.5
    control(form, "names").value = "a: ["
    assert form.validated({}) is None and "part.names: not YAML" in next(shown_alerts(form)).value
    control(form, "names").value = "a, 'b <b>'"
    assert form.validated({}) == Outer(part=Inner(names=("a", "b <b>"))) and not list(shown_alerts(form))


def shown_alerts(form: SettingsForm) -> Iterator[Any]:
    return (each for each in inside(form.widget) if isinstance(each, ipywidgets.HTML) and "alert" in each.value)


def test_what_is_wrong_out_of_sight_is_said_above() -> None:
    form = SettingsForm(Experiment, EXCLUDED_SETTINGS)
    form.write({"sampling": {"beams": 2, "stop": ["x"]}})
    form.buttons.value = "cache"
    assert form.validated(BESIDES) is None
    assert "beam search ends texts at tokens" in next(shown_alerts(form)).value


def test_a_value_without_a_control_is_refused_in_words() -> None:
    with pytest.raises(WorkbenchError, match="executor: there is no control for"):
        SettingsForm(Experiment, EXCLUDED_SETTINGS).write({"executor": {"kind": "simulated", "gpus": 2}})


plain = st.recursive(
    experiments.words.filter(lambda word: "\ud800" not in word) | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(experiments.names, inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(plain, max_size=3))
def test_a_list_is_written_on_one_line_and_read_back(value: list) -> None:
    from workbench.files import read_yaml

    assert "\n" not in to_yaml_line(value) and read_yaml(to_yaml_line(value)) == value


def test_every_setting_has_a_tip_at_any_level(form: SettingsForm) -> None:
    list(form.field_paths())  # builds the settings of every option
    without: list[str] = []

    def look(field: Any, path: str) -> None:
        if isinstance(field, FieldGroup):
            for name, each in field.fields.items():
                look(each, f"{path}.{name}")
            return
        control = getattr(field, "_check", getattr(field, "_list", field.widget))
        without.extend([] if control.tooltip else [path])
        inner = [getattr(field, "_inner", None), *getattr(field, "_made", {}).values()]
        for each in inner:
            if each is not None:
                look(each, path)

    look(form.group, "")
    assert not [path for path in without if path.count(".") > 1]


def test_a_setting_is_explained_by_the_sentence_that_names_it() -> None:
    about = "Swap pages out to `path`. At most `bytes` are written: `bytes` of 0 is none. `ttl` ends it."
    assert sentence_about("bytes", about) == "At most `bytes` are written:"
    assert sentence_about("ttl", about) == "`ttl` ends it." and sentence_about("kind", about) == ""
