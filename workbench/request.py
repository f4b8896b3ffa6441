"""What was asked, and what has been produced so far. Integers and text only: no tensor travels here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from workbench.shown import Brief, Shown, Table, differing

MOST_STOPS = 64
MOST_LOGPROBS = 100
MOST_SAMPLES = 1024


class FinishReason(StrEnum):
    STOP = "stop"  # the end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    REFUSED = "refused"  # it could never have run; nothing was computed
    ERROR = "error"  # it ran and broke; the others did not
    NOT_CHOSEN = "not_chosen"  # it ended well, but others of its request's samples or beams are better


class UserPart(Brief, BaseModel):
    """A filter, sampler, mask, score or attention of the user's own: `path` is `package.module:Name`,
    `folder/file.py:Name`, or a name under which something was registered."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    arguments: dict[str, float | int | str | bool] = {}

    @field_validator("arguments")
    @classmethod
    def _names(cls, value: dict) -> dict:
        wrong = next((name for name in value if not name.isidentifier()), None)
        if wrong is not None:
            raise ValueError(f"arguments have names as in Python, not {wrong!r}")
        return value

    def __hash__(self) -> int:
        return hash((self.path, tuple(sorted(self.arguments.items()))))


class SamplingParameters(Brief, Shown, BaseModel):
    """How the next token is chosen and when to end; names and meanings as in vLLM and Hugging Face.

    Order: penalties, bias, temperature, top-k, top-p, min-p, the user's filters, one draw.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0)] = 1.0  # 0 is greedy
    top_k: Annotated[int, Field(ge=0)] = 0  # 0 keeps all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    filters: tuple[UserPart, ...] = ()
    sampler: UserPart | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1  # samples, with seeds counted up, on one prompt's pages
    # So many samples are drawn, and the n of them with the highest log-probability (of the model, summed over their
    # tokens) are samples 0 to n - 1, the best first. With more than n nothing is told of any before all have ended.
    best_of: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    # Beam search with so many beams, as in Hugging Face; nothing is drawn, the n best texts come when it is over.
    beams: Annotated[int, Field(ge=0, le=MOST_SAMPLES)] = 0
    length_penalty: float = 1.0  # of beams: a text's score is its log-probability / tokens ** length_penalty
    early_stopping: bool | Literal["never"] = False  # of beams: see engine/beam_search.py
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: Annotated[int, Field(ge=1)] = 128
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None  # how many beside the chosen one
    logprobs_of: Literal["model", "filtered"] = "model"

    def _shown(self) -> Table:
        rows = list(differing(self))
        return Table("sampling", rows, note="" if rows else "every setting is its default")

    @property
    def samples(self) -> int:
        """Sequences that one request becomes."""
        return self.beams or self.best_of or self.n

    @field_validator("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MOST_STOPS:
            raise ValueError(f"at most {MOST_STOPS} stop strings, {len(value)} were given")
        if "" in value:
            raise ValueError("a stop string must not be empty")
        return value


    @model_validator(mode="after")
    def _several(self) -> SamplingParameters:
        if self.samples < self.n:
            name = "beams" if self.beams else "best_of"
            raise ValueError(f"{name} {self.samples} is less than n: n of them are to be returned")
        if not self.beams:
            if self.samples > self.n and self.logprobs_of != "model":
                raise ValueError("best_of ranks by the model's log-probabilities: leave out logprobs_of")
            return self
        if self.best_of is not None:
            raise ValueError("beams and best_of are two ways to choose: give one")
        plain = SamplingParameters(temperature=self.temperature if self.temperature == 0 else 1.0)
        for name in _DRAWN:
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(f"beam search takes the model's distribution as it is: leave out {name}")
        if self.stop:
            raise ValueError("beam search ends texts at tokens: give stop_token_ids in place of stop")
        return self


_DRAWN = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "filters", "sampler", "logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class Request(Shown):
    """One prompt and how to continue it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    prompt: str | None = None  # as text, where there was text
    arrival: float = 0.0  # seconds after the stream it is part of began
    cut_tokens: int = 0  # how many of the oldest prompt tokens `overflow: cut_oldest` removed
    cache_salt: str = ""  # whose prompts these are: only requests with the same salt share cached pages
    fault: str = ""  # why its text could not become ids; it is refused with these words
    priority: int = 0  # for `policy: priority`: the smaller, the sooner
    tenant: str = ""  # for `policy: fair`: who shares the machine with other tenants
    whole: bool = False  # its text comes at its end, all at once; no Decoded is told of it (with logprobs they are)

    def _shown(self) -> Table:
        prompt = ("ids", _few(self.prompt_ids)) if self.prompt is None else ("prompt", _cut(self.prompt))
        rows: list[tuple[str, object]] = [prompt, ("prompt tokens", len(self.prompt_ids))]
        rows += [(f"sampling.{name}", value) for name, value in differing(self.sampling)]
        others = (each for each in fields(self) if each.name not in ("request_id", "prompt_ids", "prompt", "sampling"))
        rows += [(each.name, value) for each in others if (value := getattr(self, each.name)) != each.default]
        return Table(f"request {self.request_id}", rows)


def _few(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids[:16])) + (", ..." if len(ids) > 16 else "")


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-190:]}"


@dataclass(frozen=True)
class Saved:
    """Where a sequence's pages lie while it has none: places on the host by table, as `Sequence.pages` has them."""

    computed: int
    places: tuple[list[int], ...]
    evicted: int = 0


@dataclass(eq=False)
class Sequence:
    """A request under way. Only the scheduler and its holdings change what stands below `token_ids`.

        token_ids  | prompt ............ | output .......... |
        positions  0      computed ^ (keys and values stand in `pages` for all before it that a query can still see)

    With tokens evicted, those that stay lie one after another, in the order of the text: positions are the text's, and
    places in the pages are counted without the evicted.

    A sequence decodes when one token is not yet computed, and is in prefill when more are.
    """

    request: Request
    order: int  # arrival order: the youngest has the largest
    token_ids: list[int]
    computed: int = 0
    evicted: int = 0  # of those, by each layer as many, though not the same
    pages: tuple[list[int], ...] = ()  # one list a table, in the order of the text; NULL_PAGE where given back
    finish_reason: FinishReason | None = None
    set_backs: int = 0
    since: int = 0  # the step before which it came
    began: int = 0  # the step in which it was last admitted
    covered: int = 0  # with so many tokens known, no page is missing
    due: int = 0  # with so many tokens computed, a page is full or dead
    saved: Saved | None = None
    followers: list[Sequence] = field(default_factory=list, repr=False)  # they begin on its pages
    leader: Sequence | None = field(default=None, repr=False)  # of a follower that has not begun
    joins: int = 0  # and with how many tokens it will: what it has in common with its leader
    mates: list[Sequence] = field(default_factory=list, repr=False)  # beams of one search, itself too: a step takes all
    cached_tokens: int = 0  # not computed, but found in pages that were there
    computed_tokens: int = 0  # by its steps, more than once after a set-back
    restored_tokens: int = 0  # come back from the host
    written_tokens: int = 0  # computed and entered into the prefix index, which knew nothing of them
    shared_pages: int = 0  # of those found, by all tables together

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def held(self) -> int:
        """Tokens whose keys and values have places in its pages."""
        return self.computed - self.evicted

    @property
    def waiting_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.computed

    @classmethod
    def of(cls, request: Request, order: int) -> Sequence:
        return cls(request=request, order=order, token_ids=list(request.prompt_ids))
