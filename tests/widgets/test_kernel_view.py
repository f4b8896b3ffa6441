"""An operator's stages as they are seen: what was fused is marked, what cannot be made says why."""

from __future__ import annotations

import re
import threading
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.patience import limit
from tests.widgets.canned import is_golden
from workbench.widgets import KernelView
from workbench.widgets.kernels import data as kernel_stages
from workbench.widgets.kernels import view as kernel_view
from workbench.widgets.kernels.data import LANGUAGES, highlight_lines
from workbench.widgets.kernels.fusion import mark_fusion, summarize_fusion
from workbench.widgets.kernels.picture import KernelPage, draw_kernel
from workbench.widgets.kernels.timing import time_backends

OPERATOR = "add_rms_norm"


class Text(HTMLParser):
    def __init__(self, markup: str):
        super().__init__()
        self.text, self.keys = "", []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.keys += [value for name, value in attrs if name == "data-key"]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def view() -> KernelView:
    return KernelView(OPERATOR).make("mlir")


@pytest.fixture(scope="module")
def inductor() -> KernelView:
    """One compilation for all that is asked of it."""
    return KernelView(OPERATOR, backend="inductor", stage="post_grad")


@example('x = "<i>&amp;" # </b>', "source")
@given(st.text(max_size=60), st.sampled_from([*LANGUAGES, "fusion"]))
def test_code_is_what_it_was_line_by_line(text: str, stage: str) -> None:
    text = text.replace("\r", "")  # a lexer reads it as an end of line
    lines = highlight_lines(text, stage)
    assert len(lines) == text.count("\n") + 1
    assert "\n".join(Text(line).text for line in lines) == text


def test_the_specification_is_there_at_once_and_lanes_are_made_when_they_are_chosen(view: KernelView) -> None:
    fresh = KernelView(OPERATOR)
    assert "def add_rms_norm_reference(x: Tensor" in fresh.text and fresh.stage == "source"
    found = Text(fresh.picture())
    assert "eager/source" in found.keys and not any(key.startswith(("inductor/", "mlir/")) for key in found.keys)
    fresh.shown.picked = "eager/api"
    fresh.backend = "mlir"
    assert fresh.wait() and fresh.stage == "linalg" and "linalg.generic" in fresh.text
    fresh.close()


def test_every_operation_of_the_graph_is_in_a_kernel(inductor: KernelView) -> None:
    made = inductor._of("inductor")
    fusion, texts = kernel_stages.fusion_data(made) or {}, inductor._texts("inductor")
    letters = {group.letter for group in mark_fusion("inductor", "post_grad", inductor.text, fusion).groups}
    for stage in ("decomposed", "post_grad"):
        found = mark_fusion("inductor", stage, texts[stage], fusion)
        for number, line in enumerate(texts[stage].split("\n")):
            assert bool(found.letters_of_line(number)) == ("torch.ops." in line)
            assert set(found.letters_of_line(number)) <= letters
    assert len(letters) == sum(len(kernel["fused"]) for kernel in fusion["kernels"])
    for stage, most in (
        ("graph", letters),
        ("ir", letters),
        ("fused_ir", letters),
        ("cpp", letters),
        ("python", letters),
    ):
        found = mark_fusion("inductor", stage, texts[stage], fusion, texts["post_grad"])
        assert set("".join((found.letters or {}).values())) == most, stage


def test_nodes_and_loops_are_marked_by_what_the_scheduler_made_of_them(inductor: KernelView) -> None:
    fusion, texts = kernel_stages.fusion_data(inductor._of("inductor")) or {}, inductor._texts("inductor")
    (kernel,) = fusion["kernels"]
    home = {part: "AB"[n] for n, parts in enumerate(kernel["fused"]) for part in parts}
    lines, found = texts["ir"].split("\n"), mark_fusion("inductor", "ir", texts["ir"], fusion)
    for number, line in enumerate(lines):
        if node := re.match(r"(?:class )?(op\d+)", line):
            assert found.letters_of_line(number) == home[node.group(1)]
    cpp = mark_fusion("inductor", "cpp", texts["cpp"], fusion)
    loops = [cpp.letters_of_line(n) for n, line in enumerate(texts["cpp"].split("\n")) if "for(int64_t" in line]
    assert loops == ["A", "B"]
    assert summarize_fusion("inductor", texts, fusion).endswith("2 loop nests → 1 kernel")


