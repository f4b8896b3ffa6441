"""List the bugs to plant: subtle ones, as a plausible programmer makes, about two in each package of the library.

They were chosen by reading the product, not its tests; the first seven after the older ones are an auditor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PlantedBug:
    """An edit that makes a bug: in `file` the text `old`, which occurs once, is replaced. `tests` are files or folders
    to try before the nearest ones."""

    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    def apply(self, root: Path) -> None:
        """Replace the old text in the tree `root`; ValueError if it does not occur exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {text.count(self.old)} times, not once")
        changed = text.replace(self.old, self.new)
        compile(changed, self.file, "exec")
        path.write_text(changed, encoding="utf-8")


BUGS = (
    PlantedBug(
        "cache: a sliding window frees a page one token early",
        "workbench/kv_cache/pages.py",
        "-((self.sliding_window - 1 - position)",
        "-((self.sliding_window - 2 - position)",
    ),
    PlantedBug(
        "cache: a prefix is shared between tenants",
        "workbench/kv_cache/radix_tree.py",
        "node = self.roots.get(salt)",
        "node = next(iter(self.roots.values()), None)",
    ),
    PlantedBug(
        "cache: a copied page has the keys, not the values",
        "workbench/kv_cache/store.py",
        "for tensor in self.page_tensors(group):\n            tensor[torch.tensor(targets)]",
        "for tensor in self.page_tensors(group)[::2]:\n            tensor[torch.tensor(targets)]",
    ),
    PlantedBug(
        "cache: quantized codes are rounded down",
        "compiled_kernels/quantized_attention/quantize.py",
        "codes.nan_to_num(0.0).round()",
        "codes.nan_to_num(0.0)",
    ),
    PlantedBug(
        "engine: pages of rejected draft tokens are freed only where one was accepted",
        "workbench/scheduler/scheduler.py",
        "if span.draft_token_ids:\n                    self.kv",
        "if accepted:\n                    self.kv",
    ),
    PlantedBug(
        "engine: after a rejected draft, the next token is drawn as if there had been none",
        "workbench/sampling/verify.py",
        "left = (p - q.to(p.dtype)).clamp_min(0)",
        "left = p.clone()",
    ),
    PlantedBug(
        "engine: samples of one prompt share their seed",
        "workbench/engine/inputs.py",
        "(asked.seed + number) % 2**63",
        "asked.seed % 2**63",
    ),
    PlantedBug(
        "engine: after drafts that a grammar checked, its state is one token ahead",
        "workbench/constrained/answer.py",
        "if consumed:\n            self._tokens.rollback(consumed)",
        "if consumed > 1:\n            self._tokens.rollback(consumed - 1)",
    ),
    PlantedBug(
        "kernels: the compiled step rotates heads the wrong way",
        "compiled_kernels/decode_step/rotary.py",
        "[a * cos - b * sin, b * cos + a * sin]",
        "[a * cos + b * sin, b * cos - a * sin]",
    ),
    PlantedBug(
        "kernels: attention in MLIR forgets to rescale its total when a higher score comes",
        "compiled_kernels/paged_attention/mlir_softmax.py",
        "memory[total_place] * factor",
        "memory[total_place] * memory[total_place]",
    ),
    PlantedBug(
        "kernels: the Triton norm divides by its padded width",
        "compiled_kernels/rms_norm/triton.py",
        "axis=0) / width + eps",
        "axis=0) / WIDTH + eps",
    ),
    PlantedBug(
        "prompt: a control token that a person spells is read as the template's",
        "workbench/prompt/template_encoding.py",
        "            forged = True",
        "            forged = False",
    ),
    PlantedBug(
        "prompt: a control token in a name of an argument is read as the template's",
        "workbench/prompt/traced.py",
        "else Traced(str(k), origin): traced",
        "else Traced(str(k), TEMPLATE): traced",
    ),
    PlantedBug(
        "scheduler: chunked_prefill off cuts a prompt of exactly the step's size",
        "workbench/scheduler/allocate.py",
        "length < new <= self.limits.max_num_batched_tokens",
        "length < new < self.limits.max_num_batched_tokens",
    ),
    PlantedBug(
        "cache: a whole prompt is found in the prefix cache, and its last token is not computed",
        "workbench/kv_cache/radix_tree.py",
        "range(self.page_size, len(ids), self.page_size)",
        "range(self.page_size, len(ids) + 1, self.page_size)",
    ),
    PlantedBug(
        "sampling: top-p keeps a tie at its bound",
        "workbench/sampling/filters.py",
        ".cumsum(-1) <= 1 - self.p",
        ".cumsum(-1) < 1 - self.p",
    ),
    PlantedBug(
        "prompt: a stream waits for the third byte of the first surrogate",
        "workbench/prompt/tokenization/detokenize.py",
        'pending[1:] >= b"\\xa0"',
        'pending[1:] > b"\\xa0"',
    ),
    PlantedBug(
        "serve: a slow reader has the last step's pieces alone",
        "workbench/serve/answers/engine_stream.py",
        "self._buffer += pieces",
        "self._buffer = pieces",
    ),
    PlantedBug(
        "kernels: decode attention in MLIR does not read a page that sinks fill in part",
        "compiled_kernels/paged_attention/mlir_decode.py",
        "last.divided_up(size)",
        "last // size",
    ),
    PlantedBug(
        "kernels: queries of a span in Triton see later keys of their tile",
        "compiled_kernels/triton_code/attention.py",
        "tl.minimum((first + 1) // TILE, stop)",
        "tl.minimum((last + 1) // TILE, stop)",
    ),
    PlantedBug(
        "agents: a result that is cut is longer than its limit by the note that says so",
        "workbench/agents/calls.py",
        "text[: max(0, characters - len(note))] + note",
        "text[:characters] + note",
    ),
    PlantedBug(
        "bench: ceilings of a kernel whose copies lie in memory are those of one copy",
        "workbench/bench/kernels.py",
        'found.working_set_bytes * found.copies if found.data == "memory" else found.working_set_bytes',
        "found.working_set_bytes",
    ),
    PlantedBug(
        "check: the longest text that a window does not change counts as past it",
        "workbench/check/lengths.py",
        "Threshold(attention.sliding_window + 1,",
        "Threshold(attention.sliding_window,",
    ),
    PlantedBug(
        "claims: a decode step's context does not count its own token",
        "workbench/claims/break_even.py",
        "[(context - 1, 1)] * batch",
        "[(context, 1)] * batch",
    ),
    PlantedBug(
        "cli: usage ignores --since",
        "workbench/cli/usage.py",
        "sum_calls(accounts, names, since, where)",
        "sum_calls(accounts, names, where=where)",
    ),
    PlantedBug(
        "cluster: a replica is full one sample early",
        "workbench/cluster/front.py",
        "len(each.unfinished) <= self.limits.replica_samples",
        "len(each.unfinished) < self.limits.replica_samples",
    ),
    PlantedBug(
        "cluster: a request that lost its replica waits behind newer ones",
        "workbench/cluster/submissions.py",
        "bisect.insort(self.waiting, each, key=lambda other: (other.arrival, other.order))",
        "self.waiting.append(each)",
    ),
    PlantedBug(
        "cluster: a coordinator that was suspended ends the engines that it did not hear",
        "workbench/cluster/apart/pool_slots.py",
        "min(now - self._looked_at, 2 * self.look_seconds)",
        "now - self._looked_at",
    ),
    PlantedBug(
        "economics: a request exactly one TTL after the last finds its entry",
        "workbench/economics/prompt_cache.py",
        "if gap >= ttl.seconds:",
        "if gap > ttl.seconds:",
    ),
    PlantedBug(
        "engine: a beam that ends below the best beams counts as a finished text",
        "workbench/decoding/beams.py",
        "elif rank < self.num_beams and cost < torch.inf:",
        "elif cost < torch.inf:",
    ),
    PlantedBug(
        "executors: context lengths of a batch count evicted tokens",
        "workbench/executors/packing.py",
        "lengths.append(span.end - span.sequence.num_evicted_tokens)",
        "lengths.append(span.end)",
    ),
    PlantedBug(
        "experiment: the reference keeps a variant's quantized head",
        "workbench/experiment/variants.py",
        '"weights": "dense", "head_weights": None, "activations"',
        '"weights": "dense", "activations"',
    ),
    PlantedBug(
        "gateway: money that a call did not use is given back on a day that it was not taken from",
        "workbench/gateway/limits/limits.py",
        "if state.day == begun // DAY:",
        "if state.day == now // DAY:",
    ),
    PlantedBug(
        "gateway: of too many kept questions the newest are dropped",
        "workbench/gateway/answer_cache.py",
        "rows[-semantic.candidates :]",
        "rows[: semantic.candidates]",
    ),
    PlantedBug(
        "inspect: weights of a rotated cache are of queries that are not rotated",
        "workbench/inspect/attention.py",
        "        if self.source.rotates:\n            q = hadamard_rotate(q)\n",
        "",
    ),
    PlantedBug(
        "cache: nodes of one path do not count toward a tenant's pins",
        "workbench/kv_cache/pins.py",
        "                counts[salt] += 1\n",
        "",
    ),
    PlantedBug(
        "lab: a notebook runs in the caller's folder",
        "workbench/lab/execute.py",
        "str(path.parent)",
        "str(Path.cwd())",
    ),
    PlantedBug(
        "machine: seconds of a child that has ended count twice as this process's",
        "workbench/machine/processor.py",
        "after.own - before.own - ended)",
        "after.own - before.own)",
    ),
    PlantedBug(
        "measure: requests that end with the traffic count toward a rate",
        "workbench/measure/capacity.py",
        "fleet.jobs[quarter : len(fleet.jobs) - quarter]",
        "fleet.jobs[quarter:]",
    ),
    PlantedBug(
        "memory: null pages are not paid from the budget",
        "workbench/memory/capacity.py",
        "sum((1 + count) * size for count, size in zip(ahead",
        "sum(count * size for count, size in zip(ahead",
    ),
    PlantedBug(
        "model: a text of exactly the original context has the long one's angles",
        "workbench/model/rotary.py",
        "limits[:, None] > scaling.original_max_position_embeddings",
        "limits[:, None] >= scaling.original_max_position_embeddings",
    ),
    PlantedBug(
        "model: the bias that chooses experts weighs them too",
        "workbench/model/feedforward.py",
        "weights = scores.gather(-1, chosen)",
        "weights = ranked.gather(-1, chosen)",
    ),
    PlantedBug(
        "model: GPTQ of version 1 whose zeros lie in the middle is read as version 2",
        "workbench/model/formats/gptq.py",
        "2 if self.symmetric and bool((stored == half).all())",
        "2 if bool((stored == half).all())",
    ),
    PlantedBug(
        "offline: a batch that goes on forgets the names of lines it has written",
        "workbench/offline/run.py",
        "        items = read_lines((line.raw for line in lines), self.dialects, self.ignored)\n",
        "        done, raw = self.tally.already_written, [line.raw for line in lines]\n"
        "        items = [*[BatchItem('', '', {})] * done, *read_lines(raw[done:], self.dialects, self.ignored)]\n",
    ),
    PlantedBug(
        "reports: a run is compared with a spread that it is part of",
        "workbench/reports/latency_check.py",
        "find_repetitions(before, after)]",
        "find_repetitions(before)]",
    ),
    PlantedBug(
        "runs: two sets are resampled with the same random numbers",
        "workbench/runs/bootstrap.py",
        "for one, other in ((0, 1), (1, 0))",
        "for one, other in ((0, 0), (1, 1))",
    ),
    PlantedBug(
        "sampling: min-p drops tokens at its bound",
        "workbench/sampling/filters.py",
        "probabilities < self.p * probabilities.amax",
        "probabilities <= self.p * probabilities.amax",
    ),
    PlantedBug(
        "scheduler: fair counts an admitted request for no tenant",
        "workbench/scheduler/policies.py",
        "(tokens + entry.num_new_tokens, queues[tenant]",
        "(tokens, queues[tenant]",
    ),
    PlantedBug(
        "serve: a bucket of the token histogram leaves out its bound",
        "workbench/serve/watch/metrics.py",
        'side="left"',
        'side="right"',
    ),
    PlantedBug(
        "simulate: a step that ends as an instance fails is lost",
        "workbench/simulate/instance.py",
        "steps_until(now - self.current.start + 1, self.current.steps) - 1",
        "steps_until(now - self.current.start, self.current.steps) - 1",
    ),
    PlantedBug(
        "speculation: prompt lookup copies from the first occurrence, not the latest",
        "workbench/speculative/proposers.py",
        "self.after[tuple(ids[place - length : place])] = place",
        "self.after.setdefault(tuple(ids[place - length : place]), place)",
    ),
    PlantedBug(
        "sweep: a point whose worker dies runs once more than it may",
        "workbench/sweep/run.py",
        "if self.died[folder] < self.attempts:",
        "if self.died[folder] <= self.attempts:",
    ),
    PlantedBug(
        "ranks: a bias after the feed-forward is added once a rank",
        "workbench/tensor_parallel/cut.py",
        '"down.weight": Cut(1, (intermediate,)), "down.bias": ADDED_ONCE',
        '"down.weight": Cut(1, (intermediate,)), "down.bias": WHOLE',
    ),
    PlantedBug(
        "trace: of slices that begin together the shortest comes first",
        "workbench/trace/perfetto.py",
        '(s["ts"], -s.get("dur", 0.0))',
        '(s["ts"], s.get("dur", 0.0))',
    ),
    PlantedBug(
        "widgets: the timeline leaves out a step that began before its window",
        "workbench/widgets/timeline/data.py",
        "in tracks.steps[oldest:first] if each.end",
        "in tracks.steps[first:first] if each.end",
    ),
    PlantedBug(
        "zoo: a limit on the left of a rule is read as one on the right",
        "workbench/zoo/rule.py",
        "FigureBound(right.id, _MIRRORED[text], _number",
        "FigureBound(right.id, text, _number",
    ),
    PlantedBug(
        "kernels: decode attention in MLIR leaves pages to no part of a split context",
        "compiled_kernels/paged_attention/mlir_decode.py",
        "each = count.divided_up(chunks)",
        "each = count // chunks",
    ),
    PlantedBug(
        "kernels: activations in INT8 are rounded away from zero at ties",
        "compiled_kernels/builder/values.py",
        "math.roundeven(",
        "math.round(",
    ),
    PlantedBug(
        "kernels: the Triton top log-probabilities order -0.0 below 0.0",
        "compiled_kernels/top_logprobs/triton.py",
        "tl.where(x == 0.0, 0.0, x).to(tl.int32",
        "x.to(tl.int32",
    ),
    PlantedBug(
        "kernels: the query's own page is one of those kept by score",
        "compiled_kernels/page_selection/selection.py",
        "page < selection.first, page < own",
        "page < selection.first, page <= own",
    ),
    PlantedBug(
        "kernels: the bounds of a difference take the ends of what is subtracted in order",
        "compiled_kernels/scalar_code/intervals.py",
        '"sub", (a.low, a.high), (b.high, b.low)',
        '"sub", (a.low, a.high), (b.low, b.high)',
    ),
    PlantedBug(
        "kernels: the clamped gate in Triton does not clamp what is below",
        "compiled_kernels/gated/triton.py",
        "tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))",
        "tl.where(up > limit, limit, up)",
    ),
)
