"""Train demo-chat, the demo target continued on conversations: `python -m tools.training.train_chat --hours 2`.

Conversations are drawn anew for every step and packed whole, end to end, none attending to another. The loss is over
the tokens that the assistant writes; a window of code in every step keeps it a code model. The rate rises, stays and
falls with the share of the time that is used up: a slower machine ends in time with fewer steps. An interrupted run
goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from experiments.chat_conversations import ChatSample, draw
from experiments.chat_format import CHAT, CONFIG, chat_tokenizer, encode, save_format, segments
from experiments.demo_tokenizer import BEGIN, END
from tools.training import chat_card, demo_corpus
from tools.training.demo_model import SHAPES, Learner
from tools.training.muon import Muon
from workbench.files import write_atomically
from workbench.prompt.own_template import TURN

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET = REPOSITORY / "workbench" / "demo" / "target"
WORK = REPOSITORY / "build" / "chat"
CONTEXT = 1024  # tokens; longer conversations are left out
MAX_TEXTS = 1000  # of a step
EVALUATED = 96  # held-out conversations


@dataclass(frozen=True)
class ChatRecipe:
    """Settings of one training run; learning rates are the peak values."""

    tokens: int = 4096  # a step
    code: int = 512  # of these
    matrix_rate: float = 0.01
    other_rate: float = 2e-3
    weight_decay: float = 0.05
    rise: float = 0.01  # shares of the run
    fall: float = 0.6
    seed: int = 20261123

    def rate(self, share: float) -> float:
        """Return the learning rate as a fraction of its peak, when the fraction `share` of the run is over."""
        return max(0.0, min(1.0, (share + 1e-3) / self.rise, (1 - share) / self.fall))


@dataclass(frozen=True)
class Packed:
    """Texts packed end to end: ids [token], whether the model learns to write each token, and the texts' lengths."""

    ids: torch.Tensor
    learned: torch.Tensor
    lengths: list[int]

    def predicting(self) -> torch.Tensor:
        """Return the positions whose next token is learned and belongs to the same text."""
        last = torch.zeros_like(self.learned)
        last[torch.tensor(self.lengths).cumsum(0) - 1] = True
        return (self.learned.roll(-1) & ~last).nonzero().flatten()


class Texts:
    """The training texts of every step, conversations and a window of code; a step's texts are always the same."""

    def __init__(self, tokenizer: Tokenizer, recipe: ChatRecipe, work: Path):
        self.tokenizer, self.recipe = tokenizer, recipe
        self.code = _encoded_code(tokenizer, work / "code.npy")

    def step(self, step: int) -> Packed:
        """Return the packed texts of one step: the code first, then as many whole conversations as fit."""
        chance = np.random.default_rng((self.recipe.seed, step))
        start = int(chance.integers(len(self.code) - self.recipe.code))
        texts = [(self.code[start : start + self.recipe.code].tolist(), [True] * self.recipe.code)]
        size = self.recipe.code
        for number in range(MAX_TEXTS):
            text = encoded(self.tokenizer, draw("training", step * MAX_TEXTS + number))
            if len(text[0]) > CONTEXT:
                continue
            if size + len(text[0]) > self.recipe.tokens:
                break
            texts.append(text)
            size += len(text[0])
        ids, learned = (torch.tensor([each for text in texts for each in text[side]]) for side in (0, 1))
        return Packed(ids, learned, [len(ids) for ids, _ in texts])


def encoded(tokenizer: Tokenizer, sample: ChatSample) -> tuple[list[int], list[bool]]:
    return encode(tokenizer, segments(sample.messages(), sample.declarations, sample.kept < 1))


def _encoded_code(tokenizer: Tokenizer, cache: Path) -> np.ndarray:
    if not cache.exists():
        begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
        tokenizer.encode_special_tokens = True
        files = [tokenizer.encode(file.text(), add_special_tokens=False).ids for file in demo_corpus.training_files()]
        stream = np.concatenate([np.array([begin, *ids, end], np.uint16) for ids in files])
        write_atomically(cache, lambda file: np.save(file, stream))
    return np.load(cache)


