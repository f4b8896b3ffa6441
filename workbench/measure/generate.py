"""Continue one prompt, and return its text and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.engine.load import load
from workbench.progress import to_stderr
from workbench.runs.metrics import summarize
from workbench.trace.events import Finished, Scheduled
from workbench.trace.recorder import Recorder


def generate_text(
    prompt: str,
    settings: Mapping[str, Any],
    on_text: Callable[[str], None],
    on_progress: Callable[[str], None] = to_stderr,
) -> dict:
    """Continue one prompt. Return the text, token ids, finish reason, usage and metrics.

    Args:
        prompt: Text to continue.
        settings: Engine settings by section, and fields of `SamplingParameters` in `sampling`.
        on_text: Called with the prompt once the engine accepts it, then with each piece of text.
        on_progress: Called with a line of text at each stage of loading.
    """
    recorder, engine = Recorder(), {"max_num_seqs": 1, **settings}
    sampling = engine.pop("sampling")
    runner = load(**engine, listener=recorder.record, report=on_progress)
    finished = Finished(0.0)
    for event in runner.stream(prompt, **sampling):
        admitted = isinstance(event, Scheduled) and event.action == "admitted"
        on_text(prompt if admitted else event.text)
        if isinstance(event, Finished):
            finished = event
    summary = summarize(recorder.requests(), recorder.steps(), recorder.tokens(), recorder.verifications())
    metrics = {key: summary[key]["mean"] for key in ("ttft_s", "tpot_s", "e2el_s")}
    metrics["output_tokens_per_s"] = summary["output_tokens_per_s"]
    metrics["backend"] = str(runner.core.backends)
    metrics["speculation"] = summary["speculation"]
    return {
        "text": finished.output_text,
        "token_ids": list(finished.token_ids),
        "finish_reason": finished.reason,
        "error": finished.error or None,
        "usage": {
            "prompt_tokens": finished.prompt_tokens,
            "completion_tokens": len(finished.token_ids),
            "total_tokens": finished.prompt_tokens + len(finished.token_ids),
        },
        "metrics": metrics,
    }
