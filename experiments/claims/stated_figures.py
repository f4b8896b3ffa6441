"""Claims on absolute figures that the sources state, which contradict each other by four to eight times.

For each figure the roofline tells the models, formats, batches and machines for which it is right, and those for which
it cannot be. A roofline is a lower bound on time. Good engines reach between 40% and 100% of it (gpt-fast: 68% of the
bandwidth in bfloat16, 42% in INT4; prefill here at 55 to 67% of the arithmetic, prefill_decode_length-20261121-165935).
A figure is *right* for a machine if a time within it lies between the bound and the bound over 0.4. It *cannot be* if
the bound is longer than the whole figure. It is *slow* if every time in it is longer than the bound over 0.4: nothing
but the software would take that long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from workbench.claims.claim import (
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    Ruling,
)
from workbench.display import Table
from workbench.economics.prices import DEFAULT_TABLE, load_prices
from workbench.experiment.verdict import Outcome
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
NAMED = "rooflines of " + ", ".join(dict(MACHINES))


class StatedFigure(NamedTuple):
    """A stated figure: its name, and its lower and upper end."""

    name: str
    least: float
    most: float

    @classmethod
    def about(cls, name: str, value: float) -> StatedFigure:
        """Make a figure of a single number, within a fifth."""
        return cls(name, 0.8 * value, 1.2 * value)


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


TIMES = ("cannot be", "slow")  # names for a bound above the figure, and a time below it
EXACT = ("more", "less")


def classify_figures(
    figures: Iterable[StatedFigure],
    bounds: Mapping[str, float],
    slack: float = MIN_ROOFLINE_SHARE,
    words: tuple[str, str] = TIMES,
) -> EvidenceNumbers:
    """Classify each figure: the names of cases for which it is right, and of those for which it is not, in two ways.

    Args:
        figures: the stated figures.
        bounds: the least values, by name.
        slack: a real value is at most 1 / `slack` times its bound; 1 where the bounds are the values.
        words: the names of the two ways: the bound is above the figure, or the real value is below it.
    """
    above, below = words
    found = {}
    for figure in figures:
        states: dict[str, list[str]] = {"right": [], above: [], below: []}
        for name, bound in bounds.items():
            states[above if bound > figure.most else below if bound / slack < figure.least else "right"].append(name)
        found[figure.name] = states
    return found


def figures_hold(found: EvidenceNumbers) -> Ruling:
    """Each figure is right for every model, format, batch and machine tried: holds; each is right for some: with
    limits, which say for how many and for which; a figure is right for none: refuted."""
    tried = {name: sum(map(len, states.values())) for name, states in found.items()}
    right = {name: states["right"] for name, states in found.items()}
    every = all(len(right[name]) == tried[name] for name in found)
    return Ruling(
        "refuted" if not all(right.values()) else "holds" if every else "holds-with-limits",
        "; ".join(
            f"{name}, of {tried[name]}: "
            + ", ".join(f"{state} for {len(names)} ({_some(names)})" for state, names in states.items())
            for name, states in found.items()
        ),
        "; ".join(f"{name}: {_some(names)}" for name, names in right.items()),
        {f"share that is right, {name}": len(right[name]) / tried[name] for name in found},
    )


def _some(names: Sequence[str], most: int = 3) -> str:
    """Join the first, a middle and the last name: the table has all of them."""
    if not names:
        return "none"
    places = sorted({round(i * (len(names) - 1) / max(most - 1, 1)) for i in range(most)})
    return ", ".join(names[place] for place in places) + (", ..." if len(names) > len(places) else "")


# Prefill

PREFILL = {
    1000: (StatedFigure("1,000 tokens in 200 to 400 ms", 0.2, 0.4), StatedFigure.about("1,000 tokens in 50 ms", 0.05)),
    10_000: (StatedFigure.about("10,000 tokens in 500 ms", 0.5),),
    100_000: (StatedFigure.about("100,000 tokens in 5 s", 5.0),),
}


def prefills(machines: Iterable[tuple[str, int]] = MACHINES) -> EvidenceNumbers:
    found, machines = {}, list(machines)
    for tokens, figures in PREFILL.items():
        mine = served_models(machines=machines, batches=(1,), tokens=tokens)
        found |= classify_figures(figures, {str(each): each.prefill(tokens) for each in mine})
    return found


def prefill_table(records: object) -> Sequence[Table]:
    return [
        found
        for tokens, figures in PREFILL.items()
        for found in tables(f"Prefill of {tokens:,} tokens by the roofline, ms", figures,
                            lambda each, n=tokens: each.prefill(n), served_models(batches=(1,), tokens=tokens))
    ]  # fmt: skip


# Decode

DECODE = (
    StatedFigure("40 to 80 ms a token", 0.04, 0.08),
    StatedFigure("20 to 30 ms a token", 0.02, 0.03),
    StatedFigure("5 to 20 ms a token", 0.005, 0.02),
)


def decodes(options: Sequence[ServedModel] | None = None) -> EvidenceNumbers:
    mine = served_models() if options is None else options
    return classify_figures(DECODE, {str(each): each.decode(DEFAULT_CONTEXT) for each in mine})


def decode_table(records: object) -> Sequence[Table]:
    return [
        found
        for batch in BATCHES
        for found in tables(f"A decode step of {batch} at {DEFAULT_CONTEXT:,} tokens of context by the roofline, ms",
                            DECODE, lambda each: each.decode(DEFAULT_CONTEXT), served_models(batches=(batch,)))
    ]  # fmt: skip


def tables(
    title: str, figures: Sequence[StatedFigure], bound: Callable[[ServedModel], float], options: Sequence[ServedModel]
) -> list[Table]:
    """Return tables with a row a model and format, and a column a machine, for the fewest machines that fit and for
    eight.

    A cell has the number of machines, the bound in ms, a letter for each figure that is right, and one after a ! for
    each that cannot be.
    """
    letters = dict(zip("abc", figures, strict=False))
    figure_names = "; ".join(f"{letter}: {figure.name}" for letter, figure in letters.items())
    legend = f"-: does not fit; {figure_names}; after a !: cannot be; no letter: slow"
    whats = list(dict.fromkeys(each.model_name for each in options))

    def cell(what: str, hardware: str, least: int) -> str:
        mine = [o for o in options if o.model_name == what and o.hardware == hardware and o.gpus >= least]
        if not mine:
            return "-"
        each = min(mine, key=lambda one: one.gpus)
        seconds = bound(each)
        states = {letter: classify_figures([figure], {"": seconds})[figure.name] for letter, figure in letters.items()}
        right, not_so = ("".join(k for k, state in states.items() if state[way]) for way in ("right", "cannot be"))
        return f"{each.gpus} x: {seconds * 1e3:,.3g} {right}{'!' + not_so if not_so else ''}".strip()

    def of(least: int, words: str) -> Table:
        names = [name for name, most in dict(MACHINES).items() if most >= least]
        rows = [(what, *(cell(what, name, least) for name in names)) for what in whats]
        return Table(f"{title}, {words} ({legend})", rows, ("model", *names))

    return [of(1, "on the fewest that hold the model"), of(8, "on eight")]


# Bytes that a token reads

READ = (StatedFigure("30 to 200 GB", 30e9, 200e9),)
READ_CASES = tuple((batch, tokens) for batch in BATCHES for tokens in (DEFAULT_CONTEXT, 32_000))


def read_bytes(model: str, format: str, batch: int = 1, tokens: int = DEFAULT_CONTEXT) -> float:
    """Return the bytes that a step of a batch reads, divided by its tokens: shared weights, and each sequence's cache.

    The embedding, of which a row a token is read, is left out where the head has a matrix of its own.
    """
    spec = named_shape(model)
    embedding = 0 if spec.tie_word_embeddings else 2 * spec.vocab_size * spec.hidden_size
    return (weights(model, format) - embedding) / batch + tokens * cache_bytes(model)


def reads(models: Iterable[str] = MODELS, readers: Iterable[tuple[int, int]] = READ_CASES) -> EvidenceNumbers:
    """Classify the bytes read a token, for models with at least so much context."""
    readers = list(readers)
    sizes = {
        f"{model} in {format}, batch {batch}, {tokens:,} tokens": read_bytes(model, format, batch, tokens)
        for model in models for format in FORMATS for batch, tokens in readers
        if named_shape(model).max_position_embeddings >= tokens
    }  # fmt: skip
    return classify_figures(READ, sizes, 1.0, EXACT)


def read_table(records: object) -> Sequence[Table]:
    rows = []
    for model in MODELS:
        for format in FORMATS:
            sizes = [read_bytes(model, format, *each) if named_shape(model).max_position_embeddings >= each[1] else None
                     for each in READ_CASES]  # fmt: skip
            rows.append((f"{model} in {format}", *(
                "-" if size is None else f"{size / 1e9:,.3g}{' a' if READ[0].least <= size <= READ[0].most else ''}"
                for size in sizes)))  # fmt: skip
    headings = ("model", *(f"batch {batch}, {tokens:,}" for batch, tokens in READ_CASES))
    return [Table("GB read for a token, by batch and tokens of context (a: 30 to 200 GB)", rows, headings)]


# Savings of a known beginning of the prompt

SAVED = (StatedFigure("70 to 90% saved", 0.7, 0.9),)
KNOWN = (0.5, 0.8, 0.9, 0.95, 0.99)
PROMPTS = (1000, 10_000, 100_000)


def savings(known: Iterable[float] = KNOWN, prompts: Iterable[int] = PROMPTS) -> EvidenceNumbers:
    """Classify the shares of a prompt's prefill time (by the roofline) and price that a cached beginning saves."""
    return classify_figures(SAVED, saved_shares(known, prompts), 1.0, EXACT)


