"""Train the models that ship in `workbench/demo/`: `python -m tools.training.train_demo`.

Tokenizer, target and draft, in that order; finished parts are not repeated, and an interrupted run continues from its
last checkpoint. Same seeds, same machine and same number of threads give the same weights. On two CPU cores the whole
takes about two hours, on a GPU minutes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer

from experiments import demo_tokenizer
from tools.training import demo_card, demo_corpus
from tools.training.demo_model import SHAPES, Learner
from tools.training.muon import Muon
from workbench.files import write_atomically
from workbench.progress import Progress

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "workbench" / "demo"
WORK = REPOSITORY / "build" / "demo"
ENTRIES = 4096
CONTEXT = 1024
CHECKPOINT_STEPS = 100


def held_out_files() -> list[Path]:
    """Return the modules that no training sees; bits per byte are reported over these."""
    return [file.path for file in demo_corpus.held_out_files()]


@dataclass(frozen=True)
class Recipe:
    """Settings of one training run. Learning rates are peak values: a short rise, a plateau, then a straight fall to
    zero."""

    name: str
    tokens: int
    sequences: int = 8
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    weight_decay: float = 0.1
    warm_up: int = 60
    fall: float = 0.5
    copied: int = 0  # sequences of each batch, over the first half, that repeat a stretch of random tokens
    seed: int = 20261121

    @property
    def steps(self) -> int:
        return self.tokens // (self.sequences * CONTEXT)

    def copies(self, step: int) -> int:
        """Return the number of sequences of pure repetition in the batch of `step`: without them a small model learns
        to copy late, or never.
        """
        return self.copied if step < self.steps // 2 else 0

    def rate(self, step: int) -> float:
        """Return the learning rate at `step` as a fraction of its peak."""
        return min(1.0, (step + 1) / self.warm_up, (self.steps - step) / (self.fall * self.steps))


RECIPES = (
    Recipe("target", tokens=15_000_000),
    Recipe("draft", tokens=24_000_000, other_rate=4e-3, weight_decay=0.0, copied=2),
)


class Corpus:
    """The tokens of both sides of the split, one array per file, cached in the work folder."""

    def __init__(self, tokenizer: Tokenizer, work: Path):
        self.training = _encoded(tokenizer, demo_corpus.training_files(), work / "training.npz")
        self.held_out = _encoded(tokenizer, demo_corpus.held_out_files(), work / "held_out.npz")

    def batches(self, recipe: Recipe, first_step: int) -> Iterator[torch.Tensor]:
        """Yield inputs and targets [2, sequence, CONTEXT] for every step from `first_step` on.

        Each pass lays the files end to end in a new order, cuts the stream into windows and shuffles these:
        a batch of neighbours would be one file, and its gradient that file's alone.
        """
        step, passes = 0, 0
        while True:
            rng = np.random.default_rng((recipe.seed, passes))
            stream = np.concatenate([self.training[i] for i in rng.permutation(len(self.training))])
            windows = rng.permutation((len(stream) - 1) // CONTEXT)
            for index in range(len(windows) // recipe.sequences):
                if step >= first_step:
                    starts = windows[index * recipe.sequences : (index + 1) * recipe.sequences] * CONTEXT
                    rows = np.stack([stream[s : s + CONTEXT + 1] for s in starts]).astype(np.int64)
                    chance = np.random.default_rng((recipe.seed, step, 1))
                    for row in range(recipe.copies(step)):
                        period = chance.integers(CONTEXT // 32, CONTEXT // 4)
                        rows[row] = np.resize(stream[chance.integers(0, len(stream), period)], CONTEXT + 1)
                    yield torch.from_numpy(np.stack([rows[:, :-1], rows[:, 1:]]))
                step += 1
            passes += 1


def _encoded(tokenizer: Tokenizer, files: list[demo_corpus.SourceFile], cache: Path) -> list[np.ndarray]:
    if cache.exists():
        with np.load(cache) as stored:
            return np.split(stored["ids"], stored["ends"][:-1])
    begin, end = tokenizer.token_to_id(demo_tokenizer.BEGIN), tokenizer.token_to_id(demo_tokenizer.END)
    encodings = tokenizer.encode_batch([file.text() for file in files], add_special_tokens=False)
    arrays = [np.array([begin, *encoding.ids, end], np.uint16) for encoding in encodings]
    ids, ends = np.concatenate(arrays), np.cumsum([len(array) for array in arrays])
    write_atomically(cache, lambda file: np.savez(file, ids=ids, ends=ends))
    return arrays


def train(recipe: Recipe, corpus: Corpus, work: Path, device: str, compiled: bool = True) -> Learner:
    """Train a model by `recipe`, continuing an interrupted run, and return it."""
    model = Learner(SHAPES[recipe.name], recipe.seed).to(device)
    forward = torch.compile(model) if compiled else model
    inner = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    inner_ids = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in inner_ids]
    muon = Muon(inner, weight_decay=recipe.weight_decay)
    adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    checkpoint, curve_file = work / f"{recipe.name}.pt", work / f"{recipe.name}.curve.jsonl"
    first = _resume(checkpoint, model, muon, adam, device)
    if first == 0:
        curve_file.write_text("")

    progress = Progress(total=recipe.steps, initial=first, desc=recipe.name, unit="step", mininterval=5)
    losses: list[float] = []
    began = time.monotonic()
    for step, batch in zip(range(first, recipe.steps), corpus.batches(recipe, first), strict=False):
        ids, wanted = batch.to(device)
        logits = forward(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss.backward()
        for optimizer, peak in ((muon, recipe.matrix_rate), (adam, recipe.other_rate)):
            for group in optimizer.param_groups:
                group["lr"] = peak * recipe.rate(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        progress.update()
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == recipe.steps:
            _save(checkpoint, step + 1, model, muon, adam)
            point = {
                "step": step + 1,
                "tokens": (step + 1) * recipe.sequences * CONTEXT,
                "training_loss": round(sum(losses) / len(losses), 4),
                "held_out_loss": round(_sampled_loss(forward, corpus, device), 4),
                "seconds": round(time.monotonic() - began, 1),
            }
            with curve_file.open("a") as file:
                file.write(json.dumps(point) + "\n")
            progress.set_postfix(train=point["training_loss"], held=point["held_out_loss"])
            losses.clear()
    progress.close()
    return model


def _resume(checkpoint: Path, model, muon, adam, device: str) -> int:
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    muon.load_state_dict(state["muon"])
    adam.load_state_dict(state["adam"])
    return state["step"]


def _save(checkpoint: Path, step: int, model, muon, adam) -> None:
    state = {"step": step, "model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict()}
    write_atomically(checkpoint, lambda file: torch.save(state, file))


@torch.no_grad()
def _sampled_loss(forward, corpus: Corpus, device: str) -> float:
    """Return nats a token over 64 fixed windows of the held-out stream: a quick look, for the curve only."""
    stream = np.concatenate(corpus.held_out)
    starts = np.linspace(0, len(stream) - CONTEXT - 1, 64).astype(int)
    total = 0.0
    for group in np.split(starts, 8):
        windows = np.stack([stream[s : s + CONTEXT + 1] for s in group]).astype(np.int64)
        ids = torch.from_numpy(windows).to(device)
        total += F.cross_entropy(forward(ids[:, :-1].contiguous()).flatten(0, 1), ids[:, 1:].flatten()).item()
    return total / 8


def export(model: Learner, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder: config.json, bfloat16 model.safetensors, tokenizer.json."""
    tokenizer.save(str(_made(folder) / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    write_atomically(folder / "model.safetensors", lambda file: save_file(weights, file.name, {"format": "pt"}))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tokenizer_for(work: Path) -> Tokenizer:
    path = work / "tokenizer.json"
    if not path.exists():
        texts = (file.text() for file in demo_corpus.training_files())
        trained = demo_tokenizer.train(Progress(texts, desc="tokenizer", unit="file"), ENTRIES)
        write_atomically(path, lambda file: trained.save(file.name))
    return demo_tokenizer.load(path)


def main(
    only: Annotated[str, typer.Option(help="which models, comma separated")] = "target,draft",
    work: Annotated[Path, typer.Option(help="checkpoints and encoded text")] = WORK,
    out: Annotated[Path, typer.Option(help="where the finished model folders go")] = DEMO,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    threads: Annotated[int, typer.Option(help="processor threads")] = torch.get_num_threads(),
) -> None:
    """Train the demo's tokenizer and models, or continue an interrupted run."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(work)
    corpus = Corpus(tokenizer, work)
    for recipe in RECIPES:
        if recipe.name not in only.split(","):
            continue
        export(train(recipe, corpus, work, device), out / recipe.name, tokenizer)
    demo_tokenizer.bytes_only().save(str(_made(out / "bytes") / "tokenizer.json"))
    if all((out / recipe.name / "model.safetensors").exists() for recipe in RECIPES):
        for name, figure in demo_card.write(out, work, RECIPES).items():
            typer.echo(f"{name}: {figure:.4f} bits a byte over the held-out files")


if __name__ == "__main__":
    typer.run(main)
