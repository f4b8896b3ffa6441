"""Run transformers as a peer: option `cache` is dynamic (its default) or static with a compiled step, `backend` that of
torch.compile."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

from peer_protocol import batch_and_length, serve

PAGE = 64  # tokens
BATCH_TOKENS = 512  # of one step


class Transformers:
    def __init__(self, job: dict):
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.torch, self.job = torch, job
        torch.set_num_threads(job["threads"])
        self.static, self.backend = job["options"]["cache"] == "static", job["options"].get("backend", "inductor")
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[job["format"]]
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
        self.how = f"{'static' if self.static else 'dynamic'} cache"
        if self.backend == "zentorch":
            import zentorch  # noqa: F401 (registers its backend)
        self.cache: Any = None
        self.room = -(-batch_and_length(job)[1] // 64) * 64
        if self.static:
            self.step = torch.compile(self.model.forward, backend=self.backend, dynamic=False)
            self.how += f", decode step compiled with {self.backend}"
        if job["kind"] == "mixed":
            self.manager = self._start_batching(job)
            self.how += ", its continuous batching"

    def logits(self, prompt: list[int]) -> dict[str, list[float]]:
        with self.torch.inference_mode():
            whole, _ = self._prefill(prompt)
            _, cache = self._prefill(prompt[:-1])
            last = self._decode(prompt[-1], len(prompt) - 1, cache)
            return {"prefill": whole.float().tolist(), "decode": last.float().tolist()}

    def generate(self, requests: list[dict]) -> list[list[float]]:
        if len(requests) > 1:
            return self._batched(requests)
        with self.torch.inference_mode():
            return [self._one(requests[0]["prompt"], requests[0]["output_tokens"])]

    def _one(self, prompt: list[int], output_tokens: int) -> list[float]:
        row, cache = self._prefill(prompt)
        token, times = int(row.argmax()), [time.perf_counter()]
        for position in range(len(prompt), len(prompt) + output_tokens - 1):
            token = int(self._decode(token, position, cache).argmax())
            times.append(time.perf_counter())
        return times

    def _prefill(self, prompt: list[int]) -> tuple[Any, Any]:
        cache = self._empty_cache()
        ids = self.torch.tensor([prompt])
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1], cache

    def _empty_cache(self) -> Any:
        """Return an empty cache. A static cache is reused: a captured graph is bound to its first cache."""
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        if not self.static:
            return DynamicCache(config=config)
        if self.cache is None:
            self.cache = StaticCache(config=config, max_cache_len=self.room)
        else:
            self.cache.reset()
        return self.cache

    def _decode(self, token: int, position: int, cache: Any) -> Any:
        run = self.step if self.static else self.model
        place = self.torch.tensor([[position]])
        ids = self.torch.tensor([[token]])
        return run(input_ids=ids, position_ids=place, past_key_values=cache, use_cache=True).logits[0, -1]

    def _start_batching(self, job: dict) -> Any:
        """Start continuous batching with a cache for this workload: by default it takes most of the memory."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        sequences, longest = batch_and_length(job)
        config = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=sequences * (-(-longest // PAGE) + 1), max_batch_tokens=BATCH_TOKENS
        )
        greedy = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=-1)
        manager = self.model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        manager.start()
        return manager

    def _batched(self, requests: list[dict]) -> list[list[float]]:
        """Run requests with continuous batching. It reports only the end of a request, so all its tokens have that
        time."""
        names = {
            self.manager.add_request(each["prompt"], max_new_tokens=each["output_tokens"], eos_token_id=-1): index
            for index, each in enumerate(requests)
        }
        times: list[list[float]] = [[] for _ in requests]
        while not all(times):
            result = self.manager.get_result(timeout=300)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching ended: {result and result.error}")
            if result.is_finished():
                times[names[result.request_id]] = [time.perf_counter()] * len(result.generated_tokens)
        return times


if __name__ == "__main__":
    serve(Transformers)
