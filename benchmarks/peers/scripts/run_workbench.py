"""Run the workbench itself as a peer, through `workbench.load` and `runner.stream`."""

from __future__ import annotations

from typing import Any

from peer_protocol import batch_and_length, serve

WEIGHTS: dict[str, dict[str, Any]] = {  # what `workbench.load` calls the formats; others are dense
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4", "head_weights": "int8"},
    "int4-head": {"weights": "int4", "head_weights": "int4"},
}
PASSED_SETTINGS = ("weights", "head_weights", "weight_group", "compile")  # settings reported with the measurements


class Workbench:
    def __init__(self, job: dict):
        import torch

        import workbench
        from workbench.trace.events import Decoded, Finished

        self.decoded, self.finished = Decoded, Finished
        torch.set_num_threads(job["threads"])
        self.workbench, self.asked = workbench, 0
        options, (sequences, longest) = job["options"], batch_and_length(job)
        settings: dict[str, Any] = {
            "dtype": {"float32": "float32", "file": "auto"}.get(job["format"], "bfloat16"),
            "backend": options["backend"],
            "seed": options["seed"],
            "max_num_seqs": sequences,
            "pages": sequences * (-(-longest // 64) + 1),
            **WEIGHTS.get(job["format"], {}),
            **options["settings"],
        }
        lines: list[str] = []
        self.runner = workbench.load(options["model"], report=lines.append, **settings)
        passed = [f"{name} {settings[name]}" for name in PASSED_SETTINGS if name in settings]
        widened = [line for line in lines if "widened" in line]
        self.how = ", ".join([*passed, f"backend {self.runner.core.backends}", *widened])

    @property
    def artifacts(self) -> dict[str, str]:
        return dict(self.runner.core.executor.artifacts)

    def logits(self, prompt: list[int]) -> dict[str, list[float]]:
        """Return the logits of the runner's own steps: after the whole prompt (`prefill`), and after its last token as
        a decode step (`decode`)."""
        whole = self._rows(prompt, max_tokens=1)[-1]
        # A bias forces the first sampled token to the prompt's last; logits are captured before any bias.
        return {"prefill": whole, "decode": self._rows(prompt[:-1], max_tokens=2, logit_bias={prompt[-1]: 1e4})[-1]}

    def _rows(self, prompt: list[int], **sampling: Any) -> list[list[float]]:
        rows: list[list[float]] = []
        executor = self.runner.core.executor
        forward = executor.forward

        def watched(plan: Any) -> Any:
            out = forward(plan)
            rows.extend(row.double().tolist() for row in out)
            return out

        executor.forward = watched
        try:
            for event in self.runner.stream([self._request(prompt, **sampling)]):
                if isinstance(event, self.finished) and event.reason != "length":
                    raise RuntimeError(event.error or event.reason)
        finally:
            executor.forward = forward
        return rows

    def generate(self, requests: list[dict]) -> list[list[float]]:
        asked = [self._request(each["prompt"], max_tokens=each["output_tokens"]) for each in requests]
        times: dict[str, list[float]] = {request.request_id: [] for request in asked}
        for event in self.runner.stream(asked):
            if isinstance(event, self.decoded):
                times[event.request_id].append(event.time)
            elif isinstance(event, self.finished) and event.reason != "length":
                raise RuntimeError(event.error or event.reason)
        return list(times.values())

    def _request(self, prompt: list[int], **sampling: Any) -> Any:
        self.asked += 1
        values = {"temperature": 0.0, "ignore_eos": True, **sampling}
        parameters = self.workbench.SamplingParameters(**values)
        return self.workbench.Request(f"peer-{self.asked}", tuple(prompt), parameters)


if __name__ == "__main__":
    serve(Workbench)
