# %% [markdown]
# # Many requests
#
# One request leaves most of a machine idle: a step that decodes one token reads all weights, and could have decoded
# many tokens with them. So requests share steps. Before each step the scheduler decides which requests are computed,
# which wait and which are preempted.
#
# This notebook shows these decisions as they are made. (`03_kv_cache` explains pages, `02_prefill_and_decode` the two
# phases.)
#
# - **Questions**: Who waits for whom when many requests share a step? What do load, chunks and policy do to TTFT and
#   inter-token latency?
# - **Afterwards you can**: read a timeline of requests; explain a stall by chunks, pages or policy; say when a prefix
#   is shared; find the load from which a queue grows.
# - **Minutes**: 45

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: ten requests of different lengths are computed, four at a time. Static batches wait for their longest
# request. What fraction of their steps is saved if a waiting request takes a free slot at once?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 100 * (1 - len(continuous.tracks.steps) / len(static.tracks.steps)),
    unit="%",
    tolerance=0.3,
    prediction=True,
    because="Static and continuous batching, compared below: places of requests that have ended are not left empty.",
)

# %%
import random

import workbench
from workbench import Request, SamplingParameters


def make_requests(count, prompt=48, output=24, shared=(), every=0.0):
    """Return requests with random prompts that end after different numbers of tokens, `every` seconds apart."""
    draw = random.Random(0)
    requests = []
    for n in range(count):
        own = draw.choices(range(5, 250), k=prompt - len(shared))
        ends = SamplingParameters(max_tokens=4 + draw.randrange(output), ignore_eos=True)
        requests.append(Request(f"request {n}", (*shared, *own), ends, arrival=n * every))
    return requests


# %% [markdown]
# ## A timeline
# Eight requests arrive shortly after one another. Each has a row: it waits in the queue, its prompt is computed
# (orange, one box for each chunk), then it decodes (blue, one line for each token). Above are the steps, with the
# numbers of prompt tokens and of decoded tokens.
#
# Point at any mark to read the reason; click on a name for all decisions about this request. Drag to move; zoom by Ctrl
# and the wheel or by the buttons; select a time by Shift and drag, and read its length below the steps.

# %%
runner = workbench.load("demo", backend="eager", max_num_batched_tokens=64)
timeline = widgets.Timeline(runner)
timeline

# %%
served = list(runner.stream(make_requests(8, every=0.02)))
timeline.keep()

# %% [markdown]
# The picture above was drawn while the cell ran; `keep` saves it with the notebook. Run the cell again and watch: the
# picture follows the run while `follow` is ticked.
#
# ## Continuous and static batching
# A static batch ends with its longest request: slots of ended requests stay empty, and no request joins before all have
# ended. Continuous batching fills a free slot in the very next step (Yu et al. 2022, Orca). Compare the rows of waiting
# requests, and the number of steps.


# %%
def run_timeline(requests, **settings):
    """Return the timeline of `requests` on a runner with these settings."""
    runner = workbench.load("demo", backend="eager", **settings)
    return widgets.Timeline(list(runner.stream(requests)))


requests = make_requests(10, output=32)
static = run_timeline(requests, schedule="static", max_num_seqs=4)
static

# %%
continuous = run_timeline(requests, schedule="continuous", max_num_seqs=4)
continuous

# %%
print(f"static: {len(static.tracks.steps)} steps, continuous: {len(continuous.tracks.steps)}")

# %% [markdown]
# ## Chunked prefill
# While a long prompt is computed, decoding requests wait for the step to end: their next token is late (prefill
# interference). If the prompt is split into chunks, it takes several steps, and every step also computes decodes
# (Agrawal et al. 2023, Sarathi). Find the wide step in the first picture, during which every decode stalls, and its
# chunks in the second picture.

# %%
few = SamplingParameters(max_tokens=4)
prompt_ids = make_requests(1, prompt=400)[0].prompt_ids
long = [*make_requests(3, prompt=16, output=30), Request("long", prompt_ids, few, arrival=0.02)]
whole = run_timeline(long, chunked_prefill=False)
whole

# %%
chunked = run_timeline(long, chunk_tokens=64)
chunked

# %%
for name, view in (("whole", whole), ("in chunks", chunked)):
    longest = max(step.end - step.begin for step in view.tracks.steps)
    print(f"{name}: the longest step takes {longest * 1e3:.1f} ms")

# %% [markdown]
# ## Too few pages: a request is preempted
# The length of an answer is not known in advance, so requests are admitted by the pages that they need now. When all
# pages are in use and one more is needed, the youngest request is preempted: it frees its pages and is computed again
# later. It keeps its tokens and loses time.
#
# In the page map each cell is a page. Its letter and colour name the request that holds it, its level shows how full it
# is, and the pages that the step writes are marked. Drag the slider, or press play.