class Training:
    """A model in training with its optimizers and counters; `state` is everything that a checkpoint saves."""

    def __init__(self, recipe: ChatRecipe, work: Path, device: str, dtype: torch.dtype):
        self.recipe, self.work, self.device = recipe, work, device
        self.tokenizer = chat_tokenizer(TARGET / "tokenizer.json")
        self.texts = Texts(self.tokenizer, recipe, work)
        self.model = Learner(SHAPES["target"], recipe.seed, dtype).to(device)
        self.model.load_state_dict(
            {name: each.float() for name, each in load_file(TARGET / "model.safetensors").items()}
        )
        inner = [p for name, p in self.model.named_parameters() if p.dim() == 2 and "layers" in name]
        rest = [p for name, p in self.model.named_parameters() if p.dim() != 2 or "layers" not in name]
        self.muon = Muon(inner, weight_decay=recipe.weight_decay, dtype=dtype)
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.steps, self.tokens, self.seconds = 0, 0, 0.0

    def step(self, share: float) -> float:
        """Take one training step, and return the loss in nats per learned token. `share` is the fraction of the run
        that is over, which sets the learning rate."""
        texts = self.texts.step(self.steps)
        loss, learned = self._loss(texts)
        (loss / learned).backward()
        for optimizer, peak in ((self.muon, self.recipe.matrix_rate), (self.adam, self.recipe.other_rate)):
            for group in optimizer.param_groups:
                group["lr"] = peak * self.recipe.rate(share)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += len(texts.ids)
        return loss.item() / learned

    def _loss(self, texts: Packed) -> tuple[torch.Tensor, int]:
        ids, at = texts.ids.to(self.device), texts.predicting().to(self.device)
        states = self.model.hidden_states(ids[None], texts.lengths)[0, at]
        return F.cross_entropy(self.model.logits(states), ids[at + 1], reduction="sum"), len(at)

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Return the loss over held-out conversations, and the fraction of assistant turns in which every token is
        predicted right.

        Every token is predicted from the right tokens before it; the decisive figures are those of `chat_quality`.
        """
        nats, tokens, turns, right = 0.0, 0, 0, 0
        end = self.tokenizer.token_to_id(TURN)
        for seed in range(EVALUATED):
            ids, learned = encoded(self.tokenizer, draw("held_out", seed))
            row, wanted = torch.tensor([ids], device=self.device), torch.tensor(learned[1:])
            logits = self.model(row[:, :-1])[0][wanted]
            answers = row[0, 1:][wanted]
            nats += F.cross_entropy(logits, answers, reduction="sum").item()
            tokens += len(answers)
            missed = (logits.argmax(-1) != answers).tolist()
            ends = [0, *(index + 1 for index, id in enumerate(answers.tolist()) if id == end)]
            parts = [missed[a:b] for a, b in zip(ends, ends[1:], strict=False)]
            turns, right = turns + len(parts), right + sum(not any(part) for part in parts)
        return {"held_out_loss": nats / tokens, "turns_right": right / turns}

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(), "muon": self.muon.state_dict(), "adam": self.adam.state_dict(),
            "steps": self.steps, "tokens": self.tokens, "seconds": self.seconds,
        }  # fmt: skip
        write_atomically(self.work / "chat.pt", lambda file: torch.save(state, file))
        self.export(self.work / "latest")

    def resume(self) -> None:
        if not (self.work / "chat.pt").exists():
            (self.work / "curve.jsonl").write_text("")
            return
        state = torch.load(self.work / "chat.pt", map_location=self.device, weights_only=True)
        for name in ("model", "muon", "adam"):
            getattr(self, name).load_state_dict(state[name])
        self.steps, self.tokens, self.seconds = state["steps"], state["tokens"], state["seconds"]

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder: config, bfloat16 weights, tokenizer and chat template."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.model.config, "eos_token_id": [1, self.tokenizer.token_to_id(CONFIG["eos_token"])]}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in self.model.named_parameters()}
        write_atomically(folder / "model.safetensors", lambda file: save_file(weights, file.name, {"format": "pt"}))
        save_format(folder, self.tokenizer)


def train(training: Training, hours: float, tokens: int, checkpoint_minutes: float) -> None:
    """Train until `hours` are used up, or until `tokens` tokens are seen if given; report and save at intervals."""
    training.resume()
    before, losses, last = training.seconds, [], time.monotonic()
    began, reported = last, training.tokens
    while (share := training.tokens / tokens if tokens else training.seconds / (3600 * hours)) < 1:
        losses.append(training.step(share))
        training.seconds = before + time.monotonic() - began
        if time.monotonic() - last > 60 * checkpoint_minutes or share == 0:
            _report(training, losses, (training.tokens - reported) / (time.monotonic() - last))
            losses, last, reported = [], time.monotonic(), training.tokens
    _report(training, losses, (training.tokens - reported) / (time.monotonic() - last))


def _report(training: Training, losses: list[float], rate: float) -> None:
    training.save()
    point = {
        "steps": training.steps, "tokens": training.tokens, "seconds": round(training.seconds),
        "tokens_per_second": round(rate), "training_loss": round(sum(losses) / max(1, len(losses)), 4),
    } | {name: round(value, 4) for name, value in training.held_out().items()}  # fmt: skip
    with (training.work / "curve.jsonl").open("a") as file:
        file.write(json.dumps(point) + "\n")
    typer.echo(json.dumps(point))


def fast_dtype(device: str) -> torch.dtype:
    """Return bfloat16 if the device computes its products fast, else float32 (other processors take eight times as long
    in bfloat16)."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return torch.bfloat16 if device != "cpu" or "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def main(
    hours: Annotated[float, typer.Option(help="wall-clock time; the rate falls to zero by its end")] = 2.0,
    tokens: Annotated[int, typer.Option(help="end after so many tokens instead")] = 0,
    work: Annotated[Path, typer.Option(help="checkpoints, curve and encoded code")] = WORK,
    out: Annotated[Path, typer.Option(help="where the finished model's folder goes")] = CHAT,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    threads: Annotated[int, typer.Option(help="processor threads")] = torch.get_num_threads(),
    batch: Annotated[int, typer.Option(help="tokens a step")] = ChatRecipe.tokens,
    matrix_rate: Annotated[float, typer.Option(help="peak rate of the matrices")] = ChatRecipe.matrix_rate,
    other_rate: Annotated[float, typer.Option(help="peak rate of the embedding and norms")] = ChatRecipe.other_rate,
    questions: Annotated[int, typer.Option(help="held-out questions of each kind for the card; 0: no card")] = 50,
    minutes: Annotated[float, typer.Option(help="between checkpoints and lines of progress")] = 5.0,
) -> None:
    """Train demo-chat, or continue an interrupted run, and write the model's folder."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    recipe = ChatRecipe(batch, matrix_rate=matrix_rate, other_rate=other_rate)
    training = Training(recipe, work, device, fast_dtype(device))
    train(training, hours, tokens, minutes)
    training.export(out)
    if questions:
        typer.echo(chat_card.write(out, work, recipe, questions, threads))


if __name__ == "__main__":
    typer.run(main)
