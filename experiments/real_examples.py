"""Run examples from explanations of inference on a pretrained model, and check each claim of the explanations against
the result.

    python -m experiments.real_examples                          # every claim, right or wrong
    python -m experiments.real_examples --out experiments/records

A claim that turns out wrong is a finding, no failure: the exit code is 0. Notebook 14 shows the same findings; where
the model is not at hand, those of the last committed record. Times are of one run each, in the order below; a record
says how much of the processor was others' meanwhile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import jsonschema
import torch
import typer
from torch import Tensor

from workbench import agent, demo_tools, load
from workbench.agents.result import AgentResult, CallRecord
from workbench.display import Displayable, Table, truncate_text
from workbench.economics.bill import system_prompt_day
from workbench.economics.prices import DEFAULT_TABLE, Usage, format_money, load_prices
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import between_steps
from workbench.errors import WorkbenchError
from workbench.inspect.whole_text import TextAttention
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.models.known import KNOWN
from workbench.models.store import fetched_model, is_at_hand
from workbench.own_folder import OWN_EXPERIMENTS, OWN_NOTEBOOKS
from workbench.prompt.conversation import Conversation
from workbench.request import SamplingParameters
from workbench.response_format import JSONSchema
from workbench.runs.folder import write_dated_record
from workbench.sampling.filter_trace import trace_filters
from workbench.sampling.filters import History
from workbench.trace.events import Decoded, Finished, Submitted

MODEL = "smollm2"
# Dense: the reference would widen the file's 4-bit codes anew in every step, at ten times the time of a token.
SETTINGS: Mapping[str, Any] = {
    "backend": "eager", "weights": "dense", "dtype": "float32", "prefix": "radix", "page_size": 16,
}  # fmt: skip
CAT = "The cat sat on the mat because"
FILTERS: Mapping[str, Mapping[str, Any]] = {
    "temperature 0.5": {"temperature": 0.5},
    "top-k 5": {"top_k": 5},
    "top-p 0.5": {"top_p": 0.5},
}
TIRED = f"{CAT} it was tired"
BANK, OTHER = "The bank by the river had no money", "fish"
SHORT, PACE_TOKENS = "What is 2+2?", 24
PERSON = "Anna Berg is 34 years old and lives in Oslo."
TRUTH = {"name": "Anna Berg", "age": 34, "city": "Oslo"}
TYPES = {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}}
SYSTEM_TOKENS = 2_000
TURNS = (
    "Name a fruit.", "What colour is it?", "Is it sweet?", "Where does it grow?", "Name another fruit.",
    "Which of the two is larger?", "Can one bake it?", "What is a good recipe?", "How long does it take?", "Thank you.",
)  # fmt: skip
SUM, PRODUCT = ("What is 17 + 25?", "42"), ("What is 12 * 34?", "408")
Claim = tuple[str, bool, str]  # in words, whether it holds here, and what was found


@dataclass(frozen=True)
class Finding(Displayable):
    """The result of one example: a table, its claims with the verdict on each, and figures by name."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    claims: Sequence[Claim]
    numbers: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def _display_table(self) -> Table:
        verdicts = [("✓ right" if holds else "✗ wrong", claim, found) for claim, holds, found in self.claims]
        claims = Table("", verdicts, ("here", "claim", "found"))
        return Table(self.title, self.rows, self.headings, self.note, subtables=[claims])


