"""Define a request, its sampling parameters, and the sequence that it becomes. Integers and text only: no tensors."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, field_validator, model_validator

from workbench.display import Displayable, Table
from workbench.response_format import ResponseFormat, Thinking
from workbench.settings import Count, Fraction01, NonNegative, Settings, non_default_settings
from workbench.trace.events import PinnedPrefix, PromptLogprob

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
MAX_PARALLEL_SAMPLES = 1024
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
NumSamples = Annotated[int, Field(ge=1, le=MAX_PARALLEL_SAMPLES)]


class FinishReason(StrEnum):
    STOP = "stop"  # the end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    REFUSED = "refused"  # it can never run; no token was computed
    ERROR = "error"  # it failed during execution; other requests are unaffected
    MOVED = "moved"  # another engine goes on with it (see cluster/apart/handover.py)
    NOT_CHOSEN = "not_chosen"  # it finished, but other samples or beams of its request score higher


class CustomPart(Settings):
    """A user-defined filter, sampler, mask, score, attention, codec or program, by path.

    `path` is `package.module:Name`, `folder/file.py:Name`, or a name under which something was registered.
    """

    path: str  # package.module:Name, folder/file.py:Name, or a registered name
    arguments: dict[str, float | int | str | bool] = {}  # keyword arguments of its constructor

    @field_validator("arguments")
    @classmethod
    def _names(cls, value: dict) -> dict:
        wrong = next((name for name in value if not name.isidentifier()), None)
        if wrong is not None:
            raise ValueError(f"arguments have names as in Python, not {wrong!r}")
        return value

    def __hash__(self) -> int:
        return hash((self.path, tuple(sorted(self.arguments.items()))))


CustomPartSetting = Annotated[
    CustomPart, BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)
]  # a bare path has no arguments


class SamplingParameters(Displayable, Settings):
    """Parameters for sampling and stopping, with the names and meanings of vLLM and Hugging Face.

    Order: penalties, bias, temperature, top-k, top-p, min-p, user-defined filters, then one random number.
    """

    temperature: Annotated[float, Field(ge=0)] = 1.0  # 0: greedy
    top_k: NonNegative = 0  # number of most probable tokens to keep; 0: all
    # keep the most probable tokens with this total probability; 1: all, 0: only the most likely
    top_p: Fraction01 = 1.0
    # minimum probability relative to the most likely token; 0 keeps all
    min_p: Fraction01 = 0.0
    # divides the logit of each token that occurred, multiplies a negative one; 1 is off
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: float = 0.0  # subtracted once from the logit of each token in the output; 0 is off
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time it is in the output; 0 is off
    logit_bias: dict[int, float] = {}  # bias added to logits, by token id
    filters: tuple[CustomPart, ...] = ()  # user-defined filters, applied after the others
    sampler: CustomPart | None = None  # user-defined sampler
    # random seed: the same seed, prompt and settings give the same tokens
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    n: NumSamples = 1  # number of samples, with consecutive seeds; they share the prompt's pages
    # Number of samples; the n of them with the highest log-probability (of the model, summed over their
    # tokens) are samples 0 to n - 1, the best first. With more than n no event is emitted before all have finished.
    best_of: NumSamples | None = None
    # User-defined ranking of the samples of best_of, in place of the log-probability (see sampling/ranking.py).
    ranking: CustomPart | None = None
    # Beam search with this many beams, as in Hugging Face: no random numbers, the n best texts come at the end.
    beams: Annotated[int, Field(ge=0, le=MAX_PARALLEL_SAMPLES)] = 0
    search: CustomPart | None = None  # user-defined search (see decoding/search.py)
    length_penalty: float = 1.0  # for beams: a text's score is log-probability / tokens ** length_penalty
    early_stopping: bool | Literal["never"] = False  # for beams: end at `beams` finished texts (see decoding/beams.py)
    stop: tuple[str, ...] = ()  # texts that end the output and are removed from it
    stop_token_ids: tuple[int, ...] = ()  # further token ids that end the output
    max_tokens: Count = 128  # maximum number of output tokens
    ignore_eos: bool = False  # continue after the model's end tokens, up to max_tokens
    logprobs: NumLogprobs | None = None  # number of alternatives to show for each token; None: no log-probabilities
    # which log-probabilities: the model's, or those after temperature and filters
    logprobs_of: Literal["model", "filtered"] = "model"
    # Alternatives beside each token of the prompt, whose log-probabilities are the model's. Pages of the prefix cache
    # hold no logits: such a prompt is computed anew, and cached for others.
    prompt_logprobs: NumLogprobs | None = None
    # Format of the answer: json_schema, choices, regex or lark. Its last tokens complete it within max_tokens.
    response_format: ResponseFormat | None = None
    constraint: CustomPart | None = None  # user-defined constraint that forbids tokens, in place of response_format
    thinking: Thinking | None = None  # a thought before the answer; max_tokens counts only the answer

    def _display_table(self) -> Table:
        rows = list(non_default_settings(self))
        return Table("sampling", rows, note="" if rows else "every setting is its default")

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that one request becomes: beams, best_of or n."""
        return self.beams or self.best_of or self.n

    @property
    def max_output_tokens(self) -> int:
        """Return the largest number of output tokens, a thought included."""
        return self.max_tokens + (0 if self.thinking is None else self.thinking.extra_tokens)

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
        if len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, {len(value)} were given")
        if "" in value:
            raise ValueError("a stop string must not be empty")
        return value

    @model_validator(mode="after")
    def _several(self) -> SamplingParameters:
        if self.ranking is not None and (self.best_of is None or self.best_of <= self.n):
            raise ValueError("ranking chooses among the samples of best_of: set best_of above n")
        if self.num_sequences < self.n:
            name = "beams" if self.beams else "best_of"
            raise ValueError(f"{name} {self.num_sequences} is less than n, the number of returned samples")
        if self.search is not None and (not self.beams or self.n != 1):
            raise ValueError("a search advances the beams and returns one text: set beams, and leave out n")
        if self.constraint is not None and self.response_format is not None:
            raise ValueError("constraint and response_format both restrict the answer: give one")
        if not self.beams:
            if self.num_sequences > self.n and self.logprobs_of != "model":
                raise ValueError("best_of ranks by the model's log-probabilities: leave out logprobs_of")
            return self
        if self.best_of is not None:
            raise ValueError("beams and best_of both choose among samples: give one")
        plain = SamplingParameters(temperature=self.temperature if self.temperature == 0 else 1.0)
        for name in _DRAWN:
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(f"beam search takes the model's distribution as it is: leave out {name}")
        if self.stop:
            raise ValueError("beam search ends texts at tokens: give stop_token_ids in place of stop")
        return self


