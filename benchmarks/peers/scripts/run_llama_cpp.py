"""Run llama.cpp as a peer, through llama-cpp-python's C functions with their defaults, so that logits and batches are
under our control."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

from peer_protocol import batch_and_length, serve

BATCH = 2048  # tokens of one call of llama_decode, llama.cpp's default


class LlamaCpp:
    def __init__(self, job: dict):
        import llama_cpp
        import numpy

        self.llama, self.numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(job["model"].encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {job['model']}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        sequences, longest = batch_and_length(job)
        context = llama_cpp.llama_context_default_params()
        context.kv_unified = True  # 1.15 times a stream for each sequence, with the 16 mixed requests
        context.n_seq_max = sequences
        context.n_ctx = sequences * (-(-longest // 256) * 256)
        context.n_batch = BATCH
        context.n_threads = context.n_threads_batch = job["threads"]
        self.how = "cache in float16 (its default)"
        if job["format"] == "float32":
            context.type_k = context.type_v = llama_cpp.GGML_TYPE_F32
            context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            self.how = "cache in float32, no flash attention"
        self.context: Any = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        if job["kind"] == "mixed":
            self.how += ", decodes and prompts batched in turn as its server does"

    def logits(self, prompt: list[int]) -> dict[str, list[float]]:
        self._clear()
        whole = self._step([(0, 0, prompt, True)])[0].tolist()
        self._clear()
        self._step([(0, 0, prompt[:-1], True)])
        return {"prefill": whole, "decode": self._step([(0, len(prompt) - 1, prompt[-1:], True)])[0].tolist()}

    def generate(self, requests: list[dict]) -> list[list[float]]:
        """Generate greedily. Each batch has one token of each decoding sequence, then prompt tokens up to the batch
        limit."""
        self._clear()
        times: list[list[float]] = [[] for _ in requests]
        cached = [0] * len(requests)
        last: dict[int, int] = {}  # of each sequence that decodes, the token that was chosen
        while any(len(own) < request["output_tokens"] for own, request in zip(times, requests, strict=True)):
            spans = [(index, cached[index], [token], True) for index, token in last.items()]
            room = BATCH - len(spans)
            for index, request in enumerate(requests):
                rest = request["prompt"][cached[index] :][:room]
                if rest:
                    ends = cached[index] + len(rest) == len(request["prompt"])
                    spans.append((index, cached[index], rest, ends))
                    room -= len(rest)
            rows = self._step(spans)
            now = time.perf_counter()
            for index, _, tokens, _ in spans:
                cached[index] += len(tokens)
            for row, index in zip(rows, [span[0] for span in spans if span[3]], strict=True):
                times[index].append(now)
                last[index] = int(row.argmax())
                if len(times[index]) == requests[index]["output_tokens"]:
                    del last[index]
        return times

    def _clear(self) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), False)

    def _step(self, spans: list[tuple[int, int, list[int], bool]]) -> list[Any]:
        """Compute (sequence, first position, tokens, wants logits) spans and return the logits of the last token where
        wanted."""
        batch, rows, count = self.batch, [], 0
        for sequence, start, tokens, wanted in spans:
            for offset, token in enumerate(tokens):
                batch.token[count], batch.pos[count] = token, start + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = wanted and offset == len(tokens) - 1
                count += 1
            if wanted:
                rows.append(count - 1)
        batch.n_tokens = count
        status = self.llama.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._row(index) for index in rows]

    def _row(self, index: int) -> Any:
        pointer = self.llama.llama_get_logits_ith(self.context, index)
        return self.numpy.ctypeslib.as_array(pointer, shape=(self.vocab,)).copy()


if __name__ == "__main__":
    serve(LlamaCpp)
