"""Compiled code on disk: found again, never believed when damaged, safe under several processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels.builder.target import Target
from compiled_kernels.level import Level
from compiled_kernels.masks import AndMask, Causal
from compiled_kernels.mlir import artifacts, compile, compile_text
from compiled_kernels.mlir.artifacts import ArtifactCache, key_of
from compiled_kernels.mlir.compile import all_fields
from compiled_kernels.mlir.execute import JITCode, SharedObject
from tests.helpers.kernels import needs_mlir
from tests.helpers.refusals import kernel_refuses
from tests.kernels import small_kernels
from tests.kernels.small_kernels import SCALE, compiled_scale, scales_by

pytestmark = needs_mlir


def test_functions_of_a_module_run_on_the_tensors_own_memory(tmp_path: Path) -> None:
    kernel = compiled_scale(tmp_path)
    assert scales_by(kernel, 3.0) and isinstance(kernel.code, SharedObject)
    a = torch.ones(16)
    kernel.function(1, "negate")(a.data_ptr())
    assert (a == -1).all()


def test_a_change_of_one_kernel_is_cold_for_that_kernel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is the name, not the file that wrote it."""
    built: list[str] = []

    def run_passes(text: str, *rest: Any, **more: Any) -> Any:
        built.append(text)
        return compile_passes(text, *rest, **more)

    compile_passes = compile.run_passes
    monkeypatch.setattr(compile, "run_passes", run_passes)
    for factors in ((3.0, 5.0), (3.0, 7.0)):
        for factor in factors:
            assert scales_by(compiled_scale(tmp_path, factor), factor)
    assert [text.count("<7.0>") for text in built] == [0, 0, 1]


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "passes": lambda patch: patch.setattr(compile, "passes_to_llvm", lambda *_: "canonicalize"),
    "target": lambda patch: patch.setattr(Level, "llvm_cpu", "another"),
    "compilers' versions": lambda patch: patch.setattr(artifacts, "compilers", lambda: {"mlir": "another"}),
    "optimization": lambda patch: patch.setattr(compile, "OPT_LEVEL", 1),
    "linker": lambda patch: patch.setattr(compile, "linker", lambda: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_key_has_all_that_decides_the_code(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the module: with another of these it is compiled anew, and what was kept needs no compiler again."""
    first = compiled_scale(tmp_path)
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        patch.setattr(compile, "run_passes", missed)
        with pytest.raises(LookupError, match="compiled anew"):
            compiled_scale(tmp_path)
    monkeypatch.setattr(small_kernels, "SCALE", None)  # not even the text is written
    again = compiled_scale(tmp_path)
    assert again.digest == first.digest and again.stages["vector"] == first.stages["vector"] and scales_by(again, 3.0)


def missed(*_: Any, **__: Any) -> Any:
    raise LookupError("compiled anew")


@dataclass(frozen=True)
class Shape:
    """A shape whose repr leaves a field out, with one of the package's own."""

    rows: int | float | None
    target: Target
    unseen: str = field(default="", repr=False)


@given(st.data())
def test_shapes_that_differ_have_keys_that_differ(data: st.DataObject) -> None:
    """In any field, also one that the repr of a shape leaves out."""
    numbers = st.none() | st.integers() | st.floats(allow_nan=False)
    shapes = st.builds(Shape, numbers, st.builds(Target, st.sampled_from(Level)), st.text(max_size=2))
    one, other = data.draw(shapes), data.draw(shapes)
    for changed in (other, replace(one, unseen=other.unseen), replace(one, target=other.target)):
        same = key_of(shape=all_fields((one, 1))) == key_of(shape=all_fields((changed, 1)))
        assert same == (repr((one, one.unseen)) == repr((changed, changed.unseen)))


def test_a_shape_of_what_looks_alike_is_refused(tmp_path: Path) -> None:
    """Two masks of one name look alike."""
    with pytest.raises(TypeError, match="another may look the same"):
        compile.compile_shape(str, AndMask(Causal(), lambda query, key: key > 3), entry="f", directory=tmp_path)


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "a bit changed": lambda content: content[:-99] + bytes([content[-99] ^ 1]) + content[-98:],
    "empty": lambda content: b"",
    "gone": lambda content: None,
}


@pytest.mark.parametrize("kind", ["entry", "library", "stages"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen_and_mended(tmp_path: Path, damage: str, kind: str) -> None:
    whole = compiled_scale(tmp_path)
    paths = ArtifactCache(tmp_path).load(whole.digest)
    assert paths is not None
    # dlopen knows a file by its inode: what this process mapped stays, what it reads is another file of the same name.
    file = paths[kind] if kind in paths else tmp_path / f"{whole.digest}.json"
    content = DAMAGES[damage](file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert ArtifactCache(tmp_path).load(whole.digest) is None
    assert scales_by(compiled_scale(tmp_path), 3.0)
    mended = ArtifactCache(tmp_path).load(whole.digest)
    assert mended is not None and mended.keys() == paths.keys()


def test_the_wrong_code_under_a_right_name_is_not_run(tmp_path: Path) -> None:
    three, five = compiled_scale(tmp_path), compiled_scale(tmp_path, 5.0)
    assert three.library is not None and five.library is not None
    content = five.library.read_bytes()
    three.library.unlink()
    three.library.write_bytes(content)
    assert scales_by(compiled_scale(tmp_path), 3.0)


def test_a_name_that_leads_nowhere_is_not_followed(tmp_path: Path) -> None:
    kept = ArtifactCache(tmp_path)
    assert kept.key_of_recipe(key_of(some="recipe")) is None
    kept.link_recipe("recipe", "../../etc/passwd")
    assert kept.key_of_recipe("recipe") is None


@pytest.mark.processes
def test_processes_that_build_the_same_at_once_all_get_it(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; sys.path.insert(0, '.')\n"
        "from tests.kernels.small_kernels import compiled_scale, scales_by\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "for factor in (3.0, 5.0, 7.0): assert scales_by(compiled_scale(folder, factor), factor)\n"
    )
    root = Path(__file__).parents[2]
    running = [subprocess.Popen([sys.executable, "-c", program], cwd=root, stderr=subprocess.PIPE) for _ in range(2)]
    failures = [process.communicate()[1].decode() for process in running if process.wait()]
    assert failures == []
    assert not list(tmp_path.rglob(".new-*"))
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_without_a_linker_the_engine_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "linker", lambda: None)
    for _ in range(2):  # built, then from the entry
        kernel = compiled_scale(tmp_path)
        assert isinstance(kernel.code, JITCode) and kernel.library is None
        assert scales_by(kernel, 3.0)
    assert "asm" not in kernel.stages and kernel.address


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.warns(UserWarning, match="compiled code is not kept on disk"):
        kernel = compiled_scale(tmp_path / "file")
    assert scales_by(kernel, 3.0)


def test_a_recipe_leads_only_to_what_was_compiled_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named() -> int:
        compile.compile_function(torch.exp, (torch.ones(4),), "exp", recipe={"f": "exp"}, directory=tmp_path)
        return len(list(tmp_path.glob("*.name")))

    assert named() == 1
    monkeypatch.setattr(compile, "OPT_LEVEL", 1)
    assert named() == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("func.func @f() { bad }", "custom op 'bad' is unknown"),
        ("func.func @f() { return", "expected"),
        ("func.func @f(%a: memref<?xf32>) { return }", "mlir:"),
        (SCALE.replace("FACTOR", "2.0"), "no function 'f'"),
    ],
)
def test_text_that_does_not_compile_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    kernel_refuses(message, lambda: compile_text(text, "f", directory=tmp_path).address)