def test_loops_of_mlir_are_marked_to_their_ends(view: KernelView) -> None:
    texts = view._texts("mlir")
    for stage, begin in (("linalg", "linalg.generic"), ("bufferized", "scf.for")):
        found = mark_fusion("mlir", stage, texts[stage])
        lines = texts[stage].split("\n")
        begun = [n for n, line in enumerate(lines) if begin in line]
        assert [found.letters_of_line(n) for n in begun] == [group.letter for group in found.groups]
        assert all("}" in lines[n] for n in found.letters or {} if not found.letters_of_line(n + 1))
        assert not any("return" in lines[n] for n in found.letters or {})
    assert "arith.addf" in mark_fusion("mlir", "linalg", texts["linalg"]).groups[0].description
    assert summarize_fusion("mlir", texts, None).endswith("3 loop nests → 1 function")


def test_the_picture_holds_every_stage_its_size_and_the_text(view: KernelView) -> None:
    view.backend, view.stage = "mlir", "transformed"
    found = Text(view.picture())
    assert [key for key in found.keys if key.startswith("mlir/")] == [f"mlir/{name}" for name in view._texts("mlir")]
    for line in view.text.split("\n")[:20]:
        assert line in found.text
    assert "not made yet" in found.text and view.picture() == view._repr_mimebundle_()["text/html"]


def test_a_backend_that_cannot_make_it_says_why_and_the_others_go_on() -> None:
    lacking = KernelView("top_logprobs", backends=("eager", "mlir")).make()
    assert "cannot be made here" in Text(lacking.picture()).text and lacking.text
    lacking.backend = "mlir"
    assert lacking.wait() and lacking.text == "" and "cannot be made here" in lacking.picture()


def test_a_timing_is_stopped_and_says_so() -> None:
    view = KernelView("rotary", backends=("eager",))
    assert "being timed" in view.measure().picture()
    view.stop()
    assert view.wait() and 'role="alert">the timing was stopped' in view.picture()
    view.close()


def test_backends_are_timed_apart_from_what_this_process_does() -> None:
    """Compares which figures there are, not their values."""
    job = {"operator": OPERATOR, "case": "1x1 float32", "backends": ["eager"], "seconds": 0.01}
    record = time_backends({**job, "ceilings": False})
    (row,) = record["rows"]
    assert row["p10_seconds"] <= row["seconds"] <= row["p90_seconds"] and row["speedup_over_eager"] == 1
    assert record["environment"]["cpu"] and record["date"]


def test_times_stand_beside_with_what_they_are_measured_by() -> None:
    ok = {"seconds": 2e-6, "p10_seconds": 1e-6, "p90_seconds": 3e-6, "speedup_over_eager": 2.5, "bound": "read"}
    rows = ({"backend": "mlir", **ok, "share_of_ceiling": 0.5}, {"backend": "triton", "reason": "no <GPU>"})
    shown = KernelPage(
        "a <b>", "eager", "source", "x < 1", mark_fusion("eager", "source", ""), {"eager": {"source": 1}}, rows=rows
    )
    assert is_golden("kernel", draw_kernel(shown))


def test_another_operator_has_cases_of_its_own(view: KernelView) -> None:
    other = KernelView(OPERATOR, backends=("eager",))
    other.operator = "gated_silu"
    assert other.wait() and other.case in kernel_stages.case_names("gated_silu") and "gate_up" in other.text
    other.close()


def test_the_specification_waits_for_no_compilation_of_this_view_or_another() -> None:
    made: list[KernelView] = []

    def look() -> None:
        view = KernelView("expert_linear", backends=("mlir", "eager"), backend="mlir")  # which waits
        view.backend = "eager"
        made.extend([KernelView(OPERATOR, backend="eager", stage="api"), view.make("eager")])

    with kernel_view._COMPILING:  # another compiles
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(limit(20))
        assert len(made) == 2 and all(view.text for view in made)
        assert "goes on to its end" in made[1].picture()
    for view in made:
        assert view.wait()
        view.close()


def test_stages_are_not_made_after_a_stop_and_an_error_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    view = KernelView(OPERATOR)
    with kernel_view._COMPILING:  # another compiles
        view.backend = "mlir"
        view.stop()
    assert view.wait() and view.text == "" and "not made yet" in view.picture()
    monkeypatch.setattr(kernel_stages, "make_stages", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in view.make("mlir").picture()
    view.close()
