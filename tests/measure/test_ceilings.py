from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels.backends import Backend, backend_problems
from tests.helpers.refusals import refuses
from workbench.machine import ceilings
from workbench.machine import ceilings as measure_ceilings
from workbench.machine.ceilings import (
    CEILINGS_FILE,
    Ceiling,
    MachineCeilings,
    bound_fault,
    ceilings_for,
    measure_gemm_rate,
    measure_read_bandwidth,
    memory_level_of,
    stored_ceilings,
)
from workbench.machine.processor import CpuTimes

SHAPE = (2, 8, 4)
ASKED = {"threads": 1, "gemm_shape": SHAPE}
BEYOND = {"dtypes": ()}


@pytest.fixture
def measured(monkeypatch) -> list[tuple]:
    """Measurements that take no time, and a list of those asked for."""
    asked: list[tuple] = []

    def read(size: int, threads: int, compiled: bool) -> Ceiling:
        asked.append(("read", size, threads, compiled))
        return ceiling("read", size=size, value=float(100 + len(asked)))

    def gemm(dtype: str, shape: tuple[int, int, int], threads: int) -> Ceiling:
        asked.append(("gemm", dtype, shape, threads))
        return ceiling("gemm", dtype=dtype, shape=shape)

    monkeypatch.setattr(ceilings, "measure_read_bandwidth", read)
    monkeypatch.setattr(ceilings, "measure_gemm_rate", gemm)
    return asked


def ceiling(kind: str, value: float = 100.0, size: int = 64, **more) -> Ceiling:
    whole = Ceiling(kind, value, "a second", "by hand", threads=1, repeats=3, seconds=0.5, working_set_bytes=size)
    return replace(whole, **more)


@pytest.mark.parametrize("size", [4, 12, 4096, 100_000])
def test_a_read_ceiling_is_bytes_over_seconds(size):
    threads = torch.get_num_threads()
    found = measure_read_bandwidth(size, threads=1)
    assert (found.kind, found.unit, found.threads, found.working_set_bytes) == ("read", "bytes/s", 1, size)
    assert size - 4096 < found.measured_bytes <= size
    assert found.value == pytest.approx(found.measured_bytes / found.seconds)
    assert found.repeats >= 1
    assert found.level in ("cache", "memory")
    assert torch.get_num_threads() == threads


def test_a_working_set_beyond_need_is_read_in_part_and_says_so(monkeypatch):
    monkeypatch.setattr(measure_ceilings, "MAX_WORKING_SET_BYTES", 2**16)
    monkeypatch.setattr(measure_ceilings, "last_level_cache", lambda: 2**10)
    found = measure_read_bandwidth(2**30)
    assert (found.working_set_bytes, found.measured_bytes, found.level) == (2**30, 2**16, "DRAM")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("count", [1, 3, 1024, 8192])
