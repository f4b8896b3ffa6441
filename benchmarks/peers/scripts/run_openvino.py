"""Run OpenVINO GenAI as a peer: LLMPipeline for one request, ContinuousBatchingPipeline for several.

The pipelines return no logits, so these come from the same IR, compiled with the same properties by OpenVINO."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

from peer_protocol import batch_and_length, serve

CACHE_GIGABYTES = 2


class OpenVINO:
    def __init__(self, job: dict):
        import numpy
        import openvino
        import openvino_genai

        self.genai, self.openvino, self.numpy = openvino_genai, openvino, numpy
        self.model = job["model"]
        self.properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32" if job["format"] == "float32" else "bf16",
            "INFERENCE_NUM_THREADS": job["threads"],
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        self.how = "cache as its default (u8 on CPU)"
        if job["format"] == "float32":
            self.properties["KV_CACHE_PRECISION"] = "f32"
            self.how = "cache in float32"
        if job["kind"] == "mixed":
            self.batched = self._batching_pipeline(batch_and_length(job)[0])
            self.how += ", its continuous batching"
        elif job["kind"] != "logits":
            self.pipeline = openvino_genai.LLMPipeline(self.model, "CPU", **self.properties)

    def logits(self, prompt: list[int]) -> dict[str, list[float]]:
        numpy = self.numpy
        compiled = self.openvino.Core().compile_model(f"{self.model}/openvino_model.xml", "CPU", self.properties)
        request = compiled.create_infer_request()

        def infer(tokens: list[int], start: int) -> list[float]:
            end = start + len(tokens)
            out = request.infer(
                {
                    "input_ids": numpy.array([tokens], dtype=numpy.int64),
                    "attention_mask": numpy.ones((1, end), dtype=numpy.int64),
                    "position_ids": numpy.arange(start, end, dtype=numpy.int64)[None],
                    "beam_idx": numpy.zeros(1, dtype=numpy.int32),
                }
            )
            return out["logits"][0, -1].astype("float64").tolist()

        whole = infer(prompt, 0)
        request.reset_state()
        infer(prompt[:-1], 0)
        return {"prefill": whole, "decode": infer(prompt[-1:], len(prompt) - 1)}

    def generate(self, requests: list[dict]) -> list[list[float]]:
        return self._many(requests) if len(requests) > 1 else [self._one(requests[0])]

    def _one(self, request: dict) -> list[float]:
        genai, times = self.genai, []

        class Clock(genai.StreamerBase):
            def write(self, token: Any) -> Any:
                times.extend([time.perf_counter()] * (len(token) if isinstance(token, list) else 1))
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        ids = self._tensor(request["prompt"])
        self.pipeline.generate(ids, self._greedy(request["output_tokens"]), Clock())
        return times

    def _many(self, requests: list[dict]) -> list[list[float]]:
        handles = [
            self.batched.add_request(index, self._tensor(request["prompt"]), self._greedy(request["output_tokens"]))
            for index, request in enumerate(requests)
        ]
        times: list[list[float]] = [[] for _ in requests]
        while self.batched.has_non_finished_requests():
            self.batched.step()
            now = time.perf_counter()
            for handle, own in zip(handles, times, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        own.extend([now] * len(output.generated_ids))
        return times

    def _batching_pipeline(self, sequences: int) -> Any:
        scheduler = self.genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIGABYTES
        scheduler.max_num_seqs = sequences
        scheduler.enable_prefix_caching = False
        return self.genai.ContinuousBatchingPipeline(self.model, scheduler, "CPU", self.properties)

    def _greedy(self, output_tokens: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_tokens, True, False
        config.set_eos_token_id(0)  # its default, -1, does not pass its own check
        return config

    def _tensor(self, prompt: list[int]) -> Any:
        return self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64))


if __name__ == "__main__":
    serve(OpenVINO)
