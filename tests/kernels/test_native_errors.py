"""`native_errors` keeps LLVM's words from file descriptor 2, lets all others pass, and restores the descriptor."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_kernels.mlir.execute import capture_native_errors
from tests.patience import limit

MEBIBYTE = bytes(2**20)
MISSING = "JIT session error: Symbols not found: [ {} ]\n"
LLVMS = ("Could not compile kernel: \n", "Failed to materialize symbols: { (main, { f }) }\n")
others = st.text("abc :[]{}", min_size=1, max_size=20).filter(str.strip).map("of others: {}\n".format)
missing = st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), min_size=1, max_size=4)


def same_file() -> tuple[int, int]:
    """Return device and inode of descriptor 2."""
    found = os.fstat(2)
    return found.st_dev, found.st_ino


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(others | missing | st.sampled_from(LLVMS)))
def test_others_words_pass_in_order_and_llvms_are_kept(
    capfd: pytest.CaptureFixture[str], lines: list[str | list[str]]
) -> None:
    capfd.readouterr()
    said = [line if isinstance(line, str) else MISSING.format(", ".join(line)) for line in lines]
    with capture_native_errors() as heard:
        for line in said:
            os.write(2, line.encode())
    assert heard.text == "".join(said)
    assert capfd.readouterr().err == "".join(line for line in said if line.startswith("of others"))
    wanted = [symbol for line in lines if isinstance(line, list) for symbol in line]
    assert heard.missing_symbols == tuple(dict.fromkeys(wanted))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, None])
def test_descriptor_2_is_put_back(error: type[BaseException] | None, capfd: pytest.CaptureFixture[str]) -> None:
    before, open_before = same_file(), descriptors()
    for _ in range(3):
        try:
            with capture_native_errors():
                assert same_file() != before
                os.write(2, b"within\n")
                if error is not None:
                    raise error("planted")
        except BaseException as raised:
            assert type(raised) is error
    assert same_file() == before and descriptors() == open_before
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "within\n" * 3 + "after\n"


def test_what_python_had_not_written_yet_goes_where_it_was_meant_to(capfd: pytest.CaptureFixture[str]) -> None:
    """sys.stderr may hold a line back: it is no word of LLVM's, nor may it come out of order."""
    with os.fdopen(os.dup(2), "w", buffering=4096) as kept:
        mine, sys.stderr = sys.stderr, kept
        try:
            sys.stderr.write("before\n")
            with capture_native_errors() as heard:
                os.write(2, b"within\n")
        finally:
            sys.stderr = mine
    assert heard.text == "within\n" and capfd.readouterr().err == "before\nwithin\n"


def test_one_within_another_gives_each_its_own_words(capfd: pytest.CaptureFixture[str]) -> None:
    """As when compiling calls code that compiles; it must not wait for itself either."""
    before = same_file()

    def nested() -> None:
        with capture_native_errors() as outer:
            os.write(2, MISSING.format("outer_one").encode())
            with capture_native_errors() as inner:
                os.write(2, MISSING.format("inner_one").encode() + b"another's\n")
            os.write(2, MISSING.format("outer_two").encode())
        found.extend([outer.missing_symbols, inner.missing_symbols])

    found: list[tuple[str, ...]] = []
    ran = threading.Thread(target=nested, daemon=True)
    ran.start()
    ran.join(limit(30))
    assert not ran.is_alive(), "it waits for itself"
    assert found == [("outer_one", "outer_two"), ("inner_one",)]
    assert same_file() == before and capfd.readouterr().err == "another's\n"


def test_two_threads_hear_nothing_of_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    before, heard, start = same_file(), {}, threading.Barrier(2)

    def compiles(name: str) -> None:
        start.wait(limit(30))
        for number in range(20):
            with capture_native_errors() as said:
                hashlib.sha256(MEBIBYTE)  # lets go of the interpreter's lock: the other thread's turn
                os.write(2, MISSING.format(f"{name}{number}").encode() + f"line {name}{number}\n".encode())
            heard[name, number] = said.missing_symbols

    threads = [threading.Thread(target=compiles, args=(name,)) for name in "ab"]
    for each in threads:
        each.start()
    for each in threads:
        each.join(limit(60))
    assert heard == {(name, n): (f"{name}{n}",) for name in "ab" for n in range(20)}
    assert same_file() == before
    wanted = sorted(f"line {name}{n}" for name in "ab" for n in range(20))
    assert sorted(capfd.readouterr().err.splitlines()) == wanted


def test_nothing_that_another_thread_writes_meanwhile_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()
    count = 0

    def writes() -> None:
        nonlocal count
        while not done.is_set():
            os.write(2, f"line {count}\n".encode())
            count += 1

    writer = threading.Thread(target=writes)
    writer.start()
    for _ in range(50):
        with capture_native_errors():
            os.write(2, MISSING.format("a").encode())
    done.set()
    writer.join(limit(60))
    # A line may wait for the end of the block it was written in: none is lost, doubled or torn.
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines, key=lambda line: int(line.split()[1])) == [f"line {i}" for i in range(count)]


def test_a_process_without_standard_error_compiles_all_the_same() -> None:
    program = (
        "import os, sys; os.close(2); sys.stderr = None\n"
        "from compiled_kernels.mlir.execute import capture_native_errors\n"
        "with capture_native_errors() as said: pass\n"
        "assert said.text == '' and said.missing_symbols == ()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], timeout=limit(300))


def descriptors() -> int:
    """Return the number of open files."""
    return len(os.listdir("/proc/self/fd"))
