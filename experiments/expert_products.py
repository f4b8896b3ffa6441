"""Measure mixture-of-experts layers: `python -m experiments.expert_products [--json] [--layers 4] [--peer PYTHON]`.

A model of the widths of OLMoE 1B 7B (`shape:olmoe-1b-7b`) with fewer layers, random weights in bfloat16, on the backend
mlir: decode steps at batch 1 against this machine's read ceiling, prefill and the products alone against the rate of a
dense product, all in interleaved rounds. `--peer` is a Python that has llama-cpp-python: llama.cpp then runs the same
weights, in turns with ours, and its logits are compared.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked import from_panels, to_panels
from workbench.bench.model import BenchCase, run_repetition
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.executors.select import Backends
from workbench.machine.ceilings import measure_read_bandwidth
from workbench.machine.environment import environment
from workbench.model.attention_spec import AttentionSpec
from workbench.model.feedforward import MixtureOfExperts
from workbench.model.hf.convert_gguf import convert_to_gguf
from workbench.model.hf.families import read_spec
from workbench.model.hf.shards import SHARD_BYTES, write_json, write_shards
from workbench.model.hf.weights import random_weights
from workbench.model.model_parameters import stored_parameters
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec, MoESpec
from workbench.model.transformer import Transformer

SHAPE, CONTEXT, PROMPT, DECODED = "olmoe-1b-7b", 128, 512, 16  # tokens: before decodes, of a prefill, decoded a round
READ_BYTES = 512 * 2**20
LLAMA = Path(__file__).with_name("expert_products_llama.py")
Row = dict[str, Any]


def main(
    as_json: Annotated[bool, typer.Option("--json")] = False, layers: int = 4, rounds: int = 7, peer: str = ""
) -> None:
    torch.manual_seed(0)
    spec = named_shape(SHAPE)
    count = len(spec.layers)
    spec = spec.model_copy(update={"name": f"{SHAPE}, {layers} of {count} layers", "layers": spec.layers[:layers]})
    state = random_weights(spec, torch.bfloat16, 0)
    with tempfile.TemporaryDirectory() as folder:
        llama = Llama(peer, spec, state, Path(folder)) if peer else None
        model = Transformer.from_state(spec, state, Backend.MLIR)
        state.clear()  # or the matrices would stay beside those in panels
        found = measured(model, rounds, llama)
    record = {"experiment": "expert_products", "model": spec.name, "environment": environment(), **found}
    print(json.dumps(record, indent=2) if as_json else _lines(found))


def measured(model: Transformer, rounds: int, llama: Llama | None) -> Row:
    model.use_panels()
    limits = {"max_num_batched_tokens": PROMPT, "max_num_seqs": 1, "pages": 64}
    backends = Backends(Backend.MLIR, Backend.MLIR, Backend.MLIR, "all on mlir")
    runner = Runner(EngineConfig.build("unused", **limits), LoadedModel(model, None, backends))
    tokens = torch.randint(model.spec.vocab_size, (64, PROMPT)).tolist()
    decode, prefill = BenchCase("decode", 1, 0, CONTEXT, DECODED), BenchCase("prefill", 1, 0, PROMPT)
    things: dict[str, Callable[[int], Any]] = {
        "read": lambda n: measure_read_bandwidth(READ_BYTES, compiled=True).value,
        "decode": lambda n: run_repetition(runner, decode, n).forward_seconds / DECODED,
        "prefill": lambda n: run_repetition(runner, prefill, n).forward_seconds,
        **products(model),
    }
    if llama is not None:
        things |= {"llama.cpp decode": lambda n: llama.decode(tokens[n][:CONTEXT], DECODED),
                   "llama.cpp prefill": lambda n: llama.decode(tokens[n], 1)}  # fmt: skip
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, run in things.items():
            value = run(number)
            if number:  # the first round warms up
                samples[name].append(value)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    row: Row = {"rounds": rounds, "threads": torch.get_num_threads(), "bytes_of_a_token": model.weight_bytes,
                "medians": medians, "samples": samples, "shares": shares(model, medians)}  # fmt: skip
    if llama is not None:
        row["llama.cpp"] = {"version": llama.version, "logits": llama.compare(runner, tokens[0][:9])}
    return row


def shares(model: Transformer, found: dict[str, float]) -> Row:
    """Return the fraction of this machine's ceilings that each part reached, and the speed relative to llama.cpp."""
    dense = max(found["dense product"], found["torch float32 product"])
    flops = prefill_flops(model)
    row = {
        "decode step of the read ceiling": model.weight_bytes / found["decode"] / found["read"],
        "expert products of a decode of the read ceiling": found["experts, 8 rows"] / found["read"],
        "expert products of a prefill of the dense rate": found["experts, 4096 rows"] / dense,
        "whole prefill of the dense rate": flops / found["prefill"] / dense,
    }
    if "llama.cpp decode" in found:
        row["decode, times llama.cpp"] = found["llama.cpp decode"] / found["decode"]
        row["prefill, times llama.cpp"] = found["llama.cpp prefill"] / found["prefill"]
    return row