# %%
small = workbench.load("demo", backend="eager", page_size=16, pages=14, max_num_seqs=6)
pages, timeline = widgets.PageMap(small), widgets.Timeline(small)
served = list(small.stream(make_requests(6, prompt=32, output=36)))
timeline

# %%
pages.step = pages.fullest()
pages

# %% [markdown]
# Choose `by sequence` to see each request's pages in the order of its text. Then try `pages=40`: which requests are
# still preempted? With `offload="memory"` in `load` the pages of a preempted request are swapped out to CPU pages,
# shown in a separate panel, and nothing is computed twice.
#
# ## Shared prefixes
# With `prefix="radix"` full pages are found again by their tokens. The requests below have the same beginning. They
# share its pages (hatched, with the number of requests), and when all have ended the prefix cache keeps these pages for
# later requests (dashed).

# %%
sharing = workbench.load("demo", backend="eager", page_size=16, pages=48, prefix="radix")
shared = widgets.PageMap(sharing)
beginning = make_requests(1, prompt=64)[0].prompt_ids
list(sharing.stream(make_requests(1, prompt=72, output=4, shared=beginning)))
served = list(sharing.stream(make_requests(6, prompt=80, output=20, shared=beginning)))
shared.arranged = "by sequence"
shared.step = shared.most_shared()
shared

# %% [markdown]
# ## Residual and quantized pages
# A quantized cache has two cache groups, each with a page table: older tokens are quantized, the newest are in full
# precision in residual pages, which are freed as their tokens are quantized (`03_kv_cache`). Play it from the start.

# %%
int4 = {"format": "int4", "quant_group": 16, "residual_length": 16}
quantized = workbench.load("demo", backend="eager", page_size=16, pages=32, cache=int4)
tables = widgets.PageMap(quantized)
served = list(quantized.stream(make_requests(4, prompt=40, output=24)))
tables.step = tables.fullest()
tables

# %% [markdown]
# ## A continuous load, with settings that change
# Here requests arrive at random (Poisson), at the rate that you set, until you stop them: most are chats, some have a
# long prompt. The widget first measures the rate that this machine can serve, and begins with half of it. A changed
# control takes effect at the next step and is marked on the time axis.
#
# All panels share the time axis: hover to read all values of one moment above the picture; drag to move; hold Shift and
# drag to select an interval and count its events.

# %%
bench = widgets.LiveBench()
bench

# %%
bench.run(seconds=8)
bench.wait(4)
bench.chunk_tokens = 32
bench.wait()

# %% [markdown]
# Press Run, and try, a few seconds each:
#
# - **Load**. Raise it above the rate that can be served. The queue grows, and TTFT with it; the inter-token latency
#   hardly changes, because at most `batch` sequences run. When the queue is full, requests are refused and counted,
#   because it would grow without end.
# - **Chunk**, with many long prompts. With 512 a long prompt is one step, and every decode waits for it: p99 of the
#   inter-token latency is the length of that step. With 16 the p99 falls, and TTFT of the long prompts rises.
# - **Policy**. `shortest_prompt` gives chats a better TTFT and lets long prompts wait. `prefill_first` gives early
#   first tokens and stalls decodes; `decode_first` does the reverse.
# - **Batch**: with long prompts and a large batch, pages run out and requests are preempted.
# - **Shared prefix**: requests share the pages of their beginning, and prefills are shorter.

# %% [markdown]
# **Question**: Into how many chunks is the long prompt of 400 tokens cut, in steps of up to 64 tokens without any
# decode?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: -(-len(prompt_ids) // 64),
    unit="chunks",
    tolerance=0,
    hint="The last chunk may be a part of one.",
    because="Six chunks of 64 and one of 16. With decodes beside it in the step, a chunk is shorter.",
)

# %% [markdown]
# ## Try
# - Another policy: `run_timeline(make_requests(8), policy="shortest_prompt", max_num_seqs=2)`; `policy="priority"`,
#   `"fair"`, or a function of your own (`workbench/scheduler/policy.py`).
# - The same timeline in Perfetto: a run's folder holds `trace.json` (see `09_experiments`); open it in
#   ui.perfetto.dev. `widgets.Timeline(record)` shows the same events.
# - Larger loads: `workbench simulate` runs the same scheduler on simulated hardware, with thousands of requests in
#   seconds, also for a fleet of instances behind a router (`workbench/simulate/fleet.py`).
#
# To read: `workbench/scheduler/scheduler.py` (which requests run), `workbench/scheduler/allocate.py` (which requests
# are preempted, and the reason), `workbench/kv_cache/manager.py` (the pages of each request),
# `workbench/kv_cache/prefix.py` (the prefix cache).

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Kernels](06_kernels.py) ·
# Next: [Speculation](08_speculation.py)