def saved_shares(known: Iterable[float] = KNOWN, prompts: Iterable[int] = PROMPTS) -> dict[str, float]:
    prices = load_prices(DEFAULT_TABLE)
    read = float(prices.token_price("cache_read") / prices.token_price("input"))
    found, prompts = {}, list(prompts)
    for share in known:
        found[f"{share:.0%} known, price (read at {read:g})"] = share * (1 - read)
        for each in (ServedModel("llama-3.1-8b"), ServedModel("llama-3.1-70b", gpus=4)):
            for prompt in prompts:
                start = round(share * prompt)
                found[f"{share:.0%} of {prompt:,} tokens known, time, {each}"] = 1 - each.prefill(
                    prompt - start, start
                ) / each.prefill(prompt)
    return found


def saved_table(records: object) -> Sequence[Table]:
    columns = {f"{share:.0%} known": saved_shares([share]) for share in KNOWN}
    names = [name.split(" known, ")[1] if "tokens" not in name else
             f"{name.split(' of ', 1)[1].split(' tokens')[0]} tokens, {name.split('time, ')[1]}"
             for name in saved_shares([KNOWN[0]])]  # fmt: skip
    cells = zip(*(found.values() for found in columns.values()), strict=True)
    rows = [(name, *(f"{value:.0%}{' a' if SAVED[0].least <= value <= SAVED[0].most else ''}" for value in values))
            for name, values in zip(names, cells, strict=True)]  # fmt: skip
    return [Table("Saved of prefill time and of the price (a: 70 to 90%)", rows, ("of", *columns))]


