"""Run ONNX Runtime GenAI as a peer, through its Generator; several requests run one after another."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from peer_protocol import serve


class OnnxRuntime:
    def __init__(self, job: dict):
        import onnxruntime_genai

        self.genai = onnxruntime_genai
        config = onnxruntime_genai.Config(job["model"])
        session = {"intra_op_num_threads": job["threads"]}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self.model = onnxruntime_genai.Model(config)
        stored = json.loads(Path(job["model"], "genai_config.json").read_text())
        self.vocab = stored["model"]["vocab_size"]
        self.how = "one request after another" if job["kind"] == "mixed" else ""

    def logits(self, prompt: list[int]) -> dict[str, list[float]]:
        whole = self._generator(len(prompt) + 1)
        whole.append_tokens([prompt])
        parts = self._generator(len(prompt) + 1)
        parts.append_tokens([prompt[:-1]])
        parts.append_tokens([prompt[-1:]])
        return {"prefill": self._row(whole), "decode": self._row(parts)}

    def _row(self, generator: Any) -> list[float]:
        return generator.get_logits().reshape(-1, self.vocab)[-1].astype("float64").tolist()

    def generate(self, requests: list[dict]) -> list[list[float]]:
        times: list[list[float]] = []
        for request in requests:
            generator = self._generator(len(request["prompt"]) + request["output_tokens"])
            generator.append_tokens([request["prompt"]])
            own: list[float] = []
            while len(own) < request["output_tokens"]:
                generator.generate_next_token()
                own.append(time.perf_counter())
            times.append(own)
        return times

    def _generator(self, tokens: int) -> Any:
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, max_length=tokens, min_length=tokens, past_present_share_buffer=True)
        return self.genai.Generator(self.model, params)


if __name__ == "__main__":
    serve(OnnxRuntime)
