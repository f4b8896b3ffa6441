"""Every attention of the zoo keeps the laws of attention and generates; equations are held to plain ones elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

import workbench
from tests.thorough import THOROUGH
from tests.zoo.loaded import text_of
from workbench.claims.technique import load_zoo
from workbench.testing import check_attention

# Choices of pages have tests of their own: they want pages of one size, and the laws draw many.
ENTRIES = {
    name: entry.settings
    for name, entry in load_zoo().items()
    if entry.settings.kind == "attention" and "attention.pages" not in entry.settings.use
}
# Arguments for the laws' texts of up to 90 tokens, where an entry's own would change nothing in them.
SMALL: dict[str, dict[str, Any]] = {
    "bigbird": {"block": 4, "window": 2, "random": 1},
    "dilated": {"window": 4, "step": 3, "plain": 1},
    "log_sparse": {"window": 3},
    "sparse_transformer": {"stride": 8, "columns": 2},
}
WINDOW = 6  # tokens, where an entry has a window or chunks
# One of each mechanism that is compiled: a setting, a mask, a score, a module; and before an issue is ended all, with
# Inductor too, which compiles for a minute.
COMPILED = ("softmax1", "bigbird", "kerple", "differential")
BACKENDS = ("eager", "mlir", *["inductor"] * THOROUGH)


def attention(name: str) -> dict[str, Any]:
    """Return the settings of an entry, as `attention` takes them."""
    return {
        key.removeprefix("attention."): value
        for key, value in ENTRIES[name].use.items()
        if key.startswith("attention.")
    }


def smaller(name: str, change: dict[str, Any]) -> dict[str, Any]:
    """Return the change with sizes that show in short texts."""
    found = dict(change)
    for slot in ("mask", "score", "module"):
        if slot in found:
            found[slot] = {**found[slot], "arguments": {**found[slot].get("arguments", {}), **SMALL.get(name, {})}}
    for slot in ("sliding_window", "chunk_size"):
        if isinstance(found.get(slot), int):
            found[slot] = WINDOW
    if "kinds" in found:
        found["kinds"] = {kind: smaller(name, inner) for kind, inner in found["kinds"].items()}
    if "pattern" in found:  # the laws' models have two layers
        found["pattern"] = found["pattern"][-2:] if "window" not in found["pattern"] else ["window", "full"]
        found["kinds"] = {kind: inner for kind, inner in found.get("kinds", {}).items() if kind in found["pattern"]}
    return found


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ENTRIES)
def test_it_keeps_the_laws_of_attention(name: str) -> None:
    change = smaller(name, attention(name))
    own = change.keys() & {"mask", "score"}  # settings of the engine's own are held to every backend elsewhere
    compiled = own and (THOROUGH or name in COMPILED)
    check_attention(change, examples=2, backends=("eager", *["mlir"] * bool(compiled))).raise_if_failed()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_its_mask_keeps_the_laws_of_masks(name: str) -> None:
    part = attention(name)["mask"]
    for arguments in (part["arguments"], {**part["arguments"], **SMALL[name]}):
        check_attention(part["path"], examples=2, arguments=arguments, backends=()).raise_if_failed()


@pytest.mark.parametrize("name", [name for name in ENTRIES if "score" in attention(name)])
def test_its_score_keeps_the_laws_of_scores(name: str) -> None:
    part = attention(name)["score"]
    arguments = part.get("arguments", {})
    check_attention(part["path"], examples=2, arguments=arguments, backends=()).raise_if_failed()


@pytest.mark.parametrize("name", ENTRIES if THOROUGH else COMPILED)
def test_the_demo_model_generates_with_it(name: str) -> None:
    """On every backend, the same greedy text in float32 as far as margins are wide."""
    texts = {backend: generated(name, backend) for backend in BACKENDS if backend != "inductor" or name in COMPILED}
    assert all(texts.values()) and len(set(texts.values())) == 1, texts


def generated(name: str, backend: str) -> str:
    settings: dict[str, Any] = {"attention": attention(name), "backend": backend}
    runner = workbench.load({"name": "demo", "dtype": "float32", **ENTRIES[name].model}, pages=16, **settings)
    return text_of(runner, "def fib(n):", 5)
