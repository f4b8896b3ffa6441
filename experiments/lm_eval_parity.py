"""Compare lm-eval's scores through the server with scores in process: `python -m experiments.lm_eval_parity --python
FILE`.

FILE is the interpreter of an environment that has lm-eval 0.4.13 (`pip install "lm-eval[api]==0.4.13"`, without torch).
Its task is made here: which of four lines comes next in a held-out module of Python. lm-eval scores each line through
`/v1/completions`; in process the runner scores the same tokens alone, without a prefix cache.

The rule, written before the run, for each of four settings (prefix cache off and on, one request at a time and many):
the same questions; acc and acc_norm are equal; every line's log-probability differs by at most 1e-3 (float32, eager)
and the same lines are the model's own first choice. A prompt whose log-probabilities are asked for is computed anew
also where the prefix cache holds its pages: the cache must not change a score, and it saves none of this work.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench import load
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.machine.environment import environment
from workbench.measure.quality.held_out import held_out_modules
from workbench.request import Request, SamplingParameters
from workbench.runs.folder import write_dated_record
from workbench.serve.server import serve
from workbench.trace.events import Finished

MODEL, TASK = "demo", "next_line"
TOLERANCE = 1e-3
CONTEXT_LINES, CHOICES = 12, 4
SECONDS = 900  # for a run of lm-eval, before it is taken for one that hangs
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {  # of the engine, and how many requests lm-eval keeps under way
    "one at a time": ({"prefix": "off", "max_num_seqs": 1}, 1),
    "batched": ({"prefix": "off", "max_num_seqs": 16}, 8),
    "prefix cache": ({"prefix": "radix", "page_size": 16, "max_num_seqs": 1}, 1),
    "prefix cache, batched": ({"prefix": "radix", "page_size": 16, "max_num_seqs": 16}, 8),
}
TASK_YAML = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
Score = tuple[float, bool]  # a line's log-probability, and whether each of its tokens is the likeliest


def make_questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Return multiple-choice questions from the held-out modules: which line comes next. Wrong choices are other lines
    of the same module."""
    draw, found = random.Random(seed), []
    modules = held_out_modules().texts
    texts = [each for each in sorted(modules.items()) if len(each[1].splitlines()) > 2 * CONTEXT_LINES]
    while len(found) < count:
        name, text = draw.choice(texts)
        lines = text.splitlines()
        place = draw.randrange(CONTEXT_LINES, len(lines))
        if not lines[place].strip() or not lines[place - 1].strip():
            continue
        others = sorted({line for line in lines if line.strip() and line != lines[place]})
        choices = [lines[place], *draw.sample(others, CHOICES - 1)]
        draw.shuffle(choices)
        context = "\n".join(lines[place - CONTEXT_LINES : place]).rstrip()
        found.append({
            "module": name, "context": context, "choices": [f"\n{line.rstrip()}" for line in choices],
            "label": choices.index(lines[place]),
        })  # fmt: skip
    return found


def score_in_process(runner: Runner, questions: Sequence[Mapping[str, Any]]) -> list[list[Score]]:
    """Return the score of each choice of each question, computed in process as lm-eval computes it from a server's
    answer."""
    tokenizer = runner.tokenizer
    assert tokenizer is not None
    requests, begins = [], {}
    sampling = SamplingParameters(max_tokens=1, temperature=0, prompt_logprobs=1)
    for number, question in enumerate(questions):
        begin = len(tokenizer.encode(question["context"]))
        for choice, line in enumerate(question["choices"]):
            name = f"{number} {choice}"
            requests.append(Request(name, tuple(tokenizer.encode(question["context"] + line)), sampling))
            begins[name] = begin
    scores: dict[str, Score] = {}
    for event in runner.stream(requests):
        if isinstance(event, Finished):
            tokens = event.prompt_logprobs[begins[event.request_id] :]
            values = [each.logprob or 0.0 for each in tokens]
            greedy = all(value >= each.top[0][1] for value, each in zip(values, tokens, strict=True))
            scores[event.request_id] = sum(values), greedy
    return [[scores[f"{number} {choice}"] for choice in range(CHOICES)] for number in range(len(questions))]


