"""Compare every model family with transformers: `python -m experiments.family_parity [--backends eager,mlir] [--json]`.

Random float32 checkpoints of each family (workbench/testing/family_checkpoints.py) are written by transformers and read
by the workbench. For each way of computing a text, the figure is the largest difference of a logit, relative to the
largest logit of transformers. The rule, written before the run: at most 1e-5 in every way on eager and inductor, whose
arithmetic is float32 throughout; greedy tokens equal wherever transformers' first choice stands clear of its second.
Beside it stands transformers' own distance, in float32, from its logits in float64.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from compiled_kernels import Backend
from workbench import load
from workbench.display import Table
from workbench.errors import WorkbenchError
from workbench.executors.build import build_step_runner
from workbench.executors.capabilities import unsupported
from workbench.executors.requirements import Requirements
from workbench.executors.select import Backends
from workbench.executors.step_runner import StepRunner
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import PagePool, build_cache_groups, pages_for
from workbench.kv_cache.prefix import RadixCache
from workbench.kv_cache.store import KVStore
from workbench.machine.environment import environment
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import load_weights
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters, Sequence
from workbench.runs.folder import write_dated_record
from workbench.scheduler.plan import Span, StepPlan
from workbench.testing.family_checkpoints import FAMILY_CASES, SIZES, random_checkpoint
from workbench.trace.events import Finished

BOUND = 1e-5
PAGE_SIZE, LENGTH, CHUNKS = 4, 40, (11, 6)  # of the text; its first tokens come in chunks, the rest one by one
GREEDY_PROMPT, GREEDY_TOKENS = 21, 6


class Texts:
    """Sequences in one KV cache, whose pages are allocated in random order and hold NaN until they are written."""

    def __init__(self, model: Transformer, executor_of: Callable[[KVStore], StepRunner], length: int):
        self.length = length
        shapes, pages = model.cache_shapes(), 2 * pages_for(length, PAGE_SIZE)
        groups = build_cache_groups(shape.cache_groups for shape in shapes)
        self.store = KVStore(shapes, (pages,) * len(groups), PAGE_SIZE, model.dtype)
        for group in range(len(groups)):
            for tensor in self.store.page_tensors(group):
                tensor[1:] = torch.nan
        orders = (random.Random(group).sample(range(1, pages + 1), pages) for group in range(len(groups)))
        pools = [PagePool(pages, PAGE_SIZE, order) for order in orders]
        self.manager = KVCacheManager(pools, groups, length, RadixCache(pools, groups))
        self.executor = executor_of(self.store)

    def start(self, number: int, ids: Tensor) -> Sequence:
        """Start a sequence with the tokens `ids`, on the cached prefix if there is one."""
        sequence = Sequence.from_request(Request(f"text {number}", tuple(ids.tolist())), number)
        sequence.length_limit = self.length
        sequence.pages = tuple([] for _ in self.store.groups)
        self.manager.start(sequence, self.manager.match_prefix(sequence))
        return sequence

    def step(self, sequences: list[Sequence], length: int) -> Tensor:
        """Compute the next `length` tokens of each sequence; return the logits after its last token [sequence,
        vocab]."""
        spans = []
        for sequence in sequences:
            start = sequence.num_computed_tokens
            known = sequence.token_ids
            sequence.token_ids = known[: start + length]
            self.manager.allocate(sequence)
            self.manager.allocate_snapshots(sequence, start, start + length)
            sequence.token_ids = known
            spans.append(Span(sequence, start, length, True))
        logits = self.executor.forward(StepPlan(0, tuple(spans))).clone()
        for sequence in sequences:
            start, sequence.num_computed_tokens = sequence.num_computed_tokens, sequence.num_computed_tokens + length
            self.manager.commit_states(sequence, start, start + length, start + length)
            self.manager.update_after_step(sequence)
        return logits


def errors_by_way(
    model: Transformer, backend: Backend, texts: list[Tensor], expected: list[Tensor], lengths: list[int]
) -> dict[str, Any]:
    """Return the relative error of each way of computing on one backend, or the reason why the backend refuses.

    Args:
        model: ours.
        backend: the one that computes the blocks.
        texts: two texts of ids [tokens].
        expected: their logits at the last token of each step [steps, vocab].
        lengths: the tokens of each step.
    """
    requirements = Requirements(model.spec, model.dtype, model.format, model.cache_shapes())
    if refusal := unsupported(backend, requirements):
        return {"refused": str(refusal)}
    model.set_backend(backend)

    def fresh() -> Texts:
        backends = Backends.uniform(backend, "asked for", requirements)
        return Texts(model, lambda store: build_step_runner(model, store, backends), len(texts[0]))

    num_chunks = sum(length > 1 for length in lengths)
    alone = fresh()
    first = alone.start(0, texts[0])
    rows = torch.cat([alone.step([first], length) for length in lengths])
    found = {
        "in chunks": relative_error(rows[:num_chunks], expected[0][:num_chunks]) if num_chunks else "no chunk",
        "token by token": relative_error(rows[num_chunks:], expected[0][num_chunks:]),
    }
    again = alone.start(1, texts[0])
    if len(texts[0]) > PAGE_SIZE:
        assert again.num_computed_tokens, "no prefix was found"
    rows = alone.step([again], len(texts[0]) - again.num_computed_tokens)
    found["after a prefix hit"] = relative_error(rows[0], expected[0][-1])
    both = fresh()
    pair = [both.start(number, ids) for number, ids in enumerate(texts)]
    rows = torch.stack([both.step(pair, length) for length in lengths], dim=1)
    found["beside another"] = max(relative_error(rows[i], expected[i]) for i in range(2))
    return found


def relative_error(given: Tensor, expected: Tensor) -> float:
    return ((given - expected).abs().max() / expected.abs().max()).item()


def greedy_tokens(folder: str, theirs: Any, prompt: list[int]) -> dict[str, int]:
    """Count a runner's greedy tokens where transformers' first choice is clear of its second, and how many of them
    equal it."""
    runner = load(folder, dtype="float32", backend="eager", page_size=PAGE_SIZE)
    asked = SamplingParameters(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    events = runner.stream(Request("greedy", tuple(prompt), asked))
    tokens = next(event.token_ids for event in events if isinstance(event, Finished))
    text, equal, clear = list(prompt), 0, 0
    for token in tokens:
        best = logits_of(theirs, torch.tensor(text))[-1].topk(2)
        if best.values[0] - best.values[1] > 4 * BOUND * best.values[0].abs():
            clear += 1
            equal += token == int(best.indices[0])
        text.append(token)
    return {"equal": equal, "clear": clear}


@torch.no_grad()
def logits_of(theirs: Any, ids: Tensor) -> Tensor:
    return theirs(ids[None], use_cache=False).logits[0]


def parity(family: str, changes: dict[str, Any], backends: list[Backend]) -> Iterator[dict[str, Any]]:
    """Yield a row for one family: errors of the oracle and of the whole model, then a row of errors for each
    backend."""
    theirs = random_checkpoint(family, changes)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(4, SIZES["vocab_size"], (LENGTH,), generator=generator) for _ in range(2)]
    expected = [logits_of(theirs, ids) for ids in texts]
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        spec = read_spec(folder)
        model = Transformer.from_state(spec, load_weights(folder, spec, torch.float32))
        greedy = greedy_tokens(folder, theirs, texts[0][:GREEDY_PROMPT].tolist())
    case = {"family": family, "config": changes}
    whole = {
        "oracle": relative_error(naive.logits(model, texts[0]), expected[0]),
        "whole": relative_error(model.logits(texts[0]), expected[0]),
    }
    exact = logits_of(theirs.double(), texts[0])
    own = relative_error(expected[0].double(), exact)
    yield {**case, "backend": "eager", "errors": whole, "greedy": greedy, "error_of_transformers": own}
    lengths = [*CHUNKS, *[1] * (LENGTH - sum(CHUNKS))]
    rows = [each[torch.tensor(lengths).cumsum(0) - 1] for each in expected]
    for backend in backends:
        yield {**case, "backend": str(backend), "errors": errors_by_way(model, backend, texts, rows, lengths)}


def summarize(rows: list[dict[str, Any]]) -> Table:
    """Return the largest error of each family by way of computing and backend, or the reason of a refusal."""
    found: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for way, error in row["errors"].items():
            column = way if way in ("oracle", "whole") else row["backend"]
            found[row["family"]][column].append(error)
        if "error_of_transformers" in row:
            found[row["family"]]["transformers' own"].append(row["error_of_transformers"])
    columns = list(dict.fromkeys(column for cells in found.values() for column in cells))

    def cell(errors: list) -> str:
        numbers = [each for each in errors if isinstance(each, float)]
        return f"{max(numbers):.1e}" if numbers else f"no: {errors[0]}" if errors else ""

    cells = [[family, *(cell(found[family].get(column, [])) for column in columns)] for family in found]
    return Table("largest relative error of a logit", cells, ("family", *columns))


def main(
    backends: Annotated[str, typer.Option(help="backends of the ways over a cache, separated by commas")] = "eager",
    families: Annotated[str, typer.Option(help="some families, separated by commas; empty: all")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="the record on standard output")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Compare every family with transformers in every way of computing a text."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    chosen = [Backend(name) for name in backends.split(",")]
    cases = [each for each in FAMILY_CASES if not families or each[0] in families.split(",")]
    if not cases:
        raise WorkbenchError(f"no family of {families!r}; there are {', '.join(dict(FAMILY_CASES))}")
    rows = []
    for family, changes in cases:
        rows += list(parity(family, changes, chosen))
        print(f"{family} {changes}", file=sys.stderr, flush=True)
    exact = [row for row in rows if row["backend"] in ("eager", "inductor")]
    largest = max((e for row in exact for e in row["errors"].values() if isinstance(e, float)), default=0.0)
    missed = sum(row["greedy"]["clear"] - row["greedy"]["equal"] for row in rows if "greedy" in row)
    verdict = {
        "bound": BOUND,
        "largest_error": largest,
        "families_beyond_it": sorted(
            {row["family"] for row in exact for e in row["errors"].values() if isinstance(e, float) and e > BOUND}
        ),
        "greedy_tokens_that_differ": missed,
        "holds": largest <= BOUND and not missed,
    }
    import transformers

    record = {
        "experiment": "family_parity", "date": date, "environment": environment(), "verdict": verdict, "rows": rows,
        "transformers": transformers.__version__,
    }  # fmt: skip
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        Console(width=140).print(summarize(rows).text())
        print(f"largest {largest:.1e} of {BOUND:.0e} allowed; {missed} greedy tokens differ")
    if out is not None:
        print(write_dated_record(record, out, "family_parity"), file=sys.stderr)
    raise typer.Exit(0 if verdict["holds"] else 1)


if __name__ == "__main__":
    typer.run(main)
