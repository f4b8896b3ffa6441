"""Every cache format of the zoo keeps the laws of formats, and computes what its paper says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workbench
from tests.zoo.loaded import text_of
from workbench.claims.technique import load_zoo
from workbench.custom import resolve_path
from workbench.parts import hadamard_rotate
from workbench.testing import check_kv_format

FORMATS: dict[str, dict[str, Any]] = {  # the cache settings of each entry
    name: {key.removeprefix("cache."): value for key, value in entry.settings.use.items()}
    for name, entry in load_zoo().items()
    if entry.settings.kind == "format"
}


def part(name: str, **arguments: Any) -> Any:
    """Build the part of an entry that its setting names."""
    codec: Any = FORMATS[name]["codec"]
    codec = {"path": codec} if isinstance(codec, str) else codec
    return resolve_path(codec["path"])(**{**codec.get("arguments", {}), **arguments})


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMATS)
def test_it_keeps_every_law(name: str) -> None:
    report = check_kv_format(FORMATS[name], examples=2, backends=())
    assert report.passed, str(report)


@pytest.mark.parametrize("name", FORMATS)
def test_the_demo_model_generates_with_it(name: str) -> None:
    cache = {**FORMATS[name], "calibration": {"tokens": 300}}
    runner = workbench.load("demo", backend="eager", cache=cache, pages=8)
    assert text_of(runner, "def fib(n):", 6) and runner.store.bytes == runner.store.expected_bytes


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


def test_kivi_is_its_equation() -> None:
    """Against the paper's formula, channel by channel and token by token."""
    codec, x = part("kivi"), rows(2, 3, 32, 2, 64)
    for side, dim in ((codec.keys, 1), (codec.values, 4)):
        runs = x if dim == 1 else x.unflatten(-1, (2, 32))
        low = runs.amin(dim, keepdim=True).half().float()
        step = ((runs.amax(dim, keepdim=True) - low) / 3).half().float()
        expected = (low + step * ((runs - low) / step).round().clamp(0, 3)).view_as(x)
        torch.testing.assert_close(side.decode(*side.encode(x)), expected)
    x[..., 7] *= 100  # an outlier channel of keys harms no other channel
    away = (codec.keys.decode(*codec.keys.encode(x)) - x).abs()
    assert away[..., :7].max() < 1.5 < away[..., 7].max()


def test_fp8_has_no_scale_a_token() -> None:
    sample = rows(3, 200, 2, 64) * torch.tensor([1.0, 50.0])[:, None]
    codec = part("fp8_by_head").calibrate(0, sample, sample).keys
    stored = codec.encode(sample)
    assert [each.dtype for each in stored] == [torch.uint8] and stored[0].shape == sample.shape
    away = (codec.decode(*stored) - sample).abs()
    assert bool((away <= torch.maximum(sample.abs() / 16, codec.scales * 2**-9)).all()), "three bits after the first"
    beyond = codec.decode(*codec.encode(10 * sample))
    assert torch.allclose(beyond.amax((0, 2)), sample.abs().amax((0, 2))), "what is beyond the sample is its largest"


def test_palu_keeps_the_largest_directions() -> None:
    """All dimensions are the identity; of fewer the error on the sample is the sum of the eigenvalues left out."""
    sample = rows(4, 400, 2, 16) * torch.arange(1, 17)
    whole = part("palu", rank=1.0).calibrate(0, sample, sample).keys
    torch.testing.assert_close(whole.decode(*whole.encode(sample)), sample, rtol=0, atol=0.1)
    half = part("palu", rank=0.5).calibrate(0, sample, sample).keys
    error = (half.decode(*half.encode(sample)) - sample).square().sum((0, 2))
    values = torch.linalg.svdvals(sample.transpose(0, 1)).square()
    torch.testing.assert_close(error, values[:, 8:].sum(1), rtol=1e-3, atol=0.5)
    joint = part("palu", rank=0.5, heads=2).calibrate(0, sample, sample).keys
    assert joint.encode(sample)[0].shape == (400, 1, 16)
    assert (joint.decode(*joint.encode(sample)) - sample).square().sum() <= error.sum() + 1


