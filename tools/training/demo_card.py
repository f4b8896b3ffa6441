"""Write the demo models' card from the results of the training, without figures typed by hand."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import torch

import workbench
from tools.training import demo_corpus, demo_model, demo_quality
from workbench.display import Table
from workbench.machine.environment import environment

CURVE_ROWS = 12


def write(out: Path, work: Path, recipes: tuple) -> dict[str, float]:
    """Measure the shipped files and write `README.md`, `card.json` and `corpus.json` into `out`."""
    held_out, training = demo_corpus.held_out_files(), demo_corpus.training_files()
    figures = {"xz -9e": demo_quality.xz_bits_per_byte(held_out)}
    for recipe in recipes:
        runner = workbench.load(str(out / recipe.name), backend="eager")
        figures[recipe.name] = demo_quality.bits_per_byte(runner, held_out)
    manifest = demo_corpus.manifest()
    (out / "corpus.json").write_text(json.dumps(manifest, separators=(",", ":")) + "\n")
    here = environment()
    card = {"bits_per_byte": figures, "date": date.today().isoformat(), "environment": here}
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    sizes = {"held out": held_out, "training": training}
    (out / "README.md").write_text(_text(figures, sizes, recipes, work, out, here))
    return figures


def _text(figures: dict[str, float], sides: dict, recipes: tuple, work: Path, out: Path, here: dict) -> str:
    counts = {name: (len(files), sum(f.path.stat().st_size for f in files)) for name, files in sides.items()}
    bits = Table("", [(name, f"{value:.4f}") for name, value in figures.items()], ("", "bits a byte"))
    headings = (
        "", "parameters", "layers", "hidden size", "heads / KV heads x head_dim", "intermediate size", "file",
    )  # fmt: skip
    shapes = Table("", [_shape_row(recipe, out) for recipe in recipes], headings)
    headings = ("", "tokens", "a batch", "matrix rate", "other rate", "decay", "rise", "fall", "seed")
    rows = [
        (r.name, f"{r.tokens:,}", f"{r.sequences} x 1,024", str(r.matrix_rate), str(r.other_rate), str(r.weight_decay),
         f"{r.warm_up} steps", f"last {r.fall:.0%}", str(r.seed))
        for r in recipes
    ]  # fmt: skip
    recipe_table = Table("", rows, headings)
    curves = "\n".join(_curve(recipe.name, work).markdown() for recipe in recipes)
    return f"""# The demo models

Two small Llama-style models of Python code, trained by this project so that it runs where nothing can be
downloaded. They are instruments for studying inference, not assistants: they continue Python, with no claim
to correctness, and know nothing else.

This page is written by `python -m tools.training.train_demo`; its figures are for the files beside it.

## Held-out text

{bits.markdown()}
Over {counts["held out"][0]} modules ({counts["held out"][1]:,} bytes) that no training and no tokenizer saw, each
alone, every token predicted from at least half a context but for a file's beginning; xz reads all of them as
one stream. Measured with the shipped bfloat16 files through the workbench's own model, torch
{torch.__version__}. The draft's figure is {figures["draft"] / figures["target"]:.2f} times the target's.

## Shapes

{shapes.markdown()}
4,096 byte-level BPE entries shared by both (control tokens first: begin, end, pad and the chat tokens), context
1,024, rotary base 10,000, tied head. `bytes/` holds a tokenizer with the same control tokens and no merges.

## Data and its licence

The standard library of CPython {here["python"]} (PSF License Version 2; its sources are (c) Python Software
Foundation), {counts["training"][0]:,} modules ({counts["training"][1]:,} bytes) for training. One module in twenty
is held out by the SHA-256 of its path below the library, so that the split does not depend on contents.
Installed packages are no part of it. `corpus.json` lists every file with its side, size and SHA-256.
Short passages of the library may be reproduced by the models.

## Recipe

{recipe_table.markdown()}
Muon (Jordan et al., 2024) for the matrices inside the blocks, AdamW for embedding and norms; next-token
cross-entropy, bfloat16 products over float32 weights, windows of 1,024 tokens shuffled across files. Over the
first half of the draft's training two of the eight sequences of a batch repeat a stretch of random tokens. How the
runs that ship departed from this table (threads, interruptions) is described in `experiments/LOG.md`.
`python -m tools.training.train_demo` repeats it, goes on after an interruption, and uses a GPU where there is one.
Weights are the same only for the same torch, machine and number of threads.

## Curves

Nats a token; held out is a sample of 64 windows.

{curves}"""


def _shape_row(recipe, out: Path) -> tuple[str, ...]:
    config = demo_model.SHAPES[recipe.name]
    runner = workbench.load(str(out / recipe.name), backend="eager")
    file = (out / recipe.name / "model.safetensors").stat().st_size
    heads = f"{config['num_attention_heads']} / {config['num_key_value_heads']} x {config['head_dim']}"
    sizes = (str(config[name]) for name in ("num_hidden_layers", "hidden_size"))
    return (
        recipe.name, f"{runner.model.spec.num_parameters:,}", *sizes, heads, str(config["intermediate_size"]),
        f"{file / 1e6:.1f} MB",
    )  # fmt: skip


def _curve(name: str, work: Path) -> Table:
    points = [json.loads(line) for line in (work / f"{name}.curve.jsonl").read_text().splitlines()]
    stride = -(-len(points) // CURVE_ROWS)
    kept = points[stride - 1 :: stride]
    kept += [points[-1]] if kept[-1] is not points[-1] else []
    rows = [(f"{p['tokens']:,}", f"{p['training_loss']:.3f}", f"{p['held_out_loss']:.3f}") for p in kept]
    return Table(name, rows, ("tokens seen", "training", "held out"))
