"""`check_attention` passes what keeps the laws and, for every law, catches a variant that breaks it."""

from __future__ import annotations

import pytest

from compiled_kernels import Backend
from tests.testing import attention_parts as parts
from workbench.custom import temporarily_registered
from workbench.errors import WorkbenchError
from workbench.testing import attention_backends, attention_laws, check_attention, position_laws

RIGHT = [
    {}, {"sliding_window": 5, "num_sink_tokens": 2, "softcap": 2.0, "qk_norm": True},
    {"position": "alibi", "sink_logits": True}, {"position": "none", "scale": 0.2, "num_kv_heads": "multi_query"},
    parts.Strided, parts.Strided(7), parts.blind_now_and_then, parts.bent, parts.hides_far, parts.Gated,
    "tests.testing.attention_parts:Strided",
    "tests/testing/attention_parts.py:bent",
]  # fmt: skip
QUICK = ("eager", "mlir", "triton")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", RIGHT, ids=lambda part: getattr(part, "__name__", str(part)))
def test_what_keeps_the_laws_passes(part, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    check_attention(part, examples=4, backends=QUICK).raise_if_failed()


def test_the_compiled_backend_is_held_to_the_reference_too():
    report = check_attention(parts.hides_far, examples=3, backends=["inductor"])
    (backend,) = [law for law in report.laws if "backend inductor" in law.law]
    assert backend.ok and (backend.detail == "3 examples" or "not tried: no C++ compiler" in backend.detail)


@pytest.mark.parametrize(
    ("part", "law", "detail"),
    [
        (parts.Raises, "answers with booleans", "raised KeyError"),
        (parts.numbers, "answers with booleans", "torch.float32, not with a tensor of booleans"),
        (parts.other_shape, "broadcast over positions", "answered with shape (2, 3, 5)"),
        (parts.ahead, "no key that comes after", "shows key 1 to query 0"),
        (parts.ahead_now_and_then, "no key that comes after", "shows key 100 to query 99"),
        (parts.of_the_span, "of positions alone", "depend on the other queries of the call"),
        (parts.of_the_keys, "of positions alone", "depend on how many keys are asked for"),
        (parts.Remembers, "of positions alone", "answered differently when asked again"),
        (parts.gives_nan, "never NaN", "gave NaN or +inf"),
        (parts.half, "same shape and type", "torch.float16 for"),
        (parts.in_place, "leaves its input", "changed its input in place"),
        (parts.sharpened, "of one score", "changes those of others"),
        (parts.sharpened, "causality", "change the logits of position"),
        (parts.by_rank, "of one score", "depend on the other queries of the call"),
        (parts.LooksAhead, "causality", "change the logits of position"),
        (parts.LooksAside, "batched = alone", "in a batch with other texts"),
        (parts.ByPlace, "pages of any size in any order", "in random order it gives other rows"),
        (parts.Counts, "chunked = whole", "gives other rows than at once"),
        (parts.KeepsAside, "a warm prefix = a cold one", "on a prefix found in the cache it gives other rows"),
        (parts.NotExtended, "goes into a model", "is no attention; extend workbench.model.layers.Attention"),
        (lambda query: query, "is a mask, a score function", "takes neither"),
        (42, "is a mask, a score function", "takes neither"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_part_that_breaks_a_law_is_caught_by_that_law(part, law, detail, monkeypatch):
    """The other laws are not tried: that they are, whatever is broken, is seen of `ahead` below."""
    for laws in (attention_laws.LAWS, *position_laws.POSITION_LAWS.values()):
        for other in [each for each in laws if law not in each]:
            monkeypatch.delitem(laws, other)
    report = check_attention(part, examples=10, backends=[])
    assert not report.passed
    broken = [found for found in report.laws if law in found.law]
    assert len(broken) == 1 and not broken[0].ok and detail in broken[0].detail, str(report)
    assert f"BROKEN  {broken[0].law}" in str(report)
    with pytest.raises(AssertionError, match="laws hold"):
        report.raise_if_failed()


def test_the_report_is_words_and_the_same_each_time():
    first, again = (check_attention(parts.ahead, examples=4, backends=["mlir"]) for _ in range(2))
    assert str(first) == str(again)
    assert str(first).startswith("mask ahead: 9 of 10 laws hold\n")
    assert "backend mlir" in str(first)


def test_a_feature_that_a_backend_does_not_claim_is_reported():
    report = check_attention(parts.of_a_table, examples=2, backends=["triton", "mlir"])
    assert report.passed
    for law in report.laws[-2:]:
        assert law.detail.startswith(("not claimed: paged_attention: backend", "not tried:"))
        assert "tables have one axis, of up to" in law.detail or "not tried" in law.detail
        assert not law.tried and f"  -       {law.law}" in str(report)
    assert f"{len(report.laws) - 2} of {len(report.laws) - 2} laws hold, 2 not tried" in str(report)


def test_only_its_own_law_catches_what_is_kept_beside_the_cache():
    """The law of warm prefixes says something that the others do not."""
    report = check_attention(parts.KeepsAside, examples=10, backends=[])
    assert [law.law for law in report.laws if not law.ok] == ["a warm prefix = a cold one"], str(report)


def test_a_backend_calls_a_part_by_its_name_and_not_by_its_address():
    for part, name in ((parts.sharpened, "sharpened"), (parts.Raises(), "Raises")):
        kind = "score" if part is parts.sharpened else "mask"
        with temporarily_registered(part) as path:
            law = attention_backends.backend_law(Backend.MLIR, {kind: {"path": path}}, 1)
        words = f"not claimed: paged_attention: backend mlir: {name} cannot be traced: attention_parts.py:"
        assert law.detail.startswith(("not tried", words)), law.detail


def test_arguments_reach_the_part():
    assert "Strided" in str(check_attention(parts.Strided, examples=2, arguments={"width": 2}, backends=[]))
    assert check_attention(parts.bent, examples=2, arguments={"by": 0.5}, backends=[]).passed
    with pytest.raises(WorkbenchError, match="could not be built with wdth=2"):
        check_attention(parts.Strided, arguments={"wdth": 2})


def test_a_variant_in_a_file_of_ones_own(tmp_path):
    """As a user would: one file, somewhere, with a mistake in it, then without."""
    file = tmp_path / "mine.py"
    file.write_text("def mask(query, key):\n    return key <= query + 2\n")
    report = str(check_attention(f"{file}:mask", examples=5, backends=[]))
    assert "BROKEN  shows no key that comes after its query" in report
    file.write_text("def mask(query, key):\n    return (key <= query) & (key % 2 == query % 2)\n")
    check_attention(f"{file}:mask", examples=5, backends=[]).raise_if_failed()


def test_a_composition_with_a_choice_of_pages_is_tried_in_pages_of_its_size():
    from tests.engine.page_bounds import Bounds

    with temporarily_registered(Bounds) as path:
        composition = {"pages": {"path": path, "arguments": {"page_size": 4}}, "softcap": 3.0}
        check_attention(composition, examples=3, backends=("eager",)).raise_if_failed()