def test_every_way_of_reading_reads_everything(count, compiled):
    """A change anywhere in the data must be able to change what each way returns."""
    width = min(1024, count)
    data = torch.zeros(count // width, width)
    ways = measure_ceilings._reads(data, compiled)
    assert not compiled or backend_problems()[Backend.MLIR] or any("one row" in name for name in ways)
    for name, way in ways.items():
        for place in {0, count // 2, count - 1}:
            data.zero_()
            before = torch.as_tensor(way()).clone()
            data.view(-1)[place] = 2.0
            assert not torch.equal(torch.as_tensor(way()), before), (name, place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float32])
def test_a_gemm_ceiling_is_operations_over_seconds(dtype):
    found = measure_gemm_rate(dtype, SHAPE)
    assert (found.kind, found.unit, found.shape) == ("gemm", "FLOP/s", SHAPE)
    assert found.value == pytest.approx(2 * math.prod(SHAPE) / found.seconds)
    assert found.dtype == str(dtype).removeprefix("torch.")


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with measure_ceilings.intra_op_threads(before + 1) as count:
        assert count == torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_compiler_that_fails_leaves_the_other_ways(monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("Python.h: no such file")

    monkeypatch.setattr(measure_ceilings, "backend_problems", lambda: {Backend.MLIR: "not installed"})
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fails)
    monkeypatch.setattr(measure_ceilings.shutil, "which", lambda name: name)
    ways = measure_ceilings._reads(torch.zeros(2, 4), compiled=True)
    assert ways.keys() == measure_ceilings._reads(torch.zeros(2, 4), compiled=False).keys()


def test_the_quickest_way_wins(monkeypatch):
    now = [0.0]

    def takes(seconds: float):
        def way() -> None:
            now[0] += seconds

        return way

    monkeypatch.setattr(measure_ceilings, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timing, name = measure_ceilings._best({"slow": takes(0.02), "quick": takes(0.001)})
    assert (name, timing.seconds, timing.repeats > 1) == ("quick", pytest.approx(0.001), True)


def test_the_level_is_reported_from_the_caches_size():
    assert [memory_level_of(size, 100) for size in (99, 100, 101)] == ["cache", "cache", "DRAM"]
    assert memory_level_of(1, None) == "memory"


@pytest.mark.parametrize(
    ("first", "second", "more"),
    [
        ((1000, ASKED), (1000, ASKED), 0), ((1000, ASKED), (1000, ASKED | {"refresh": True}), 3),
        ((1000, ASKED), (1000, ASKED | {"threads": 2}), 3), ((1000, ASKED), (1000, ASKED | {"compiled": True}), 1),
        ((1000, ASKED), (1000, ASKED | {"gemm_shape": (3, 8, 4)}), 2), ((1000, ASKED), (4000, ASKED), 1),
        ((2**20, BEYOND), (int(2**20 * 0.95), BEYOND), 0),  # near sizes share one unless the cache ends between them
        ((2**20, BEYOND), (int(2**20 * 1.05), BEYOND), 1),
        ((2**30, BEYOND), (2**36, BEYOND), 0),  # beyond what is measured
    ],
)  # fmt: skip
def test_what_was_measured_once_is_kept(tmp_path, measured, monkeypatch, first, second, more):
    monkeypatch.setattr(ceilings, "last_level_cache", lambda: 2**20)
    found = ceilings_for(first[0], cache_dir=tmp_path, **first[1])
    count = len(measured)
    again = ceilings_for(second[0], cache_dir=tmp_path, **second[1])
    assert len(measured) == count + more and (more or found == again)


def test_of_two_ways_to_read_the_higher_ceiling_is_returned(tmp_path, measured):
    found = [ceilings_for(1000, compiled=way, cache_dir=tmp_path, **ASKED).read_ceilings[0] for way in (True, False)]
    (stored,) = stored_ceilings(1000, threads=1, cache_dir=tmp_path).read_ceilings
    assert len({each.value for each in found}) == 2 and stored == max(found, key=lambda each: each.value)


def test_another_level_of_instructions_is_measured_anew(tmp_path, measured, monkeypatch):
    """A processor of the same name may be held to less: by our variable, by torch's, or by who emulates it."""
    for count, (ours, torchs) in enumerate([("v4", "AVX512"), ("v3", "AVX512"), ("v4", "AVX2")], start=1):
        monkeypatch.setattr(ceilings, "simd_level", lambda ours=ours: ours)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda torchs=torchs: torchs)
        for _ in range(2):
            ceilings_for(1000, threads=1, dtypes=(), cache_dir=tmp_path)
            assert len(measured) == count


@pytest.mark.parametrize(
    ("cores", "share", "again"), [(2, 0.05, False), (2, 0.11, True), (64, 0.05, True), (64, None, False)]
)
def test_few_of_many_cores_make_a_ceiling_that_is_measured_again(tmp_path, monkeypatch, cores, share, again):
    monkeypatch.setattr(ceilings.os, "cpu_count", lambda: cores)
    coming = iter([ceiling("read", 5.0, others_cpu_share=share), ceiling("read", 7.0, others_cpu_share=0.0)])
    monkeypatch.setattr(ceilings, "measure_read_bandwidth", lambda *_: next(coming))
    values = [ceilings_for(64, dtypes=(), cache_dir=tmp_path).read_ceilings[0].value for _ in range(3)]
    assert values == [5.0, 7.0, 7.0] if again else [5.0] * 3


def test_processes_below_this_one_compute_beside_a_ceiling(monkeypatch):
    before, after = CpuTimes(100.0, 50.0, 10.0, {7: 5.0}), CpuTimes(110.0, 60.0, 15.0, {7: 10.0})
    monkeypatch.setattr(ceilings, "cpu_times", lambda: after)
    assert ceilings._beside(before) == pytest.approx(0.5) and ceilings._beside(None) is None


def test_a_bound_that_a_measurement_exceeds_is_an_error():
    assert bound_fault("decode", 1.0) == "" != bound_fault("decode", 2.27)
    assert "decode was faster than its upper bound (227% of it)" in bound_fault("decode", 2.27)


def test_a_measurement_on_a_busy_machine_is_made_again_and_the_higher_kept(tmp_path, monkeypatch):
    made = [ceiling("read", value, others_cpu_share=busy) for value, busy in ((5.0, 0.9), (4.0, 0.8), (7.0, 0.0))]
    coming = iter(made)
    monkeypatch.setattr(ceilings, "measure_read_bandwidth", lambda *_: next(coming))
    values = [ceilings_for(64, dtypes=(), cache_dir=tmp_path).read_ceilings[0].value for _ in range(5)]
    assert values == [5.0, 5.0, 7.0, 7.0, 7.0]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"ceilings": 3}', '{"ceilings": {"a": 1}}', "\udcff"])
