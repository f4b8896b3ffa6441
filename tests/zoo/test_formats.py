"""Every cache format of the zoo keeps the laws of formats, and computes what its paper says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from workbench.custom import resolve_path
from workbench.files import read_bytes, read_yaml
from workbench.parts import hadamard_rotate
from workbench.testing import check_kv_format

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "experiments" / "zoo"


def formats() -> dict[str, dict[str, Any]]:
    """Return the cache settings of each entry, by its name."""
    found = {}
    for path in sorted(ZOO.glob("*.yaml")):
        entry: Any = read_yaml(read_bytes(path), path.name)
        if entry["kind"] == "format":
            found[path.stem] = {key.removeprefix("cache."): value for key, value in entry["use"].items()}
    return found


FORMATS = formats()


def part(name: str, **arguments: Any) -> Any:
    """Build the part of an entry that its setting names."""
    codec = FORMATS[name]["codec"]
    codec = {"path": codec} if isinstance(codec, str) else codec
    return resolve_path(codec["path"])(**{**codec.get("arguments", {}), **arguments})


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", FORMATS)
def test_it_keeps_every_law(name: str) -> None:
    report = check_kv_format(FORMATS[name], examples=2, backends=())
    assert report.passed, str(report)


@pytest.mark.parametrize("name", FORMATS)
def test_the_demo_model_generates_with_it(name: str) -> None:
    runner = workbench.load("demo", backend="eager", cache=FORMATS[name], pages=8)
    text = "".join(event.text for event in runner.stream("def fib(n):", max_tokens=6, temperature=0, ignore_eos=True))
    assert text and runner.store.bytes == runner.store.expected_bytes


def test_a_rotation_spreads_an_outlier() -> None:
    """One large channel makes every step of INT4 large; rotated, the error is several times smaller."""
    x = rows(0, 64, 2, 64)
    x[..., 5] *= 40
    away = {name: (codec.decode(*codec.encode(x)) - x)[..., :5].square().mean().sqrt().item()
            for name in ("int4_by_token", "quarot") if (codec := part(name))}  # fmt: skip
    assert away["quarot"] < away["int4_by_token"] / 3
    plain, rotated = part("int4_by_token"), part("quarot")
    turned = hadamard_rotate(x)
    assert torch.equal(rotated.encode(x)[0], plain.encode(turned)[0]), "it is INT4 of the rotated head"
    scores = x @ x.mT, turned @ turned.mT
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-2)


def test_normal_float_is_best_for_normal_numbers() -> None:
    x = rows(1, 256, 2, 64)
    away = {name: (codec.decode(*codec.encode(x)) - x).square().mean().item()
            for name in ("int4_by_token", "normal_float") if (codec := part(name))}  # fmt: skip
    levels = part("normal_float").levels(x.device)
    assert levels.shape == (16,) and torch.allclose(levels, -levels.flip(0), atol=1e-6)
    assert away["normal_float"] < away["int4_by_token"]
