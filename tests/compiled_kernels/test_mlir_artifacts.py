"""Compiled code on disk: found again, never believed when damaged, safe under several processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compiled_kernels import BackendError
from compiled_kernels.mlir import Kernel, compile, compile_text
from compiled_kernels.mlir.artifacts import ArtifactCache, key_of
from compiled_kernels.mlir.execute import JITCode, SharedObject

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_mlir") is None,
    reason="torch-mlir is not installed: pip install torch-mlir",
)
TEXT = """
func.func @scale(%a: memref<16xf32>, %b: memref<16xf32>) {
  %zero = arith.constant 0 : index
  %none = arith.constant 0.0 : f32
  %factor = arith.constant dense<FACTOR> : vector<16xf32>
  %x = vector.transfer_read %a[%zero], %none {in_bounds = [true]} : memref<16xf32>, vector<16xf32>
  %y = arith.mulf %x, %factor : vector<16xf32>
  vector.transfer_write %y, %b[%zero] {in_bounds = [true]} : vector<16xf32>, memref<16xf32>
  return
}
func.func @negate(%a: memref<16xf32>) {
  %zero = arith.constant 0 : index
  %none = arith.constant 0.0 : f32
  %x = vector.transfer_read %a[%zero], %none {in_bounds = [true]} : memref<16xf32>, vector<16xf32>
  %y = arith.negf %x : vector<16xf32>
  vector.transfer_write %y, %a[%zero] {in_bounds = [true]} : vector<16xf32>, memref<16xf32>
  return
}
"""


def compiled(directory: Path, factor: float = 3.0) -> Kernel:
    """As another process would: nothing is remembered."""
    compile._compiled.cache_clear()
    return compile_text(TEXT.replace("FACTOR", str(factor)), "scale", directory=directory)


def scales_by(kernel: Kernel, factor: float) -> bool:
    a, b = torch.randn(16), torch.full((16,), torch.nan)
    kernel.function(2)(a.data_ptr(), b.data_ptr())
    return torch.equal(b, a * factor)


def test_functions_of_a_module_run_on_the_tensors_own_memory(tmp_path: Path) -> None:
    kernel = compiled(tmp_path)
    assert scales_by(kernel, 3.0)
    a = torch.ones(16)
    kernel.function(1, "negate")(a.data_ptr())
    assert (a == -1).all()


def test_a_second_process_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(tmp_path)
    monkeypatch.setattr(compile, "run_passes", None)
    again = compiled(tmp_path)
    assert again.digest == first.digest and scales_by(again, 3.0)
    assert again.stages["vector"] == first.stages["vector"]
    with pytest.raises(TypeError):
        compiled(tmp_path, 4.0)  # other content is another entry


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def garble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("kind", ["entry", "library", "stages"])
@pytest.mark.parametrize("damage", [truncate, garble, empty, Path.unlink])
def test_damage_is_seen_and_mended(tmp_path: Path, damage: Callable[[Path], None], kind: str) -> None:
    whole = compiled(tmp_path)
    paths = ArtifactCache(tmp_path).load(whole.digest)
    assert paths is not None
    # dlopen knows a file by its inode: what this process mapped stays, what it reads is another file of the same name.
    file = paths[kind] if kind in paths else tmp_path / f"{whole.digest}.json"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    damage(file)
    assert ArtifactCache(tmp_path).load(whole.digest) is None
    assert scales_by(compiled(tmp_path), 3.0)
    mended = ArtifactCache(tmp_path).load(whole.digest)
    assert mended is not None and mended.keys() == paths.keys()


def test_the_wrong_code_under_a_right_name_is_not_run(tmp_path: Path) -> None:
    three, five = compiled(tmp_path), compiled(tmp_path, 5.0)
    assert three.library is not None and five.library is not None
    content = five.library.read_bytes()
    three.library.unlink()
    three.library.write_bytes(content)
    assert scales_by(compiled(tmp_path), 3.0)


def test_a_name_that_leads_nowhere_is_not_followed(tmp_path: Path) -> None:
    artifacts = ArtifactCache(tmp_path)
    assert artifacts.key_of_recipe(key_of(some="recipe")) is None
    artifacts.link_recipe("recipe", "../../etc/passwd")
    assert artifacts.key_of_recipe("recipe") is None


def test_processes_that_build_the_same_at_once_all_get_it(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; sys.path.insert(0, '.')\n"
        "from tests.compiled_kernels.test_mlir_artifacts import compiled, scales_by\n"
        f"for factor in (3.0, 5.0, 7.0): assert scales_by(compiled(pathlib.Path({str(tmp_path)!r}), factor), factor)\n"
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
        kernel = compiled(tmp_path)
        assert isinstance(kernel.code, JITCode) and kernel.library is None
        assert scales_by(kernel, 3.0)
    assert "asm" not in kernel.stages and kernel.address


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.warns(UserWarning, match="compiled code is not kept on disk"):
        kernel = compiled(tmp_path / "file")
    assert scales_by(kernel, 3.0)


def test_a_recipe_leads_only_to_what_was_compiled_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named() -> int:
        compile.compile_function(torch.exp, (torch.ones(4),), "exp", recipe={"f": "exp"}, directory=tmp_path)
        return len(list(tmp_path.glob("*.name")))

    assert named() == 1
    monkeypatch.setattr(compile, "OPT_LEVEL", 1)
    assert named() == 2
    monkeypatch.setattr(compile, "linker", lambda: None)
    assert named() == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("func.func @f() { bad }", "custom op 'bad' is unknown"),
        ("func.func @f() { return", "expected"),
        ("func.func @f(%a: memref<?xf32>) { return }", "mlir:"),
    ],
)
def test_text_that_does_not_compile_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        compile_text(text, "f", directory=tmp_path)
    assert "\n" not in str(caught.value)


def test_an_entry_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no function 'missing'"):
        compile_text(TEXT.replace("FACTOR", "2.0"), "missing", directory=tmp_path).address  # noqa: B018
    assert isinstance(compiled(tmp_path).code, SharedObject)
