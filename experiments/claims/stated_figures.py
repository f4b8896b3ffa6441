"""Figures of claims on absolute figures that the sources state, which contradict each other by four to eight times.

For each figure the roofline tells the models, formats, batches and machines for which it is right, and those for which
it cannot be. A roofline is a lower bound on time. Good engines reach between 40% and 100% of it (gpt-fast: 68% of the
bandwidth in bfloat16, 42% in INT4; prefill here at 55 to 67% of the arithmetic, prefill_decode_length-20261121-165935).
A figure is *right* for a machine if a time within it lies between the bound and the bound over 0.4. Else the bound is
longer than the whole figure, or every time in it is so long that nothing but the software would take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import NamedTuple

from workbench.display import Table
from workbench.economics.prices import DEFAULT_TABLE, load_prices
from workbench.memory.report import report_for
from workbench.model.shapes import named_shape
from workbench.simulate.roofline import HARDWARE, ModelSizes, roofline_step_times
from workbench.simulate.step_times import TICKS_PER_SECOND, StepTimeModel, step_work_of

MIN_ROOFLINE_SHARE = 0.4  # of the roofline, at least, by a good engine
MAX_MEMORY_SHARE = 0.9  # of the memory may be weights and cache
MODELS = ("smollm2-135m", "tinyllama-1.1b", "llama-3.1-8b", "llama-2-13b", "llama-3.1-70b", "gpt-3-175b")
FORMATS = {"16 bits": "dense", "INT8": "int8", "INT4": "int4"}
MACHINES = (("m2-ultra", 1), ("rtx-4090", 1), *((name, count) for name in ("a100", "h100", "h200", "b200")
            for count in (1, 2, 4, 8)))  # fmt: skip
BATCHES = (1, 8, 32)
DEFAULT_CONTEXT = 1000  # of context, where a figure says none


class StatedFigure(NamedTuple):
    """A stated figure: its name, and its lower and upper end."""

    name: str
    least: float
    most: float

    @classmethod
    def about(cls, name: str, value: float) -> StatedFigure:
        """Make a figure of a single number, within a fifth."""
        return cls(name, 0.8 * value, 1.2 * value)

    def is_right(self, bound: float, slack: float) -> bool:
        """Return whether a value within the figure lies between `bound` and `bound` / `slack`."""
        return bound <= self.most and bound / slack >= self.least


@dataclass(frozen=True)
class ServedModel:
    """A model in a format, served on `gpus` of a machine in batches of `batch`."""

    model: str
    format: str = "16 bits"
    hardware: str = "h100"
    gpus: int = 1
    batch: int = 1

    @property
    def machine_name(self) -> str:
        return f"{self.gpus} x {self.hardware}"

    @property
    def model_name(self) -> str:
        return f"{self.model} in {self.format}"

    def __str__(self) -> str:
        return f"{self.model_name} on {self.machine_name}" + (f", batch {self.batch}" if self.batch > 1 else "")

    def fits(self, tokens: int) -> bool:
        """Return whether weights and the cache of a batch with so many tokens each fit its memory."""
        room = MAX_MEMORY_SHARE * self.gpus * HARDWARE[self.hardware].memory
        return weights(self.model, self.format) + self.batch * tokens * cache_bytes(self.model) <= room

    def prefill(self, tokens: int, known: int = 0) -> float:
        """Return the least seconds of one step that computes `tokens` after `known` others."""
        return self._seconds([(known, tokens)])

    def decode(self, tokens: int) -> float:
        """Return the least seconds of a step in which each sequence of the batch has `tokens` before it."""
        return self._seconds([(tokens, 1)] * self.batch)

    def _seconds(self, spans: list[tuple[int, int]]) -> float:
        times = step_times(self.model, self.format, self.hardware, self.gpus)
        return times(step_work_of(spans, len(spans), times.kinds)) / TICKS_PER_SECOND


@cache
def weights(model: str, format: str) -> float:
    """Return the bytes of the weights, with scales; the embedding stays in 16 bits."""
    return report_for(f"shape:{model}", context=1, dtype="bfloat16", weights=FORMATS[format])["weight_bytes"]


@cache
def cache_bytes(model: str) -> float:
    """Return the bytes of a token in the cache, in 16 bits."""
    return report_for(f"shape:{model}", context=1, dtype="bfloat16")["cache_bytes_per_token"]


@cache
def step_times(model: str, format: str, hardware: str, gpus: int) -> StepTimeModel:
    """Return the roofline; products are of 16 bits in every format, as weights in few bits are widened."""
    sizes = ModelSizes.dense(named_shape(model))
    return roofline_step_times(replace(sizes, weight_bytes=weights(model, format)), HARDWARE[hardware], gpus)


def served_models(
    models: Iterable[str] = MODELS,
    machines: Iterable[tuple[str, int]] = MACHINES,
    formats: Iterable[str] = tuple(FORMATS),
    batches: Iterable[int] = BATCHES,
    tokens: int = DEFAULT_CONTEXT,
) -> list[ServedModel]:
    """Return all combinations that fit their machine's memory, of models with at least so much context."""
    machines, formats, batches = list(machines), list(formats), list(batches)
    able = [model for model in models if named_shape(model).max_position_embeddings >= tokens]
    every = [
        ServedModel(m, f, name, gpus, b) for m in able for f in formats for name, gpus in machines for b in batches
    ]
    return [each for each in every if each.fits(tokens)]