_DRAWN = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "filters", "sampler", "logprobs", "prompt_logprobs", "response_format",
    "constraint", "thinking",
)  # fmt: skip


class PrefixPin(NamedTuple):
    """A prefix of a prompt that should stay in the prefix cache for `seconds` after its last use (see
    kv_cache/pins.py).
    """

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Request(Displayable):
    """One prompt, and the parameters by which it is continued."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    prompt: str | None = None  # the prompt's text, if known
    arrival: float = 0.0  # seconds after the start of its stream
    cut_tokens: int = 0  # oldest prompt tokens removed by `overflow: cut_oldest`
    cache_salt: str = ""  # only requests with the same salt share cached pages
    invalid_reason: str = ""  # why its text could not be encoded: the message of its refusal
    priority: int = 0  # rank under `policy: priority`: smaller values go first
    tenant: str = ""  # owner, among whom `policy: fair` shares the engine
    deadline: float | None = None  # deadline of its last token, in seconds from its arrival
    predicted_tokens: int | None = None  # predicted number of output tokens
    pins: tuple[PrefixPin, ...] = ()  # prefixes of the prompt to keep cached, shortest first
    final_only: bool = False  # emit its text only at its end; no Decoded events, except with logprobs
    # Tokens that another engine sampled for it; it resumes after them (see engine/resume.py).
    generated_ids: tuple[int, ...] = ()

    def _display_table(self) -> Table:
        prompt = ("ids", _few(self.prompt_ids)) if self.prompt is None else ("prompt", _cut(self.prompt))
        rows: list[tuple[str, object]] = [prompt, ("prompt tokens", len(self.prompt_ids))]
        rows += [(f"sampling.{name}", value) for name, value in non_default_settings(self.sampling)]
        others = (each for each in fields(self) if each.name not in ("request_id", "prompt_ids", "prompt", "sampling"))
        rows += [(each.name, value) for each in others if (value := getattr(self, each.name)) != each.default]
        return Table(f"request {self.request_id}", rows)


def random_token_ids(draw: random.Random, vocab: int, count: int) -> tuple[int, ...]:
    """Return a prompt of `count` random tokens; every id below `vocab` is equally likely."""
    return tuple(draw.randrange(vocab) for _ in range(count))


def _few(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids[:16])) + (", ..." if len(ids) > 16 else "")


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-190:]}"


@dataclass(frozen=True)
class SwappedPages:
    """CPU pages of a preempted sequence, by cache group, in the layout of `Sequence.pages`."""

    num_computed_tokens: int
    cpu_pages: tuple[list[int], ...]
    num_evicted_tokens: int = 0


@dataclass
class StatePages:
    """Pages of a recurrent group to which the next step of a sequence writes states (see kv_cache/recurrent.py)."""

    spare: list[int] = field(default_factory=list)  # pages for the states after the last known token and each draft
    snapshots: dict[int, int] = field(default_factory=dict)  # by index of the page of tokens that ends there

    @property
    def all(self) -> list[int]:
        return [*self.spare, *self.snapshots.values()]


@dataclass(eq=False)
class Sequence:
    """A request in progress. Only the scheduler and the KV cache manager change the fields below `token_ids`.

        token_ids  | prompt ............ | output .......... |
        positions  0      num_computed_tokens ^ (keys and values before it, as far as queries see them, are in `pages`)

    With eviction, the remaining tokens lie one after another in text order. Positions are those of the text; slots in
    the pages are counted without the evicted tokens.

    A sequence decodes when one token is not yet computed. It is in prefill when more than one is not.
    """

    request: Request
    arrival_index: int  # order of arrival: the youngest has the largest index
    token_ids: list[int]
    length_limit: int = 0  # maximum number of its tokens
    length_class: int = 0  # class of rotary scaling by length: keys are shared only within a class
    num_computed_tokens: int = 0
    num_evicted_tokens: int = 0  # evicted ones of the computed tokens; each layer chooses its own
    pages: tuple[list[int], ...] = ()  # one list per cache group, in text order; NULL_PAGE where freed
    states: dict[int, StatePages] = field(default_factory=dict)  # by recurrent group: pages for states
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    arrival_step: int = 0  # the first step after its arrival
    arrival_time: float = 0.0  # arrival in seconds on the planning clock
    scheduled_step: int = 0  # the step in which it was last admitted
    allocated_until: int = 0  # number of known tokens with all their pages allocated
    next_page_boundary: int = 0  # computed tokens at which a page becomes full or unreachable
    swapped: SwappedPages | None = None
    children: list[Sequence] = field(default_factory=list, repr=False)  # samples or beams that start from its pages
    parent: Sequence | None = field(default=None, repr=False)  # parent of a child that has not started
    own_prompt: bool = False  # a child that starts with its parent and shares no page with it: a second stream
    num_shared_tokens: int = 0  # length of the prefix that it shares with its parent
    beams: list[Sequence] = field(default_factory=list, repr=False)  # beams of one search, itself included
    cached_tokens: int = 0  # number of tokens found in cached pages
    computed_tokens: int = 0  # number of tokens computed by its steps, recomputations included
    restored_tokens: int = 0  # number of tokens swapped in from the CPU
    written_tokens: int = 0  # number of computed tokens that are new to the prefix cache
    shared_pages: int = 0  # number of cached pages found, in all cache groups
    pinned: list[PinnedPrefix] = field(default_factory=list)  # results of the request's first pins
    prompt_logprobs: list[PromptLogprob] | None = None  # log-probabilities of the prompt's first tokens, if requested

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def prefix_salt(self) -> str:
        """Return the salt under which its pages are shared: the request's salt, together with the sequence's length
        class.
        """
        return f"{self.request.cache_salt}\0{self.length_class}" if self.length_class else self.request.cache_salt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def num_shared_by_children(self) -> int | None:
        """Return the number of tokens in the shortest prefix that a waiting child shares with it; None without such a
        child.
        """
        return min((child.num_shared_tokens for child in self.children if not child.own_prompt), default=None)

    @property
    def num_stored_tokens(self) -> int:
        """Return the number of tokens whose keys and values are in its pages."""
        return self.num_computed_tokens - self.num_evicted_tokens

    @property
    def num_new_tokens(self) -> int:
        """Return the number of tokens whose keys and values are not computed yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_scored_rows(self) -> int | None:
        """Return the number of prompt positions with log-probabilities so far; None if no more are needed. Later
        positions must be computed, since cached pages have no logits.
        """
        known = self.prompt_logprobs
        return None if known is None or len(known) == self.prompt_length else len(known) - 1

    @property
    def is_decoding(self) -> bool:
        return self.num_new_tokens == 1 and self.num_computed_tokens >= self.prompt_length

    @classmethod
    def from_request(cls, request: Request, arrival_index: int) -> Sequence:
        limit = len(request.prompt_ids) + request.sampling.max_output_tokens
        made = cls(request, arrival_index, [*request.prompt_ids, *request.generated_ids], limit)
        # Those of a prompt come before its first output token, so one that goes on after some has them.
        if request.sampling.prompt_logprobs is not None and request.prompt_ids and not request.generated_ids:
            made.prompt_logprobs = [PromptLogprob(request.prompt_ids[0], None)]
        return made
