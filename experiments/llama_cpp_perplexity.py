"""Compare a model's perplexity here and in llama.cpp: `python -m experiments.llama_cpp_perplexity FILE.gguf --python
PYTHON`, where PYTHON has the package xllamacpp.

Both read the same file. The text is this project's guides in the model's own tokens. llama.cpp rounds what enters a
product of quantized weights to 8 bits in blocks, and that is the yardstick: the same model computed here in float32
with that rounding. The rule, written before the run, on differences of log-probabilities from the model without it:
the mean over llama.cpp's tokens is no further from 0 than the mean over the rounded model's, plus 3 standard errors of
the latter; and the standard deviation of llama.cpp's is at most twice that of the rounded model.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from torch import Tensor

from experiments.real_parity import guide_text
from workbench.display import Table
from workbench.engine.load import load
from workbench.engine.loaded_model import describe_model
from workbench.errors import WorkbenchError
from workbench.machine.environment import environment
from workbench.model.formats.texts import open_tokenizer
from workbench.model.hf.weights import load_weights
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters
from workbench.runs.folder import write_dated_record
from workbench.trace.events import Finished

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/peers/scripts/run_perplexity.py"
BLOCK = 32  # numbers that share a scale when they are rounded (Q8_0, Q8_1)
STANDARD_ERRORS, SPREADS = 3, 2  # of the rule


def log_probabilities(logits: Tensor, ids: Tensor) -> list[float]:
    """Return the log-probability of every token but the first, of logits [token, vocab]."""
    rows = logits[:-1].double().log_softmax(-1)
    return rows.gather(-1, ids[1:, None])[:, 0].tolist()


def rounded(x: Tensor) -> Tensor:
    """Return `x` [token, width] with each block of values in a row rounded to 8 bits, with one scale per block."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / 127
    return ((blocks / scales).round() * scales).flatten(-2)


def own_log_probabilities(path: Path, ids: Tensor) -> dict[str, list[float]]:
    """Return the log-probabilities of the plain float32 computation, exactly and with the inputs of matrix products
    rounded (except the head's)."""
    spec, _ = describe_model(str(path))
    model = Transformer.from_state(spec, load_weights(path, spec, torch.float32))
    entering: dict[str, Callable[[Tensor], Tensor]] = {"exact": lambda x: x, "rounded": rounded}
    result = {}
    for name, function in entering.items():
        with mock.patch.object(naive.Weights, "product", lambda w, x, of, function=function: function(x) @ w[of].T):
            result[name] = log_probabilities(naive.logits(model, ids), ids)
    return result


def served_log_probabilities(path: Path, ids: Tensor) -> tuple[str, list[float]]:
    """Return the backends that `auto` chooses, and the log-probabilities that a request gets for its prompt tokens."""
    runner = load(str(path), report=lambda line: None)
    request = Request("text", tuple(ids.tolist()), SamplingParameters(max_tokens=1, temperature=0, prompt_logprobs=1))
    (answer,) = (event for event in runner.stream(request) if isinstance(event, Finished))
    return str(runner.core.backends), [token.logprob for token in answer.prompt_logprobs if token.logprob is not None]


def judged(by_source: dict[str, list[float]]) -> dict[str, Any]:
    """Return the perplexity of each source, its difference from the exact computation, and whether the rule holds."""
    rows: dict[str, Any] = {}
    for name, values in by_source.items():
        away = [one - exact for one, exact in zip(values, by_source["exact"], strict=True)]
        rows[name] = {
            "perplexity": math.exp(-statistics.fmean(values)),
            "mean_difference": statistics.fmean(away),
            "spread": statistics.pstdev(away),
        }
    llama_cpp, bound = rows["llama.cpp"], rows["rounded"]
    most = abs(bound["mean_difference"]) + STANDARD_ERRORS * bound["spread"] / math.sqrt(len(by_source["exact"]))
    holds = abs(llama_cpp["mean_difference"]) <= most and llama_cpp["spread"] <= SPREADS * bound["spread"]
    return {"rows": rows, "largest_mean_difference": most, "holds": holds}


def main(
    path: Annotated[Path, typer.Argument(help="a GGUF file")],
    python: Annotated[str, typer.Option(help="a Python that has the package xllamacpp")],
    tokens: Annotated[int, typer.Option(help="of the text")] = 1024,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Compare the perplexity of one text here and in llama.cpp."""
    tokenizer = open_tokenizer(path)
    if tokenizer is None:
        raise WorkbenchError(f"{path}: the file has no tokenizer")
    ids = torch.tensor([*tokenizer.bos_token_ids, *tokenizer.encode(guide_text())][:tokens])
    job = {"model": str(path.resolve()), "ids": ids.tolist(), "threads": torch.get_num_threads()}
    done = subprocess.run([python, str(SCRIPT)], input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True)
    backends, served = served_log_probabilities(path, ids)
    result = judged({**own_log_probabilities(path, ids), "llama.cpp": json.loads(done.stdout), "workbench": served})
    cells = [
        [name, *(f"{row[each]:.5g}" for each in ("perplexity", "mean_difference", "spread"))]
        for name, row in result["rows"].items()
    ]
    columns = ("computed by", "perplexity", "mean difference of log-probability", "its standard deviation")
    Console(width=140).print(Table(f"{len(ids)} tokens; the workbench by {backends}", cells, columns).text())
    verdict = "holds" if result["holds"] else "fails"
    print(f"llama.cpp's mean may differ by {result['largest_mean_difference']:.2g}; the rule {verdict}")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"experiment": "llama_cpp_perplexity", "file": path.name, "date": date, "environment": environment(),
              "tokens": len(ids), "backends": backends, **result}  # fmt: skip
    if out is not None:
        print(write_dated_record(record, out, "llama_cpp_perplexity"), file=sys.stderr)
    raise typer.Exit(0 if result["holds"] else 1)


if __name__ == "__main__":
    typer.run(main)