def closed(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@dataclass(frozen=True)
class Answer:
    """An answer, with the seconds to its first token and the median seconds between tokens."""

    end: Finished
    ttft: float
    gap: float

    @property
    def text(self) -> str:
        return " ".join(self.end.output_text.split())


def ask(runner: Runner, prompt: str | Conversation, **sampling: Any) -> Answer:
    """Answer a text or a conversation greedily. Raises WorkbenchError if the request is refused."""
    events = list(runner.stream(prompt, temperature=0, **sampling))
    (begun,) = [event for event in events if isinstance(event, Submitted)]
    (end,) = [event for event in events if isinstance(event, Finished)]
    times = [event.time for event in events if isinstance(event, Decoded)]
    gaps = [after - before for before, after in pairwise(times)]
    return Answer(end, times[0] - begun.arrival, median(gaps or [0.0]))


def attention(runner: Runner, text: str) -> tuple[list[str], Tensor]:
    """Return the tokens of a text, and the attention weights [layer, head, token, context] of all of them."""
    tokenizer = _tokenizer(runner)
    ids = tokenizer.encode(text)
    beside = between_steps(runner, lambda runner: TextAttention(runner.model, ids))
    weights = [beside.weights(layer, range(len(ids))) for layer in range(len(beside.layers))]
    return [tokenizer.decode([each]) for each in ids], torch.stack(weights)


def strongest(weights: Tensor, count: int = 1) -> list[tuple[int, int, float]]:
    """Return the `count` largest of `weights` [layer, head] as (layer, head, weight), largest first."""
    values, places = weights.flatten().topk(count)
    return [(*divmod(int(place), weights.shape[1]), float(value)) for value, place in zip(values, places, strict=True)]


def next_token(runner: Runner) -> Finding:
    """Show the choice of a text's next token: its token ids, the candidates, and the tokens that each filter
    removes."""
    tokenizer = _tokenizer(runner)
    ids = tokenizer.encode(CAT)
    logits = between_steps(runner, lambda runner: runner.model.logits(ids))[-1]
    traces = [trace_filters(logits, History(tuple(ids)), SamplingParameters(**each)) for each in FILTERS.values()]
    shares = [logits.double().softmax(-1), *(each.probabilities for each in traces)]
    left = [int((each > 0).sum()) for each in shares]
    ordered, places = shares[0].sort(descending=True)
    rows: list[Sequence[Any]] = [
        (repr(tokenizer.decode([id])), str(id), *(f"{each[id]:.1%}" if each[id] else "removed" for each in shares))
        for id in places[:8].tolist()
    ]
    rows.append(("tokens left", "", *(f"{each:,}" for each in left)))
    needed = int((ordered.cumsum(0) < 0.5).sum()) + 1
    claims = (
        ("the ids are the text: decoded they give it again", tokenizer.decode(ids) == CAT, f"{ids}"),
        ("temperature removes no token", left[1] == left[0], f"{left[1]:,} are left"),
        ("below 1 it makes the likeliest likelier", bool(shares[1].max() > shares[0].max()), rows[0][3]),
        ("top-k 5 leaves five", left[2] == 5, f"{left[2]}"),
        ("top-p 0.5 leaves the fewest that hold half", left[3] == needed, f"{left[3]}; {needed} by adding up"),
        ("the likeliest next token is ' it'", rows[0][0] == "' it'", f"{rows[0][0]}, {rows[0][2]}"),
    )
    return Finding(f"After {CAT!r}", ("token", "id", "model", *FILTERS), rows, claims, {"needed": needed})


def pronoun(runner: Runner) -> Finding:
    """Find the heads in which `it` attends to `cat`."""
    names, weights = attention(runner, TIRED)
    cat, mat, it = (names.index(name) for name in (" cat", " mat", " it"))
    rows = [
        (layer, head, weight, float(weights[layer, head, it, mat]))
        for layer, head, weight in strongest(weights[:, :, it, cat], 5)
    ]
    layer, head, weight, _ = rows[0]
    _, swapped = attention(runner, "The mat sat on the cat because it was tired")
    to_mat, to_cat = swapped[layer, head, it, cat], swapped[layer, head, it, mat]
    change = (weights - attention(runner, TIRED.replace("tired", "soft"))[1])[:, :, it].abs().max()
    where = f"{weight:.2f} in layer {layer}, head {head}"
    claims = (
        ("some head gives `cat` more than half of what `it` gives", weight > 0.5, where),
        ("that is about 0.80", abs(weight - 0.8) < 0.05, where),
        ("with both exchanged it still finds `cat`", bool(to_cat > to_mat), f"cat {to_cat:.2f}, mat {to_mat:.2f}"),
        (
            "`soft` for `tired` makes `it` look elsewhere",
            bool(change > 0),
            f"no weight changes by more than {change:g}: it comes before",
        ),
    )
    headings = ("layer", "head", "it to cat", "it to mat")
    return Finding(f"Heads in which `it` looks at `cat`: {TIRED!r}", headings, rows, claims)


def bank(runner: Runner) -> Finding:
    """Show where `bank`, `had` and the last word attend, and what changes with another last word."""
    names, weights = attention(runner, BANK)
    changed = attention(runner, BANK.replace("money", OTHER))[1]
    rows = []
    for source, target in (("bank", "river"), ("had", "bank"), ("had", "river"), ("money", "bank"), ("money", "river")):
        row, column = names.index(f" {source}"), names.index(f" {target}")
        layer, head, weight = strongest(weights[:, :, row, column])[0]
        place = (layer, head) if weight else (None, None)  # none can
        rows.append((f"{source} to {target}", *place, weight, float(changed[layer, head, row, column])))
    change = (weights - changed).abs().amax((0, 1, 3))
    first = float(weights[:, :, names.index(" had"), 0].mean())
    claims = (
        ("`bank` looks at `river` to know what it means", rows[0][3] > 0, "it comes before `river`: no head can"),
        ("some head of `had` gives its subject over half", rows[1][3] > 0.5, f"{rows[1][3]:.2f} to `bank`"),
        ("some head of `money` gives `bank` over half", rows[3][3] > 0.5, f"{rows[3][3]:.2f}"),
        (f"`{OTHER}` for `money` changes earlier rows", bool(change[:-1].any()), f"by {change[:-1].max():g}"),
        (f"`{OTHER}` for `money` changes the last row", bool(change[-1] > 0.01), f"by up to {change[-1]:.2f}"),
        ("`had` looks mostly at words with a meaning", first < 0.5, f"{first:.0%} goes to the first token"),
    )
    headings = ("from and to", "layer", "head", "weight", f"with {OTHER}")
    return Finding(f"The heads that look most: {BANK!r}", headings, rows, claims)


def first_tokens(runner: Runner, words: int = 1_500) -> Finding:
    """Compare a short question with a text of `words` words: TTFT, and time between tokens."""
    ask(runner, "Warm up.", max_tokens=2)  # what happens only once is in no time
    texts = (SHORT, f"Summarize this: {english(words)}")
    sampling: Mapping[str, Any] = {"max_tokens": PACE_TOKENS, "ignore_eos": True}
    short, long = (ask(runner, Conversation(turns=[text]), **sampling) for text in texts)
    rows = [
        (truncate_text(text, 40), each.end.prompt_tokens, each.ttft, 1e3 * each.gap)
        for text, each in zip(texts, (short, long), strict=True)
    ]
    times, pace = long.ttft / short.ttft, long.gap / short.gap
    claims = (
        ("the first token of the long prompt takes over 20 times as long", times > 20, f"{times:.0f} times"),
        ("the pace after it is the same within 10%", abs(pace - 1) <= 0.1, f"{pace:.2f} times as long a token"),
        (f"{SHORT} is answered with 4", "4" in short.text, repr(short.text)),
    )
    headings = ("prompt", "tokens", "first token, s", "between tokens, ms")
    return Finding("Time to first token, and pace", headings, rows, claims, {"times": times})


def extraction(runner: Runner) -> Finding:
    """Extract a fact from a text in two ways: up to a stop string, and as JSON of a schema."""
    stop: Mapping[str, Any] = {"max_tokens": 48, "stop": "</answer>"}
    question = Conversation(turns=[f"{PERSON} In which city does Anna live? Write it as <answer>city</answer>."])
    wanted = Conversation(turns=[f"{PERSON} Give name, age and city as JSON."])
    answers = {
        "begun with <answer>": ask(runner, f"{PERSON}\n<question>Which city?</question>\n<answer>", **stop),
        "asked for <answer>": ask(runner, question, **stop),
        "the same again": ask(runner, question, **stop),
        "a schema": ask(runner, wanted, max_tokens=64, response_format=JSONSchema(json_schema=closed(**TYPES))),
        "asked for JSON": ask(runner, wanted, max_tokens=64),
    }
    begun, free, again = list(answers.values())[:3]
    bound, unbound = list(answers.values())[3:]
    claims = (
        ("the stop string ends the answer, and is left out", begun.end.ended_by == "stop_string", repr(begun.text)),
        ("the answer is Oslo", begun.text == "Oslo", repr(begun.text)),
        ("asked to, the model writes the tags itself", free.end.ended_by == "stop_string", repr(free.text)),
        ("temperature 0 gives the same again", free.end.token_ids == again.end.token_ids, repr(again.text)),
        ("with a schema the answer is valid", _read(bound.text) is not None, bound.text),
        ("and says what the text says", _read(bound.text) == TRUTH, bound.text),
        ("asked without a schema it is valid too", _read(unbound.text) is not None, truncate_text(unbound.text, 60)),
    )
    rows = [(name, truncate_text(each.text, 120), each.end.ended_by) for name, each in answers.items()]
    return Finding(f"Asked about: {PERSON}", ("how", "answer", "ended by"), rows, claims)


def system_prompt(runner: Runner) -> Finding:
    """Write a system prompt of 2,000 tokens into the prefix cache, read it in a second request, and price both."""
    tokenizer, page, prices = _tokenizer(runner), runner.store.page_size, load_prices(DEFAULT_TABLE)
    system = tokenizer.decode(tokenizer.encode(english(SYSTEM_TOKENS))[:SYSTEM_TOKENS])
    answers = [
        ask(runner, Conversation(system=system, turns=[question]), max_tokens=8, ignore_eos=True)
        for question in ("What is this about?", "Who is it for?")
    ]
    usages = [_usage(each.end) for each in answers]
    costs = [prices.cost(each) for each in usages]
    plain = prices.cost(Usage(input=usages[1].prompt, output=usages[1].output))
    first, second = usages
    rows = [
        (name, used.prompt, used.written, used.cache_read, each.ttft, format_money(cost, 5))
        for name, used, each, cost in zip(("first", "second"), usages, answers, costs, strict=True)
    ]
    day = [plan.bill.total for plan in system_prompt_day(prices, SYSTEM_TOKENS)]
    saved, times = float(1 - min(day) / day[0]), answers[0].ttft / answers[1].ttft
    claims = (
        (
            "the first request writes the system prompt",
            first.written > SYSTEM_TOKENS - page,
            f"{first.written:,} tokens",
        ),
        (
            "the second reads it",
            second.cache_read > SYSTEM_TOKENS - page,
            f"{second.cache_read:,} of {second.prompt:,}",
        ),
        ("its first token comes 5 times as early", times > 5, f"{times:.1f} times"),
        (
            "the second costs a fifth at most",
            costs[1] < plain / 5,
            f"{float(costs[1] / plain):.0%} of the uncached price",
        ),
        ("1,000 requests a day save 98%, as published", abs(saved - 0.98) < 0.005, f"{saved:.0%} by its own prices"),
    )
    headings = ("request", "prompt", "written", "read", "first token, s", prices.currency)
    return Finding("A system prompt, twice", headings, rows, claims, note=f"prices of {prices.name}")


def ten_turns(runner: Runner) -> Finding:
    """Run a conversation of ten turns, each on the cached pages of the earlier turns; then compute its last prompt
    without a cache."""
    talker = agent(runner, max_tokens=24, temperature=0)
    talk, known, over, rows = Conversation(), 0, [], []
    for words in TURNS:
        result = talker.run(talk.user(words))
        talk, used = result.conversation, result.usage
        over.append(used.computed_tokens - (used.prompt_tokens - known))
        known = used.prompt_tokens + used.output_tokens
        tokens = used.prompt_tokens, used.cached_tokens, used.computed_tokens
        rows.append((words, " ".join(result.answer.split()), *tokens, result.rounds[0].ttft))
    page, most, warm = runner.store.page_size, max(row[4] for row in rows[1:]), rows[-1][-1]
    between_steps(runner, Runner.reset_prefix_cache)
    cold = ask(runner, talk.model_copy(update={"turns": talk.turns[:-1]}), max_tokens=1)
    rows.append((f"{TURNS[-1]} (cold)", "", cold.end.prompt_tokens, 0, cold.end.computed_tokens, cold.ttft))
    besides = max(over[1:])
    claims = (
        ("a turn computes what is new, and a page at most", besides <= page, f"{besides} tokens besides at most"),
        ("a turn's work does not grow", most < rows[-1][2] / 4, f"{most} tokens at most, of up to {rows[-1][2]}"),
        ("the tenth first token comes 3 times as early as cold", cold.ttft > 3 * warm, f"{cold.ttft / warm:.1f} times"),
    )
    headings = ("user", "answer", "prompt", "cached", "computed", "first token, s")
    return Finding("Ten turns on a warm prefix", headings, rows, claims)


def multiply(first: int, second: int) -> int:
    """Multiply two whole numbers.

    Args:
        first: the first number.
        second: the second number.
    """
    return first * second


def tool(runner: Runner) -> Finding:
    """Ask for a product without tools, with a calculator that takes texts, and with one that takes two numbers, whose
    calls always end."""
    question, truth = PRODUCT
    alone = ask(runner, Conversation(turns=[question]), max_tokens=48)
    free, calculated, multiplied = (
        agent(runner, [function], tool_choice=choice, max_tokens=64, temperature=0).run(question)
        for function, choice in (
            (demo_tools.calculate, "auto"),
            (demo_tools.calculate, "calculate"),
            (multiply, "multiply"),
        )
    )
    rows = [("alone", alone.text), ("may call", free.answer)]
    for result in (calculated, multiplied):
        for call in _calls(result):
            called = truncate_text(f"{call.name}({call.arguments})", 90)
            rows += [("must call", called), ("the tool", truncate_text(call.result, 90))]
        rows.append(("and then", result.answer))
    numbers = [call.result for call in _calls(multiplied)]
    claims = (
        (f"alone the model says {truth}", truth in alone.text, repr(truncate_text(alone.text, 60))),
        ("it calls a tool that it may call", bool(_calls(free)), f"{len(_calls(free))} calls"),
        ("it calls a tool that it must call", bool(_calls(calculated)), f"{len(_calls(calculated))} calls"),
        (f"a call of two numbers gives {truth}", truth in numbers, ", ".join(numbers)),
        (f"with the result it says {truth}", truth in multiplied.answer, repr(multiplied.answer)),
    )
    return Finding(f"{question} With a calculator", ("how", "text"), rows, claims)


def _calls(result: AgentResult) -> list[CallRecord]:
    return [call for each in result.rounds for call in each.calls]


def thinking(runner: Runner) -> Finding:
    """Ask for a thought with a token budget; then for a thought in plain text, which no budget limits."""
    question, truth = SUM
    short, steps = (Conversation(turns=[question + how]) for how in ("", " Think step by step, then write the result."))
    try:
        thought = ask(runner, short, max_tokens=24, thinking={"budget_tokens": 32}).end.thinking_tokens
        said = f"{thought} tokens of thought"
    except WorkbenchError as error:
        thought, said = 0, str(error).split(";")[0]
    answers = {
        "at once": ask(runner, short, max_tokens=96),
        "step by step": ask(runner, steps, max_tokens=96),
        "step by step, 16 tokens at most": ask(runner, steps, max_tokens=16),
    }
    claims = [("a thought can be given a budget", thought > 0, said)]
    claims += [
        (f"{name} it says {truth}", truth in each.text, f"ended by {each.end.ended_by}")
        for name, each in answers.items()
    ]
    rows = [(name, len(each.end.token_ids), truncate_text(each.text, 160)) for name, each in answers.items()]
    return Finding(question, ("how", "tokens", "text"), rows, claims)


EXAMPLES: Mapping[str, Callable[..., Finding]] = {
    "next token": next_token, "pronoun": pronoun, "bank": bank, "first tokens": first_tokens, "extraction": extraction,
    "system prompt": system_prompt, "ten turns": ten_turns, "tool": tool, "thinking": thinking,
}  # fmt: skip


class Examples(Displayable):
    """All examples: run on the model if it is installed (`runner`), else read from the last record (`runner` is None).

    Raises:
        WorkbenchError: if there is neither a model nor a record.
    """

    def __init__(self, records: Path = OWN_EXPERIMENTS / "records"):
        self.findings: dict[str, Finding] = {}
        self._options: dict[str, Mapping[str, Any]] = {}  # with which each was computed
        self.runner = load(MODEL, **SETTINGS) if is_at_hand(MODEL) else None
        self.about = f"{MODEL} speaks ({KNOWN[MODEL].licence})"
        if self.runner is None:
            files = sorted(records.glob("real_examples-*.json"))
            if not files:
                fetched_model(MODEL)  # says how to fetch it
            self._record = json.loads(files[-1].read_text(encoding="utf-8"))
            self.about = (
                f"{MODEL} is not at hand, and `{KNOWN[MODEL].command}` fetches it. What follows was recorded on "
                f"{self._record['date'][:10]}; other processes had {self._record['others_cpu_share']:.0%} of the cores."
            )

    def find(self, name: str, **options: Any) -> Finding:
        """Return the finding of an example: computed at the first call, and again if called with other options than
        last time."""
        if name not in self.findings or options not in ({}, self._options[name]):
            recorded = None if self.runner else Finding(**self._record["findings"][name])
            self.findings[name] = recorded or EXAMPLES[name](self.runner, **options)
            self._options[name] = options
        return self.findings[name]

    def _display_table(self) -> Table:
        held = {name: [holds for _, holds, _ in each.claims] for name, each in self.findings.items()}
        rows = [(name, sum(each), len(each) - sum(each)) for name, each in held.items()]
        return Table(self.about, rows, ("example", "right", "wrong") if rows else ())


def english(words: int) -> str:
    """Return the first `words` words of the course's prose."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(OWN_NOTEBOOKS.glob("[01]*.py"))]
    cells = [cell for text in texts for cell in text.split("# %%") if cell.startswith(" [markdown]")]
    prose = [word for cell in cells for word in cell.split()[1:] if word.strip("#")]
    return " ".join(prose[:words])


def _tokenizer(runner: Runner) -> Any:
    if runner.tokenizer is None:
        raise WorkbenchError(f"{runner.model.spec.name} has no tokenizer, and the examples are texts")
    return runner.tokenizer


def _usage(end: Finished) -> Usage:
    """Return the prompt's tokens by price: read from the cache, written to it in whole pages, and neither."""
    computed = end.prompt_tokens - end.cached_tokens
    written = min(end.written_tokens, computed)
    return Usage(computed - written, written, cache_read=end.cached_tokens, output=len(end.token_ids))


def _read(text: str) -> Any:
    """Return JSON that is valid under the schema, else None."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if jsonschema.Draft202012Validator(closed(**TYPES)).is_valid(value) else None


def main(
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Run the examples, and print for each claim whether it holds."""
    date, before = datetime.now(UTC).isoformat(timespec="seconds"), cpu_times()
    runner, findings = load(MODEL, **SETTINGS), {}
    for name, example in EXAMPLES.items():
        findings[name] = example(runner)
        print(findings[name], flush=True)
    record = {
        "experiment": "real_examples", "date": date, "model": MODEL, "environment": environment(),
        "others_cpu_share": others_cpu_share(before),
        "findings": {name: asdict(each) for name, each in findings.items()},
    }  # fmt: skip
    if out is not None:
        print(write_dated_record(record, out, "real_examples"), file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
