"""Define the settings of speculative decoding. Their names are vLLM's where vLLM has such a setting."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from workbench.request import CustomPart
from workbench.settings import Settings, parse_setting

TARGET = "target"  # name for the target itself as the draft model


class NoSpeculation(Settings):
    """Decode one token per step."""

    kind: Literal["none"] = "none"


class _DraftSettings(Settings):
    """Settings of all proposers.

    With `length: adaptive` a sequence gets two more draft tokens after all were accepted, up to
    `num_speculative_tokens`, and one fewer after any other verification (as in Hugging Face's assisted generation).
    `accept` is the acceptance rule. `rejection` accepts at the rate of the distributions' overlap. `match` accepts only
    the tokens that would be sampled without drafts, so outputs are equal token for token for the same seed.
    """

    num_speculative_tokens: Annotated[int, Field(ge=1, le=63)] = 4  # maximum draft tokens per step
    # adaptive: two more draft tokens after all were accepted, one fewer otherwise
    length: Literal["fixed", "adaptive"] = "fixed"
    # match: same tokens as without drafts; rejection: same distribution
    accept: Literal["rejection", "match"] = "rejection"


class PromptLookup(_DraftSettings):
    """Propose the tokens that followed the latest earlier occurrence of the last tokens: the longest n-gram of
    `max_ngram` down to `min_ngram` tokens that occurred before.
    """

    kind: Literal["prompt_lookup"] = "prompt_lookup"
    min_ngram: Annotated[int, Field(ge=1)] = 2  # minimum length of the repeated n-gram
    max_ngram: Annotated[int, Field(ge=1)] = 4  # maximum length of the repeated n-gram, tried first

    @model_validator(mode="after")
    def _in_order(self) -> PromptLookup:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")
        return self


class DraftModel(_DraftSettings):
    """A small model with the same tokenizer: `demo-draft` or a folder, on the target's device, in `dtype`, on
    `backend`.

    A draft ends before the first token with low confidence: where the probability of the draft's most likely token is
    below `confidence_threshold` (transformers' `assistant_confidence_threshold`; llama.cpp's `draft-p-min` also stops
    before that token). 0 never stops. `stop` is a user-defined rule instead (see
    `workbench.speculative.draft_model.StopRule`). Neither changes the outputs: see `DraftModelProposer`.

    `model: target` drafts with the target itself, with only the given `layers` (default: all): the draft shares their
        weights, and has its own cache.
    """

    kind: Literal["draft"] = "draft"
    model: str = "demo-draft"  # name or folder; target: layers of the target itself
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    backend: str | None = None  # backend of the draft model; None: the target's
    confidence_threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    stop: CustomPart | None = None  # (probabilities [row, vocab], request ids) -> whether each draft ends [row]
    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = (
        None  # layers of the target that draft, with model: target
    )

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
            raise ValueError(f"layers choose layers of the target; set model: {TARGET}")
        if self.layers is not None and any(a >= b for a, b in pairwise(self.layers)):
            raise ValueError(f"layers must ascend, each named once, not {list(self.layers)}")
        if self.is_target and (self.dtype != "auto" or self.backend is not None):
            raise ValueError(f"model: {TARGET} has the target's dtype and backend; leave dtype and backend out")
        return self


class CustomProposer(_DraftSettings, CustomPart):
    """A user-defined proposer: a class, constructed with the `SpeculationTarget` and `arguments` (see
    `workbench.speculative.proposers.Proposer`).

    With `tree` its drafts may be trees (see `Draft.parents`) of up to `num_speculative_tokens` tokens, which one step
    verifies under a tree mask (Miao et al., 2023).
    """

    kind: Literal["custom"] = "custom"
    tree: bool = False

    @model_validator(mode="after")
    def _has_one_length(self) -> CustomProposer:
        if self.tree and self.length == "adaptive":
            raise ValueError("length adaptive counts tokens of a chain; with tree, set length: fixed")
        return self


def _named(value: Any) -> Any:
    """Accept a bare kind, a bare path, or a mapping."""
    if isinstance(value, str):
        return {"kind": "custom", "path": value} if ":" in value else {"kind": value}
    if isinstance(value, dict) and "kind" not in value and "path" in value:
        return {**value, "kind": "custom"}
    return {"kind": "none"} if value is None else value


Speculation = NoSpeculation | PromptLookup | DraftModel | CustomProposer
SpeculationSetting = Annotated[Annotated[Speculation, Field(discriminator="kind")], BeforeValidator(_named)]
_SPECULATE: TypeAdapter[Speculation] = TypeAdapter(SpeculationSetting)


def proposes_trees(settings: Speculation) -> bool:
    """Return whether the drafts of these settings may be trees."""
    return isinstance(settings, CustomProposer) and settings.tree


def parse_speculation(value: Any) -> Speculation:
    """Parse the settings of speculation, given as a kind, a path, a mapping or the settings themselves."""
    right = (
        "give none, prompt_lookup or draft, a path (mine.py:Proposer), or "
        "{kind: draft, model: demo-draft, num_speculative_tokens: 4}"
    )
    return parse_setting(_SPECULATE, value, "speculate", right)
