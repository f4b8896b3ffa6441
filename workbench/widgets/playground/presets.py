"""Define named pairs of settings for meaningful comparisons: engine mechanisms, and the zoo's entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from workbench.errors import WorkbenchError
from workbench.widgets.playground.history import setting_changes

GREEDY = {"sampling.temperature": 0}
EXACT = {**GREEDY, "model.dtype": "float32"}  # low precision alone may make two greedy texts diverge
EQUAL = "same_texts_share >= 1"
ALIKE = "same_texts_share >= 0.9 and tpot_ratio_high <= 1.1"
# Question and rule of a pair that is no preset.
ANY_PAIR = ("Do these two settings give the same texts, and what does a token cost?", ALIKE)
PLAYED_KINDS = ("attention", "format", "eviction", "sampling", "draft")  # kinds of zoo entries that one request shows


@dataclass(frozen=True)
class PairPreset:
    """A named pair of settings: changes of the widget's initial settings for each side, the pair's question, and the
    rule for its verdict."""

    name: str
    question: str
    left: Mapping[str, Any]
    right: Mapping[str, Any]
    rule: str = ALIKE

    def experiments(self, initial: Any) -> tuple[Any, Any]:
        """Return the experiments of both sides. Raises WorkbenchError for settings that contradict each other."""
        left, right = (initial.single(changes, self.name) for changes in (self.left, self.right))
        return left, right

    def describes(self, initial: Any, left: Any, right: Any) -> bool:
        """Return whether the experiments `left` and `right` differ exactly as this preset's sides do, and leave the
        preset's other settings unchanged."""
        preset_sides = [side.model_dump(mode="json") for side in self.experiments(initial)]
        sides = [side.model_dump(mode="json") for side in (left, right)]
        if setting_changes(sides[0], sides[1]) != setting_changes(preset_sides[0], preset_sides[1]):
            return False
        changed = setting_changes(preset_sides[0], sides[0])
        return not any(f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
                       for one in changed for other in self.left)  # fmt: skip

    def problem(self, initial: Any) -> str:
        """Return the reason why the preset cannot run with the initial model on this machine, or "" if it can."""
        from workbench.engine.loaded_model import check_settings

        try:
            for experiment in self.experiments(initial):
                check_settings(experiment)
        except WorkbenchError as error:
            return str(error)
        return ""


def _pair(name: str, question: str, common: Mapping[str, Any], change: Mapping[str, Any], rule: str) -> PairPreset:
    return PairPreset(name, question, dict(common), {**common, **change}, rule)


ENGINE_PRESETS = (
    _pair("INT8 KV cache", "Does an INT8 KV cache change greedy texts, and what does a token cost?",
          GREEDY, {"cache.format": "int8"}, ALIKE),
    _pair("INT4 KV cache", "Does an INT4 KV cache change greedy texts, and what does a token cost?",
          GREEDY, {"cache.format": "int4"}, ALIKE),
    _pair("full and sliding-window attention", "Where does a window of 128 tokens with 4 sinks change greedy texts?",
          GREEDY, {"attention.sliding_window": 128, "attention.num_sink_tokens": 4}, ALIKE),
    _pair("full cache and evicted cache", "Where does a cache of the 128 heaviest tokens change greedy texts?",
          GREEDY, {"cache.evict": {"kind": "heavy_hitters", "budget": 128}, "cache.page_size": 16}, ALIKE),
    _pair("greedy and temperature 0.7", "How soon does a draw at temperature 0.7 leave the greedy text?",
          GREEDY, {"sampling.temperature": 0.7}, "first_divergence >= 8"),
    _pair("with and without the KV cache", "Do greedy texts stay the same without a KV cache, and what does it save?",
          EXACT, {"executor": {"kind": "uncached"}}, EQUAL),
    _pair("with and without speculation", "Does speculation leave greedy texts as they are, and is it faster?",
          EXACT, {"speculate": {"kind": "prompt_lookup"}}, f"{EQUAL} and tpot_ratio_high <= 1.0"),
    _pair("eager and inductor", "Do two backends give the same greedy texts, and which is faster?",
          {**EXACT, "backend": "eager"}, {"backend": "inductor"}, f"{EQUAL} and tpot_ratio_high <= 1.0"),
    _pair("eager and mlir", "Do two backends give the same greedy texts, and which is faster?",
          {**EXACT, "backend": "eager"}, {"backend": "mlir"}, f"{EQUAL} and tpot_ratio_high <= 1.0"),
)  # fmt: skip


@cache
def zoo_presets() -> tuple[PairPreset, ...]:
    """Return a preset for each zoo entry whose effect one request can show. All are greedy except sampling entries."""
    from workbench.claims.zoo import open_zoo

    found = []
    for item in open_zoo():
        if item.settings.kind not in PLAYED_KINDS:
            continue
        common: dict[str, Any] = {} if item.settings.kind == "sampling" else dict(GREEDY)
        left, right = {**common, **item.settings.baseline}, {**common, **item.changes}
        found.append(PairPreset(f"zoo: {item.settings.technique}", item.settings.claim, left, right))
    return tuple(found)


def all_presets() -> dict[str, PairPreset]:
    """Return all presets by name, the engine's first."""
    return {preset.name: preset for preset in (*ENGINE_PRESETS, *zoo_presets())}


def find_pair(beside: str | Mapping[str, Any]) -> PairPreset:
    """Return the preset with a given name, or a pair whose right side has the given changes (dotted path -> value).

    Raises:
        WorkbenchError: there is no preset of this name.
    """
    if not isinstance(beside, str):
        return PairPreset("beside", ANY_PAIR[0], {}, beside)
    presets = {preset.name: preset for preset in ENGINE_PRESETS}
    if beside not in presets:
        presets = all_presets()
    if beside not in presets:
        raise WorkbenchError(f"no preset {beside!r}; there are {', '.join(presets)}")
    return presets[beside]