# Small models

SMALLER = (StatedFigure("2 to 3 times as fast", 2.0, 3.0),)
PAIRS = (("llama-2-13b", "llama-3.1-8b"), ("llama-3.1-70b", "llama-2-13b"), ("llama-3.1-70b", "llama-3.1-8b"),
         ("gpt-3-175b", "llama-3.1-70b"), ("gpt-3-175b", "llama-3.1-8b"), ("llama-3.1-8b", "tinyllama-1.1b"),
         ("tinyllama-1.1b", "smollm2-135m"))  # fmt: skip
PLACES = (("h100", 8), ("a100", 8), ("b200", 4))


def small_models(pairs: Iterable[tuple[str, str]] = PAIRS, batches: Iterable[int] = (1, 32)) -> EvidenceNumbers:
    """Classify the speed of the smaller of two models on one machine, in 16 bits, by the roofline of each."""
    return classify_figures(SMALLER, quicker(pairs, batches), 1.0, EXACT)


def quicker(pairs: Iterable[tuple[str, str]] = PAIRS, batches: Iterable[int] = (1, 32)) -> dict[str, float]:
    found, batches = {}, list(batches)
    for large, small in pairs:
        for hardware, gpus in PLACES:
            for batch in batches:
                two = [ServedModel(model, "16 bits", hardware, gpus, batch) for model in (large, small)]
                if all(each.fits(DEFAULT_CONTEXT) for each in two):
                    ratio = two[0].decode(DEFAULT_CONTEXT) / two[1].decode(DEFAULT_CONTEXT)
                    found[f"{small} for {large}, decode, batch {batch}, {two[0].machine_name}"] = ratio
            two = [ServedModel(model, "16 bits", hardware, gpus) for model in (large, small)]
            if all(each.fits(DEFAULT_CONTEXT) for each in two):
                found[f"{small} for {large}, prefill of 1,000, {two[0].machine_name}"] = two[0].prefill(
                    DEFAULT_CONTEXT
                ) / two[1].prefill(DEFAULT_CONTEXT)
    return found


def small_table(records: object) -> Sequence[Table]:
    found = quicker()
    rows = [(name, f"{value:,.3g}{' a' if SMALLER[0].least <= value <= SMALLER[0].most else ''}")
            for name, value in found.items()]  # fmt: skip
    return [Table("Times as quick, by the rooflines of both (a: 2 to 3 times)", rows, ("small for large", "times"))]


# A model of 12,288 columns and 96 layers


def widths(models: Iterable[str] = MODELS) -> EvidenceNumbers:
    """Check each model for a hidden size of 12,288 and 96 layers."""
    found = {}
    for model in models:
        spec = named_shape(model)
        name = f"{model} ({spec.hidden_size:,} wide, {len(spec.layers)} layers)"
        found[name] = 0.0 if (spec.hidden_size, len(spec.layers)) == (12_288, 96) else 1.0
    return classify_figures([StatedFigure("12,288 wide and 96 layers", 0.0, 0.5)], found, 1.0, ("another size", "less"))