def prefill_flops(model: Transformer) -> float:
    """Return the FLOPs of a prompt's matrix products, without attention scores and with the head for one row."""
    spec = model.spec
    used = sum(kind.attention.matrix_parameters(spec.hidden_size) for kind in spec.layers)
    used += sum(spec.hidden_size * kind.mlp_parameters_per_column[1] for kind in spec.layers)
    return 2.0 * PROMPT * used + 2.0 * spec.vocab_size * spec.hidden_size


def products(model: Transformer) -> dict[str, Callable[[int], float]]:
    """Return functions that measure rates: of the first layer's expert products in bytes/s (8 rows) or FLOP/s (4096
    rows), and of dense products."""
    weight = cast(MixtureOfExperts, model.blocks[0].feedforward).gate_up
    experts, (out, width) = len(weight), from_panels(weight[0]).shape
    one, many = torch.randn(8, width).bfloat16(), torch.randn(4096, width).bfloat16()
    among, even = torch.randint(experts, (4096,)), torch.arange(4096) % experts
    dense = to_panels(torch.randn(out, width).bfloat16() * width**-0.5)
    wide, flat = many.float(), from_panels(dense).float().T.contiguous()
    rows = {8: 8 * out * width * 2, 4096: 2 * 4096 * out * width}

    def rate(amount: int, run: Callable[[], object]) -> float:
        with torch.inference_mode():
            began = time.perf_counter()
            run()
        return amount / (time.perf_counter() - began)

    def by_experts(x: Tensor, expert: Tensor, backend: Backend = Backend.MLIR) -> Callable[[], object]:
        return lambda: compiled_kernels.expert_linear(x, expert, weight, backend=backend)

    def few(_: int) -> float:
        return statistics.median(rate(rows[8], by_experts(one, torch.randperm(experts)[:8])) for _ in range(15))

    return {
        "experts, 8 rows": few,
        "experts, 4096 rows": lambda _: rate(rows[4096], by_experts(many, among)),
        "experts, 4096 even rows": lambda _: rate(rows[4096], by_experts(many, even)),
        "dense product": lambda _: rate(rows[4096], lambda: compiled_kernels.linear(many, dense, None, Backend.MLIR)),
        "torch float32 product": lambda _: rate(rows[4096], lambda: wide @ flat),
    }


def write_gguf(spec: ModelSpec, state: dict[str, Tensor], folder: Path) -> None:
    """Write a model of OLMoE's family as `folder`/model.gguf, by way of a Hugging Face folder."""
    source, layer = folder / "hf", spec.layers[0]
    attention, experts = cast(AttentionSpec, layer.attention), cast(MoESpec, layer.experts)
    source.mkdir()
    write_json(source / "config.json", {
        "model_type": "olmoe", "hidden_size": spec.hidden_size, "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": len(spec.layers), "num_attention_heads": attention.num_heads,
        "num_experts": experts.num_experts, "num_experts_per_tok": experts.num_experts_per_tok,
        "max_position_embeddings": spec.max_position_embeddings, "vocab_size": spec.vocab_size,
    })  # fmt: skip
    parameters = stored_parameters(read_spec(source))
    parts = (each for name, parameter in parameters.items() for each in parameter.to_stored(state[name]))
    write_shards(source, ((part.name, own) for part, own in parts), SHARD_BYTES)
    convert_to_gguf(source, folder / "model.gguf", "bf16", torch.bfloat16)
    shutil.rmtree(source)


class Llama:
    """llama.cpp in a separate process, with the same weights as GGUF (see expert_products_llama.py)."""

    def __init__(self, python: str, spec: ModelSpec, state: dict[str, Tensor], folder: Path):
        write_gguf(spec, state, folder)
        command = [python, str(LLAMA), str(folder / "model.gguf"), str(torch.get_num_threads()), str(PROMPT + DECODED)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def decode(self, prompt: list[int], tokens: int) -> float:
        """Return the median seconds of a decoded token; if `tokens` is 1, the seconds of the prompt."""
        return self._ask({"prompt": prompt, "output_tokens": tokens})["seconds"]

    def compare(self, runner: Runner, prompt: list[int]) -> Row:
        """Return the distance of llama.cpp's logits after `prompt` from ours, relative to the norm of ours, and whether
        the likeliest token is the same."""
        theirs = torch.tensor(self._ask({"prompt": prompt, "output_tokens": 0})["logits"])
        ours = runner.model.logits(prompt)[-1]
        return {"relative": float((theirs - ours).norm() / ours.norm()), "same": bool(theirs.argmax() == ours.argmax())}

    def _ask(self, job: Row) -> Row:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llama.cpp's process has ended")
        return json.loads(line)


def _lines(found: Row) -> str:
    return "\n".join(f"{name:56} {value:.4g}" for part in ("medians", "shares") for name, value in found[part].items())


if __name__ == "__main__":
    typer.run(main)