def accuracies(questions: Sequence[Mapping[str, Any]], scores: Sequence[Sequence[Score]]) -> dict[str, float]:
    """Return the fraction of questions answered right: by log-probability (`acc`), and by log-probability per character
    (`acc_norm`)."""
    right = {"acc": 0, "acc_norm": 0}
    for question, row in zip(questions, scores, strict=True):
        plain = [score for score, _ in row]
        normed = [score / len(line) for score, line in zip(plain, question["choices"], strict=True)]
        right["acc"] += plain.index(max(plain)) == question["label"]
        right["acc_norm"] += normed.index(max(normed)) == question["label"]
    return {name: count / len(questions) for name, count in right.items()}


def run_lm_eval(python: Path, url: str, under_way: int, folder: Path) -> tuple[dict[str, float], list[list[Score]]]:
    """Run lm-eval through the server; return its accuracies and the scores by question. WorkbenchError if it fails."""
    out = folder / f"out-{len(list(folder.iterdir()))}"
    arguments = {
        "model": MODEL, "base_url": f"{url}/v1/completions", "tokenizer_backend": "remote", "max_length": 1024,
        "num_concurrent": under_way, "max_retries": 1,
    }  # fmt: skip
    command = [
        str(python), "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", TASK, "--include_path",
        str(folder),
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()), "--batch_size",
        "4" if under_way > 1 else "1", "--output_path", str(out), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **offline})
    if done.returncode:
        raise WorkbenchError(f"lm-eval failed ({done.returncode}): {done.stderr[-2000:]}")
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    found = json.loads(results.read_text())["results"][TASK]
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    scores = [[(float(value), str(greedy) == "True") for value, greedy in row["filtered_resps"]] for row in rows]
    return {name: found[f"{name},none"] for name in ("acc", "acc_norm")}, scores


def compare(own: Sequence[Sequence[Score]], read: Sequence[Sequence[Score]]) -> dict[str, Any]:
    pairs = [pair for mine, theirs in zip(own, read, strict=True) for pair in zip(mine, theirs, strict=True)]
    return {
        "lines": len(pairs),
        "largest_difference": max(abs(mine[0] - theirs[0]) for mine, theirs in pairs),
        "different_first_choices": sum(mine[1] != theirs[1] for mine, theirs in pairs),
    }


def measure(python: Path, count: int, seed: int) -> dict[str, Any]:
    """Return the record of all settings, each with its verdict by the rule above."""
    questions = make_questions(count, seed)
    own = score_in_process(load_runner(SETTINGS["one at a time"][0]), questions)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "model": MODEL,
        "questions": count,
        "seed": seed,
        "in_process": accuracies(questions, own),
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "questions.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in questions))
        (folder / f"{TASK}.yaml").write_text(TASK_YAML.format(task=TASK, data=data))
        for setting, (engine, under_way) in SETTINGS.items():
            with serve(load_runner(engine)) as server:
                found, scores = run_lm_eval(python, server.url, under_way, folder)
            row = {"setting": setting, "engine": engine, "under_way": under_way, **found, **compare(own, scores)}
            row["equal"] = (
                len(scores) == count
                and found == record["in_process"]
                and row["largest_difference"] <= TOLERANCE
                and not row["different_first_choices"]
            )
            rows.append(row)
    return {**record, "tolerance": TOLERANCE, "rows": rows, "equal": all(row["equal"] for row in rows)}


def load_runner(engine: Mapping[str, Any]) -> Runner:
    return load(MODEL, backend="eager", dtype="float32", **engine)


def main(
    python: Annotated[Path, typer.Option(help="the interpreter of an environment that has lm-eval")],
    questions: Annotated[int, typer.Option(min=1)] = 80,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="folder for the record, e.g. experiments/records")] = None,
) -> None:
    """Score the questions through the server and in process, and report whether the scores are equal."""
    record = measure(python, questions, seed)
    typer.echo(f"in process  {record['in_process']}")
    for row in record["rows"]:
        typer.echo(
            f"{row['setting']:22} acc {row['acc']:.4f}  acc_norm {row['acc_norm']:.4f}  largest difference "
            f"{row['largest_difference']:.2g}  {'equal' if row['equal'] else 'NOT EQUAL'}"
        )
    if out is not None:
        typer.echo(f"record  {write_dated_record(record, out, 'lm_eval_parity')}")
    raise typer.Exit(0 if record["equal"] else 1)


if __name__ == "__main__":
    typer.run(main)