def width_table(records: object) -> Sequence[Table]:
    rows = []
    for model in MODELS:
        spec, sizes = named_shape(model), [weights(model, format) / 1e9 for format in FORMATS]
        fewest = [
            next((f"{gpus} x {name}" for name, gpus in MACHINES if name == "h100"
                  and ServedModel(model, format, name, gpus).fits(DEFAULT_CONTEXT)), "more than 8")
            for format in FORMATS
        ]  # fmt: skip
        rows.append((model, f"{spec.hidden_size:,}", f"{len(spec.layers)}", f"{spec.num_parameters / 1e9:,.3g}",
                     *(f"{size:,.3g} ({count})" for size, count in zip(sizes, fewest, strict=True))))  # fmt: skip
    headings = ("model", "wide", "layers", "10^9 parameters", *(f"GB in {format} (fewest H100)" for format in FORMATS))
    return [Table("Widths and layers of named models, and the GPUs that hold them", rows, headings)]


def _figure_claim(
    id: str, says: str, sources: tuple[ClaimSource, ...], numbers: Callable[[], EvidenceNumbers], where: Callable,
    refuted: Callable[[], EvidenceNumbers], holds: Callable[[], EvidenceNumbers] | None, never: str = "",
    machine: str = NAMED,
) -> Claim:  # fmt: skip
    """Make a claim whose `refuted` and `holds` are the same calculation for fewer models or machines.

    `never` has the reason why nothing makes it hold, where `holds` is None.
    """
    gives: dict[Outcome, Callable[[], EvidenceNumbers]] = {"holds-with-limits": numbers, "refuted": refuted}
    gives |= {"holds": holds} if holds else {}
    trial = ClaimTrial(CalculationEvidence(numbers, machine), figures_hold, gives, {"holds": never} if never else {})
    return Claim(id, says, sources, (trial,), where)


UNNAMED = "not named"

CLAIMS = (
    _figure_claim(
        "stated-prefill-times",
        "Prefill of 1,000 tokens takes 200 to 400 ms, or 50 ms; of 10,000 tokens 500 ms, of 100,000 5 s",
        (
            ClaimSource(UNNAMED, "200 to 400 ms for 1,000 tokens"),
            ClaimSource("D", "50 ms for 1,000, 500 ms for 10,000, 5 s for 100,000 tokens"),
        ),
        prefills,
        prefill_table,
        lambda: prefills([("b200", 8)]),
        None,
        "50 ms and 200 ms are further apart than the 2.5 times between a bound and what a good engine takes",
    ),
    _figure_claim(
        "stated-token-times",
        "An output token takes 40 to 80 ms, or 20 to 30 ms, or 5 to 20 ms",
        tuple(ClaimSource(UNNAMED, figure.name) for figure in DECODE),
        decodes,
        decode_table,
        lambda: decodes(served_models(["smollm2-135m"])),
        lambda: decodes([ServedModel("llama-3.1-70b", hardware="b200")]),
    ),
    _figure_claim(
        "stated-bytes-read",
        "30 to 200 GB are read for each output token",
        (ClaimSource(UNNAMED, "30 to 200 GB a token"),),
        reads,
        read_table,
        lambda: reads(["llama-3.1-8b"]),
        lambda: reads(["llama-3.1-70b"], [(1, DEFAULT_CONTEXT)]),
        machine="any (counted)",
    ),
    _figure_claim(
        "stated-savings",
        "A known beginning of the prompt saves 70 to 90%",
        (ClaimSource(UNNAMED, "70 to 90% saved; of what, the ledger's row does not say"),),
        savings,
        saved_table,
        lambda: savings([0.5]),
        lambda: savings([0.8], [10_000]),
        machine="rooflines of h100, and the sources' prices",
    ),
    _figure_claim(
        "stated-small-models",
        "Small models are 2 to 3 times as fast",
        (ClaimSource(UNNAMED, "2 to 3 times"),),
        small_models,
        small_table,
        lambda: small_models([("llama-3.1-70b", "llama-3.1-8b")]),
        lambda: small_models([("gpt-3-175b", "llama-3.1-70b")], [1]),
        machine="rooflines of h100, a100, b200",
    ),
    _figure_claim(
        "stated-widths",
        "A large model is 12,288 wide and has 96 layers",
        (ClaimSource(UNNAMED, "12,288 wide, 96 layers"),),
        widths,
        width_table,
        lambda: widths(["llama-3.1-70b"]),
        lambda: widths(["gpt-3-175b"]),
        machine="any (published shapes)",
    ),
)