def test_a_damaged_file_is_made_anew(tmp_path, measured, text):
    (tmp_path / CEILINGS_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    first = ceilings_for(1000, threads=1, cache_dir=tmp_path)
    assert ceilings_for(1000, threads=1, cache_dir=tmp_path) == first
    assert len(measured) == 3
    assert len(json.loads((tmp_path / CEILINGS_FILE).read_text())["ceilings"]) == 3


@pytest.mark.parametrize(
    "damage",
    [
        {"value": "much"},
        {"value": -1.0},
        {"value": None},
        {"shape": 3},
        {"colour": 1},
        {"working_set_bytes": 0},
    ],
)
def test_a_damaged_entry_is_measured_again_and_the_others_kept(tmp_path, measured, damage):
    ceilings_for(1000, 4000, dtypes=(), cache_dir=tmp_path)
    entries = json.loads((tmp_path / CEILINGS_FILE).read_text())
    key = next(iter(entries["ceilings"]))
    entries["ceilings"][key] |= damage
    (tmp_path / CEILINGS_FILE).write_text(json.dumps(entries))
    ceilings_for(1000, 4000, dtypes=(), cache_dir=tmp_path)
    assert len(measured) == 3


def test_where_nothing_can_be_kept_everything_is_measured_each_time(tmp_path, measured):
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        ceilings_for(1000, threads=1, dtypes=(), cache_dir=tmp_path / "file" / "below")
    assert len(measured) == 2


def test_two_that_measure_at_once_lose_nothing_of_each_other(tmp_path, measured, monkeypatch):
    fake = ceilings.measure_read_bandwidth

    def meanwhile(size: int, threads: int, compiled: bool) -> Ceiling:
        if size == 1000:
            ceilings_for(9000, dtypes=(), cache_dir=tmp_path)
        return fake(size, threads, compiled)

    monkeypatch.setattr(ceilings, "measure_read_bandwidth", meanwhile)
    ceilings_for(1000, dtypes=(), cache_dir=tmp_path)
    ceilings_for(1000, 9000, dtypes=(), cache_dir=tmp_path)
    assert sorted(size for _, size, *_ in measured) == [1000, 9000]


work = st.floats(0, 1e12)


@given(work, work, work)
def test_the_roofline_is_the_slower_of_the_two_and_rises_with_either(flops, nbytes, more):
    here = MachineCeilings((ceiling("read", 50.0),), (ceiling("gemm", 200.0, dtype="float32"),))
    seconds = here.roofline_seconds(flops, nbytes, "float32", 64)
    assert seconds == max(flops / 200, nbytes / 50)
    assert here.roofline_seconds(flops + more, nbytes, "float32", 64) >= seconds
    assert here.roofline_seconds(flops, nbytes + more, "float32", 64) >= seconds


def test_a_ceiling_is_found_by_size_and_precision():
    here = MachineCeilings(
        (ceiling("read", 9.0, 2**10), ceiling("read", 3.0, 2**20)), (ceiling("gemm", dtype="float32"),)
    )
    assert [here.read_ceiling(size).value for size in (0, 2**14, 2**16, 2**40)] == [9.0, 9.0, 3.0, 3.0]
    refuses("bfloat16: not measured; measured: float32", here.gemm_ceiling, "bfloat16")
    assert here.gemm_ceiling("float64").dtype == "float32"
    assert json.loads(json.dumps(here.as_json()))["reads"][0]["value"] == 9.0


def test_operands_that_are_quicker_widened_are_rated_widened():
    """Products of bfloat16 may be computed in either; those of float32 in no other."""
    for narrow, wide in ((5.0, 9.0), (9.0, 5.0)):
        gemms = ceiling("gemm", narrow, dtype="bfloat16"), ceiling("gemm", wide, dtype="float32")
        here = MachineCeilings((ceiling("read", 50.0),), gemms)
        assert here.gemm_ceiling("bfloat16").value == 9.0 and here.gemm_ceiling("float32").value == wide
        assert here.roofline_seconds(90.0, 0.0, "bfloat16", 64) == 10.0
