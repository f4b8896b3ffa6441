"""Run llama.cpp for experiments/expert_products.py: `PYTHON expert_products_llama.py FOLDER THREADS LAYERS`.

PYTHON has llama-cpp-python, gguf and numpy. It writes the state in the folder as GGUF, then answers one job per line:
with the median seconds of decoded tokens, the seconds of a prompt (`tokens` 1), or its logits (`tokens` 0)."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HEADS, HIDDEN, CONTEXT, VOCAB, EXPERTS, USED, INTERMEDIATE = 16, 2048, 4096, 50_304, 64, 8, 1024
BATCH = 2048


def tensors(folder: Path, layers: int) -> Any:
    """Yield every tensor as (GGUF name, float32 values)."""
    import numpy as np

    file = folder / "state.safetensors"
    size = int.from_bytes(file.open("rb").read(8), "little")
    header = json.loads(file.open("rb").read(8 + size)[8:])
    data = np.memmap(file, np.uint8, "r", offset=8 + size)

    def read(name: str) -> Any:
        start, end = header[name]["data_offsets"]
        bits = data[start:end].view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(header[name]["shape"])

    yield "token_embd.weight", read("embedding.weight")
    yield "output_norm.weight", read("norm.weight")
    yield "output.weight", read("head.weight")
    for layer in range(layers):
        ours, theirs = f"blocks.{layer}.", f"blk.{layer}."
        for part, rows in zip(("q", "k", "v"), np.split(read(ours + "attention.qkv.weight"), 3), strict=True):
            yield f"{theirs}attn_{part}.weight", rows
        gate, up = np.split(read(ours + "feedforward.gate_up"), 2, axis=1)
        names = {
            "attn_norm": "attention_norm.weight", "ffn_norm": "feedforward_norm.weight",
            "attn_q_norm": "attention.query_norm.weight", "attn_k_norm": "attention.key_norm.weight",
            "attn_output": "attention.output.weight", "ffn_gate_inp": "feedforward.router.weight",
            "ffn_down_exps": "feedforward.down",
        }  # fmt: skip
        yield from ((f"{theirs}{name}.weight", read(ours + own)) for name, own in names.items())
        yield f"{theirs}ffn_gate_exps.weight", np.ascontiguousarray(gate)
        yield f"{theirs}ffn_up_exps.weight", np.ascontiguousarray(up)


def write(folder: Path, layers: int) -> Path:
    import gguf

    target = folder / "model.gguf"
    writer = gguf.GGUFWriter(str(target), "olmoe")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    kind = gguf.GGMLQuantizationType.BF16
    for name, values in tensors(folder, layers):
        if values.ndim == 1 or "gate_inp" in name:  # norms and routers are float32 in its own conversions
            writer.add_tensor(name, values.copy())
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "state.safetensors").unlink()
    return target


class Engine:
    def __init__(self, file: Path, threads: int):
        import llama_cpp
        import numpy

        self.llama, self.numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = BATCH
        context.n_threads = context.n_threads_batch = threads
        self.context: Any = llama_cpp.llama_init_from_model(self.model, context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def step(self, start: int, tokens: list[int]) -> Any:
        batch = self.batch
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place == len(tokens) - 1
        batch.n_tokens = len(tokens)
        if status := self.llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        pointer = self.llama.llama_get_logits_ith(self.context, len(tokens) - 1)
        return self.numpy.ctypeslib.as_array(pointer, shape=(VOCAB,))

    def answer(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), False)
        began = time.perf_counter()
        logits = self.step(0, prompt)
        seconds = [time.perf_counter() - began]
        if not tokens:
            return {"logits": logits.tolist()}
        for place in range(1, tokens):
            token = int(logits.argmax())
            began = time.perf_counter()
            logits = self.step(len(prompt) + place - 1, [token])
            seconds.append(time.perf_counter() - began)
        return {"seconds": statistics.median(seconds[1:] or seconds)}


if __name__ == "__main__":
    engine = Engine(write(Path(sys.argv[1]), int(sys.argv[3])), int(sys.argv[2]))
    print(json.dumps({"version": engine.llama.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.answer(**json.loads(line))), flush=True)