class Cases(NamedTuple):
    """Stated figures, and the least values for the models, formats, batches and machines tried, by name. A real value
    is at most 1 / `slack` times as large; 1 where these are the values."""

    figures: Sequence[StatedFigure]
    bounds: Mapping[str, float]
    slack: float = 1.0


def right_shares(what: str) -> dict[str, float]:
    """Return, of the models, formats, batches and machines tried, the least share for which a stated figure is right,
    and each figure's share."""
    shares = {
        figure.name: fmean(figure.is_right(bound, cases.slack) for bound in cases.bounds.values())
        for cases in TRIED[what]()
        for figure in cases.figures
    }
    return {"least_right_share": min(shares.values())} | {f"right, {name}": share for name, share in shares.items()}


def right_cases(what: str) -> Sequence[Table]:
    """Tabulate where each figure is right: a row for what is tried, and in a figure's column the machines with their
    bounds or values."""
    tables = []
    for cases in TRIED[what]():
        rows: dict[str, list[list[str]]] = {}
        for name, bound in cases.bounds.items():
            tried, _, machine = name.partition(" on ")
            cells = rows.setdefault(tried, [[] for _ in cases.figures])
            for cell, figure in zip(cells, cases.figures, strict=True):
                cell += [f"{machine}: {bound:,.3g}" if machine else f"{bound:,.3g}"] * figure.is_right(
                    bound, cases.slack
                )
        lines = [(tried, *("; ".join(cell) or "-" for cell in cells)) for tried, cells in rows.items()]
        tables.append(Table("Where each figure is right", lines, ("of", *(figure.name for figure in cases.figures))))
    return tables


PREFILL = {
    1000: (StatedFigure("1,000 tokens in 200 to 400 ms", 0.2, 0.4), StatedFigure.about("1,000 tokens in 50 ms", 0.05)),
    10_000: (StatedFigure.about("10,000 tokens in 500 ms", 0.5),),
    100_000: (StatedFigure.about("100,000 tokens in 5 s", 5.0),),
}


def prefill_times() -> list[Cases]:
    return [
        Cases(figures, {str(each): each.prefill(tokens) for each in served_models(batches=(1,), tokens=tokens)},
              MIN_ROOFLINE_SHARE)
        for tokens, figures in PREFILL.items()
    ]  # fmt: skip


DECODE = (
    StatedFigure("40 to 80 ms a token", 0.04, 0.08),
    StatedFigure("20 to 30 ms a token", 0.02, 0.03),
    StatedFigure("5 to 20 ms a token", 0.005, 0.02),
)


def token_times() -> list[Cases]:
    bounds = {str(each): each.decode(DEFAULT_CONTEXT) for each in served_models()}
    return [Cases(DECODE, bounds, MIN_ROOFLINE_SHARE)]


