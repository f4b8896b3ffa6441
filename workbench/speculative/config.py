"""Settings of speculative decoding. Names are those of vLLM where it has them."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from workbench.request import CustomPart
from workbench.settings import Settings, parse_setting

TARGET = "target"  # as a draft model: the model that verifies


class NoSpeculation(Settings):
    """Decode one token per step."""

    kind: Literal["none"] = "none"


class _DraftSettings(Settings):
    """Settings of all proposers.

    With `length: adaptive` a sequence gets two more draft tokens after all were accepted, up to
    `num_speculative_tokens`, and one fewer after any other verification (as in Hugging Face's assisted generation).
    `accept` is the acceptance rule. `rejection` accepts as often as the distributions overlap. `match` accepts only the
    tokens that would come without drafts, so outputs are equal token for token, seeds included.
    """

    num_speculative_tokens: Annotated[int, Field(ge=1, le=63)] = 4  # draft tokens a step, at most
    # adaptive: two more draft tokens after all were accepted, one fewer otherwise
    length: Literal["fixed", "adaptive"] = "fixed"
    # match: the tokens are those without drafts; rejection: their distribution is
    accept: Literal["rejection", "match"] = "rejection"


class PromptLookup(_DraftSettings):
    """Propose what followed the last tokens at their latest earlier place in the text: the longest run of `max_ngram`
    down to `min_ngram` tokens."""

    kind: Literal["prompt_lookup"] = "prompt_lookup"
    min_ngram: Annotated[int, Field(ge=1)] = 2  # tokens that must have occurred before, at least
    max_ngram: Annotated[int, Field(ge=1)] = 4  # tokens that are looked for first

    @model_validator(mode="after")
    def _in_order(self) -> PromptLookup:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")
        return self


class DraftModel(_DraftSettings):
    """A small model of the same tokenizer: `demo-draft`, or a folder, on the target's device, in `dtype`, on `backend`.

    It stops proposing for a sequence before the first token of which it is unsure: where the probability of its own
    likeliest one is below `confidence_threshold` (transformers' `assistant_confidence_threshold`; llama.cpp's
    `draft-p-min` stops before that token as we do). 0 never stops. `stop` is a rule of the user's own in its place (see
    `workbench.speculative.draft_model.StopRule`). Outputs stay what they are: see `DraftModelProposer`.

    `model: target` drafts with the target itself, with those of its `layers` alone (all unless given): it shares their
    weights, and has a cache of its own."""

    kind: Literal["draft"] = "draft"
    model: str = "demo-draft"  # its name or folder; target: the target's own first layers
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    backend: str | None = None  # None is the target's
    confidence_threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    stop: CustomPart | None = None  # (probabilities [row, vocab], request ids) -> whether each draft ends [row]
    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None  # of model: target

    @property
    def stops_early(self) -> bool:
        return self.confidence_threshold > 0 or self.stop is not None

    @property
    def is_target(self) -> bool:
        return self.model == TARGET

    @model_validator(mode="after")
    def _fits_together(self) -> DraftModel:
        if self.stop is not None and self.confidence_threshold:
            raise ValueError("stop and confidence_threshold both end drafts; leave one out")
        if self.layers is not None and not self.is_target:
            raise ValueError(f"layers are chosen of the model that verifies; set model: {TARGET}")
        if self.layers is not None and any(a >= b for a, b in pairwise(self.layers)):
            raise ValueError(f"layers must ascend, each named once, not {list(self.layers)}")
        if self.is_target and (self.dtype != "auto" or self.backend is not None):
            raise ValueError(f"model: {TARGET} has the target's dtype and backend; leave dtype and backend out")
        return self


class CustomProposer(_DraftSettings, CustomPart):
    """A user-defined proposer: a class, built with the `SpeculationTarget` and `arguments` (see
    `workbench.speculative.proposers.Proposer`).

    With `tree` its drafts may be trees (see `Draft.parents`), of `num_speculative_tokens` tokens in all, which one step
    verifies under a mask of their own (Miao et al., 2023)."""

    kind: Literal["custom"] = "custom"
    tree: bool = False

    @model_validator(mode="after")
    def _has_one_length(self) -> CustomProposer:
        if self.tree and self.length == "adaptive":
            raise ValueError("length adaptive counts tokens of a chain; with tree, set length: fixed")
        return self


def _named(value: Any) -> Any:
    """Accept a kind alone, or a path, alone or in a mapping."""
    if isinstance(value, str):
        return {"kind": "custom", "path": value} if ":" in value else {"kind": value}
    if isinstance(value, dict) and "kind" not in value and "path" in value:
        return {**value, "kind": "custom"}
    return {"kind": "none"} if value is None else value


Speculation = NoSpeculation | PromptLookup | DraftModel | CustomProposer
SpeculationSetting = Annotated[Annotated[Speculation, Field(discriminator="kind")], BeforeValidator(_named)]
_SPECULATE: TypeAdapter[Speculation] = TypeAdapter(SpeculationSetting)


def proposes_trees(settings: Speculation) -> bool:
    """Return whether drafts may be trees."""
    return isinstance(settings, CustomProposer) and settings.tree


def parse_speculation(value: Any) -> Speculation:
    """Parse a kind, a path, a mapping or the value itself."""
    right = (
        "give none, prompt_lookup or draft, a path (mine.py:Proposer), or "
        "{kind: draft, model: demo-draft, num_speculative_tokens: 4}"
    )
    return parse_setting(_SPECULATE, value, "speculate", right)