def test_a_learned_grid_beats_even_steps() -> None:
    sample = rows(5, 300, 2, 32) ** 3
    codec = part("kvquant_nf4").calibrate(0, sample, sample)
    for side in (codec.keys, codec.values):
        assert bool((side.levels.diff() > 0).all()) and float(side.levels.abs().max()) <= 1
    assert [each.shape for each in codec.keys.encode(sample)] == [(300, 2, 16)], "keys store codes alone"
    learned = (codec.keys.decode(*codec.keys.encode(sample)) - sample).square().mean()
    codec.keys.levels = torch.linspace(-1, 1, 16)
    assert learned < 0.6 * (codec.keys.decode(*codec.keys.encode(sample)) - sample).square().mean()


def test_product_codes_are_the_nearest_words() -> None:
    sample = rows(6, 400, 2, 8)
    codec = part("product_codes").calibrate(0, sample, sample).keys
    (codes,) = codec.encode(sample)
    assert codes.shape == (400, 2, 4) and codes.dtype == torch.uint8
    pieces = sample.unflatten(-1, (4, 2)).flatten(1, 2).transpose(0, 1)  # [piece, token, column]
    nearest = torch.cdist(pieces, codec.words, compute_mode="donot_use_mm_for_euclid_dist").amin(-1)
    found = (codec.decode(codes) - sample).unflatten(-1, (4, 2)).flatten(1, 2).norm(dim=-1)
    torch.testing.assert_close(found, nearest.T, rtol=1e-4, atol=1e-5)
    few = sample[:200]  # as many words as there are pieces: only the words' own rounding is left
    codec = part("product_codes").calibrate(0, few, few).keys
    torch.testing.assert_close(codec.decode(*codec.encode(few)), few, rtol=1e-3, atol=1e-3)


def test_gear_makes_up_for_what_its_bits_lose() -> None:
    """A low rank and outliers help, and each by itself; an error of low rank vanishes."""
    x = rows(7, 2, 32, 2, 64)
    x[:, 5, :, 9] = 60
    kivi = part("kivi")

    def error(**arguments: float) -> float:
        codec = part("gear", **arguments)
        return float((codec.keys.decode(*codec.keys.encode(x)) - x).square().mean())

    plain = float((kivi.keys.decode(*kivi.keys.encode(x)) - x).square().mean())
    assert error() < error(rank=1, sparse=0.02) < error(rank=1, sparse=0.001) < plain
    side = part("gear", rank=2).keys
    low = rows(8, 1, 1, 32, 2) @ rows(9, 1, 1, 2, 64)
    left, right = side.low_rank(low)
    torch.testing.assert_close(left.float() @ right.float().mT, low, rtol=1e-2, atol=1e-2)


def test_skvq_clips_and_puts_channels_back() -> None:
    sample = rows(10, 500, 2, 64) * torch.logspace(-1, 1, 64)[torch.randperm(64, generator=torch.manual_seed(0))]
    exact = part("skvq", bits=8).calibrate(0, sample, sample).keys
    assert bool((exact.share >= 0.95).all()), "of many steps none is to be clipped"
    found = exact.decode(*exact.encode(sample[:, None])).squeeze(1)
    assert bool(((found - sample).abs() < 0.05 * sample.abs().amax((0, 2))[:, None]).all())
    coarse = part("skvq").calibrate(0, sample, sample).keys
    assert bool((coarse.share < 1).all())
    clipped = (coarse.decode(*coarse.encode(sample[:, None])).squeeze(1) - sample).square().mean()
    coarse.share = torch.ones_like(coarse.share)
    assert clipped < (coarse.decode(*coarse.encode(sample[:, None])).squeeze(1) - sample).square().mean()