def read_bytes(model: str, format: str, batch: int = 1, tokens: int = DEFAULT_CONTEXT) -> float:
    """Return the bytes that a step of a batch reads, divided by its tokens: shared weights, and each sequence's cache.

    The embedding, of which a row a token is read, is left out where the head has a matrix of its own.
    """
    spec = named_shape(model)
    embedding = 0 if spec.tie_word_embeddings else 2 * spec.vocab_size * spec.hidden_size
    return (weights(model, format) - embedding) / batch + tokens * cache_bytes(model)


def bytes_read() -> list[Cases]:
    """Return the bytes read a token, for models with at least so much context."""
    sizes = {
        f"{model} in {format}, batch {batch}, {tokens:,} tokens": read_bytes(model, format, batch, tokens)
        for model in MODELS for format in FORMATS for batch in BATCHES for tokens in (DEFAULT_CONTEXT, 32_000)
        if named_shape(model).max_position_embeddings >= tokens
    }  # fmt: skip
    return [Cases((StatedFigure("30 to 200 GB", 30e9, 200e9),), sizes)]


def savings() -> list[Cases]:
    """Return the shares of a prompt's prefill time (by the roofline) and price that a cached beginning saves."""
    prices = load_prices(DEFAULT_TABLE)
    read = float(prices.token_price("cache_read") / prices.token_price("input"))
    saved = {}
    for share in (0.5, 0.8, 0.9, 0.95, 0.99):
        saved[f"{share:.0%} known, price (read at {read:g})"] = share * (1 - read)
        for each in (ServedModel("llama-3.1-8b"), ServedModel("llama-3.1-70b", gpus=4)):
            for prompt in (1000, 10_000, 100_000):
                start = round(share * prompt)
                left = each.prefill(prompt - start, start) / each.prefill(prompt)
                saved[f"{share:.0%} of {prompt:,} tokens known, time, {each}"] = 1 - left
    return [Cases((StatedFigure("70 to 90% saved", 0.7, 0.9),), saved)]


PAIRS = (("llama-2-13b", "llama-3.1-8b"), ("llama-3.1-70b", "llama-2-13b"), ("llama-3.1-70b", "llama-3.1-8b"),
         ("gpt-3-175b", "llama-3.1-70b"), ("gpt-3-175b", "llama-3.1-8b"), ("llama-3.1-8b", "tinyllama-1.1b"),
         ("tinyllama-1.1b", "smollm2-135m"))  # fmt: skip
PLACES = (("h100", 8), ("a100", 8), ("b200", 4))


def small_models() -> list[Cases]:
    """Return the speed of the smaller of two models on one machine, in 16 bits, by the roofline of each."""
    times = {}
    for large, small in PAIRS:
        for hardware, gpus in PLACES:
            for batch in (1, 32):
                two = [ServedModel(model, "16 bits", hardware, gpus, batch) for model in (large, small)]
                if not all(each.fits(DEFAULT_CONTEXT) for each in two):
                    continue
                pair, place = f"{small} for {large}", f"on {two[0].machine_name}"
                decode = [each.decode(DEFAULT_CONTEXT) for each in two]
                times[f"{pair}, decode, batch {batch} {place}"] = decode[0] / decode[1]
                if batch == 1:
                    prefill = [each.prefill(DEFAULT_CONTEXT) for each in two]
                    times[f"{pair}, prefill of 1,000 {place}"] = prefill[0] / prefill[1]
    return [Cases((StatedFigure("2 to 3 times as fast", 2.0, 3.0),), times)]


def widths() -> list[Cases]:
    """Return for each model 0 if its hidden size is 12,288 and it has 96 layers, else 1."""
    shapes = {model: named_shape(model) for model in MODELS}
    others = {
        f"{model} ({spec.hidden_size:,} wide, {len(spec.layers)} layers, {spec.num_parameters / 1e9:,.3g} x 10^9)":
        float((spec.hidden_size, len(spec.layers)) != (12_288, 96))
        for model, spec in shapes.items()
    }  # fmt: skip
    return [Cases((StatedFigure("12,288 wide and 96 layers", 0.0, 0.5),), others)]


TRIED = {
    "prefill times": prefill_times,
    "token times": token_times,
    "bytes read": bytes_read,
    "savings": savings,
    "small models": small_models,
    "widths": widths,
}
