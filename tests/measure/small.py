"""Experiments as small as each kind of workload can be, as YAML; `asked` reads one, with changes."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from workbench.experiment.experiment import Experiment
from workbench.reports import terminal
from workbench.runs.record import Record

RUN = """
question: What now?
backend: eager
sampling: {temperature: 0, max_tokens: 5, ignore_eos: true}
workload: {kind: prompts, prompts: ["def f(n):"]}
measure: {ceilings: false, warmup: 0}
"""
QUALITY = """
question: what does it cost?
model: {name: demo-draft, dtype: float32}
backend: eager
workload:
  kind: quality
  windows: 2
  decode: 8
  greedy_prompts: 2
  greedy_tokens: 8
  copying: {names: 1, tokens: 200, depths: [0.0, 1.0]}
  choices: 5
  needles: {texts: 2, each: 3}
  speed: {contexts: [16, 40], tokens: 2, rounds: 2}
  pool: {bytes: 4194304, context: 300}
judge: {path: "tests.measure.test_quality:judge"}
variants:
  bfloat16: {model.dtype: bfloat16}
  window: {attention.sliding_window: 64}
  int8: {cache.format: int8, cache.quant_group: 32, cache.residual_length: 32}
"""
SIMULATED = """
question: how long?
model: {name: "shape:llama-3.1-8b"}
schedule: {max_num_seqs: 8, max_num_batched_tokens: 256}
executor: {kind: simulated}
workload: {kind: traffic, lengths: {kind: sessions, sessions: 3}, arrivals: {kind: poisson, rate: 40}, requests: 12}
"""
PROCESSES = """
question: does a fleet do what was predicted?
model: {name: demo}
backend: eager
cache: {pages: 60, page_size: 16}
schedule: {max_num_seqs: 4, max_num_batched_tokens: 32}
executor: {kind: processes, instances: 2, predict: {requests: 8}}
workload: {kind: traffic, lengths: {kind: exponential, prompt: 40, output: 9}, arrivals: {kind: poisson, rate: 30},
           requests: 9}
measure: {warmup: 1, rounds: 2}
"""
# The demo has learned neither calls nor answers: the choice forces its first call, of 48 tokens, and the limit ends the
# rest.
AGENT = """
question: What does a round cost?
model: {name: demo, dtype: float32}
backend: eager
cache: {prefix: radix, page_size: 16}
sampling: {temperature: 0, max_tokens: 64}
measure: {ceilings: false}
workload:
  kind: agent
  system: >-
    You look after a boiler house. Say what the gauges show, and nothing that they do not show.
    You look after a boiler house. Say what the gauges show, and nothing that they do not show.
  limits: {rounds: 2}
  tools: ["tests.measure.test_agent:read_gauge"]
  tool_choice: read_gauge
  questions: [{question: How high is the pressure?, wanted: "7"}]
"""
STREAMING = """
question: streamed?
model: {name: demo-draft, dtype: float32}
backend: eager
workload: {kind: streaming, requests: 3, prompt_tokens: 4, output_tokens: 12, rounds: 2}
sampling: {temperature: 0}
cache: {pages: 24}
schedule: {max_num_seqs: 2}
variants: {whole: {workload.delivery: whole}, events: {workload.delivery: events}, stream: {workload.delivery: stream}}
"""
INTERFERENCE = """
question: stalled?
model: {name: "shape:tiny", dtype: float32}
backend: eager
workload: {kind: prefill_interference, running: 3, prompt_tokens: 5, output_tokens: 40, after: 4, long_tokens: 200,
           rounds: 2}
cache: {page_size: 8}
schedule: {max_num_seqs: 8, max_num_batched_tokens: 256, policy: fcfs}
variants:
  a short one arrives: {workload.long_tokens: 5}
  whole: {schedule.chunked_prefill: false}
  chunks of 256: {schedule.chunk_tokens: 32}
  chunks of 128: {schedule.chunk_tokens: 16}
"""
SPECULATION = """
question: faster?
model: {name: demo}
backend: eager
cache: {pages: 8}
sampling: {temperature: 0}
measure: {threads: 1}
workload: {kind: speculation, prompts: 2, prompt_tokens: 40, output_tokens: 12, loads: [1, 2], rounds: 1}
variants:
  plain: {}
  draft of 2: {speculate: {kind: draft, num_speculative_tokens: 2}}
  draft of 3: {speculate: {kind: draft, num_speculative_tokens: 3}}
  lookup: {speculate: prompt_lookup}
  draft that stops: {speculate: {kind: draft, confidence_threshold: 0.5}}
  plain, sampled: {sampling.temperature: 1}
  draft of 3, sampled: {sampling.temperature: 1, speculate: {kind: draft}}
judge: {path: "experiments.speculation:judge"}
"""
PREFIX = """
question: sooner?
model: {name: "shape:tiny", dtype: float32}
backend: eager
cache: {page_size: 8}
workload: {kind: shared_prefix, requests: 3, prefix_tokens: 100, own_tokens: 5, output_tokens: 4, rounds: 2}
variants: {computed: {}, reused: {cache.prefix: radix}}
judge: {path: "experiments.prefix_reuse:judge"}
"""
DETERMINISM = """
question: the same?
model: {name: "shape:tiny", dtype: float32}
backend: eager
variants: {"off": {}}
schedule: {max_num_batched_tokens: 24}
workload:
  kind: determinism
  prompts: 2
  prompt_tokens: 17
  output_tokens: 12
  runs: 4
  repeats: 2
  other_requests: 5
  other_request_tokens: 20
  price: {prefill_tokens: 20, context: 9, batch: 3, tokens: 4, rounds: 2}
"""
TINY = """
question: faster?
model: {name: "shape:tiny", dtype: float32}
backend: eager
cache: {page_size: 8}
workload: {kind: random}
measure: {warmup: 0, ceilings: false}
"""


def asked(text: str, *changes: str) -> Experiment:
    """Return the experiment of this YAML with changes, each `path=value`."""
    return Experiment.from_yaml(text, changes)


def shown(record: Record, file: Path | None = None) -> str:
    """Return what the terminal shows of a run."""
    console = Console(record=True, width=240, file=io.StringIO())
    terminal.show(record, console, file)
    return console.export_text()


def is_drawn(record: Record) -> bool:
    """Return whether the picture of a run lies in its folder."""
    return (record.path / record.summary["picture"]["svg"]).read_text().startswith("<svg")
