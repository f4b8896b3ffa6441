# %% [markdown]
# # Many requests
#
# One request leaves most of a machine idle: a step that decodes one token reads all weights, and could have decoded
# many tokens with them. So requests share steps. Who is in a step, who waits and who must give way is decided by the
# scheduler before each of them, and this notebook shows these decisions while they are made. (`03_kv_cache` explains
# pages, `02_prefill_and_decode` the two phases.)

# %%
import random

import workbench
from workbench import widgets
from workbench.request import Request, SamplingParameters


def asked(count, prompt=48, output=24, shared=(), every=0.0):
    """Requests with random prompts that end after different numbers of tokens; so many seconds between two."""
    draw = random.Random(0)
    requests = []
    for n in range(count):
        own = draw.choices(range(5, 250), k=prompt - len(shared))
        ends = SamplingParameters(max_tokens=4 + draw.randrange(output), ignore_eos=True)
        requests.append(Request(f"request {n}", (*shared, *own), ends, arrival=n * every))
    return requests


# %% [markdown]
# ## A timeline
# Eight requests come shortly after one another. Each has a row: it waits in the queue, its prompt is computed (orange,
# one box a chunk), then it decodes (blue, a line a token). Above are the steps: how many prompt tokens each computes,
# how many tokens it decodes. Point at anything to read why; click on a name for all decisions on that request; drag
# the ends of the slider to zoom, or use the buttons.

# %%
runner = workbench.load("demo", backend="eager", max_num_batched_tokens=64)
timeline = widgets.Timeline(runner)
timeline

# %%
widgets.RunnerThread.attach(runner).submit(asked(8, every=0.02)).wait()
timeline.keep()

# %% [markdown]
# The picture above has filled while the cell ran; `ask` alone returns at once, `wait` is there so that the notebook
# runs from top to bottom. Run the cell again, without `.wait()`, and watch. It follows as long as `follow` is ticked.
#
# ## Continuous beside static batching
# A static batch ends with its longest request: places of those that have ended stay empty, and nobody enters before
# all have left. Continuous batching fills a place in the very next step (Yu et al. 2022, Orca). Compare the rows of
# those that wait, and the number of steps.


# %%
def served(requests, **settings):
    """The timeline of `requests` on a runner with these settings."""
    runner = workbench.load("demo", backend="eager", **settings)
    return widgets.Timeline(list(runner.stream(requests)))


requests = asked(10, output=32)
static = served(requests, schedule="static", max_num_seqs=4)
static

# %%
continuous = served(requests, schedule="continuous", max_num_seqs=4)
continuous

# %%
print(f"static: {len(static.tracks.steps)} steps, continuous: {len(continuous.tracks.steps)}")

# %% [markdown]
# ## Chunked prefill
# While a long prompt is computed, those that decode wait for the step to end: their next token is late. Cut into
# chunks the prompt takes several steps, and decodes go on beside each (Agrawal et al. 2023, Sarathi). Look for the
# wide step in the first picture, under which every decode stands still, and for what became of it in the second.

# %%
few = SamplingParameters(max_tokens=4)
long = [*asked(3, prompt=16, output=30), Request("long", asked(1, prompt=400)[0].prompt_ids, few, arrival=0.02)]
whole = served(long, chunked_prefill=False)
whole

# %%
chunked = served(long, chunk_tokens=64)
chunked

# %%
for name, view in (("whole", whole), ("in chunks", chunked)):
    longest = max(step.end - step.begin for step in view.tracks.steps)
    print(f"{name}: the longest step takes {longest * 1e3:.1f} ms")

# %% [markdown]
# ## Too few pages: a request is preempted
# Nobody knows how long an answer will be, so requests are admitted on what they need now. When all pages are held and
# one more is needed, the youngest gives its pages up and is computed again later: its tokens are kept, its time is
# not. In the page map each cell is a page, its letter and colour the request that holds it, the level how much of it
# is filled; marked are the pages that the step writes to. Scrub with the slider, or press play.

# %%
small = workbench.load("demo", backend="eager", page_size=16, pages=14, max_num_seqs=6)
pages, timeline = widgets.PageMap(small), widgets.Timeline(small)
widgets.RunnerThread.attach(small).submit(asked(6, prompt=32, output=36)).wait()
timeline

# %%
pages.step = pages.fullest()
pages

# %% [markdown]
# Choose `by sequence` to see each request's pages in the order of its text. Then try `pages=40`: who is still set
# back? With `offload="memory"` in `load` the pages of who gives way lie on the host meanwhile, in a panel of their
# own, and nothing is computed twice.
#
# ## Shared prefixes
# With `prefix="radix"` full pages are found again by their tokens. The requests below begin alike: the pages of that
# beginning are held by several (hatched, with their number), and when all have ended the index keeps them for whoever
# comes next (dashed).

# %%
sharing = workbench.load("demo", backend="eager", page_size=16, pages=48, prefix="radix")
shared = widgets.PageMap(sharing)
beginning = asked(1, prompt=64)[0].prompt_ids
list(sharing.stream(asked(1, prompt=72, output=4, shared=beginning)))
widgets.RunnerThread.attach(sharing).submit(asked(6, prompt=80, output=20, shared=beginning)).wait()
shared.arranged = "by sequence"
shared.step = shared.most_shared()
shared

# %% [markdown]
# ## Residual and quantized pages
# A quantized cache has two tables: what is old enough is packed, the newest tokens wait in full precision in the
# residual table, whose pages are given back as their tokens are packed (`03_kv_cache`). Play it from the start.

# %%
int4 = {"format": "int4", "group": 16, "residual": 16}
packed = workbench.load("demo", backend="eager", page_size=16, pages=32, cache=int4)
tables = widgets.PageMap(packed)
widgets.RunnerThread.attach(packed).submit(asked(4, prompt=40, output=24)).wait()
tables.step = tables.fullest()
tables

# %% [markdown]
# ## Try
# - Another policy: `served(asked(8), policy="shortest_prompt", max_num_seqs=2)`; `policy="priority"`, `"fair"`, or a
#   function of your own (`workbench/scheduler/policy.py`).
# - The same timeline in Perfetto: a run's folder holds `trace.json` (see `09_experiments`); open it in
#   ui.perfetto.dev. `widgets.Timeline(record)` shows the same events.
# - More than this machine can do: `workbench simulate` runs the same scheduler against a machine that is only
#   described, thousands of requests in seconds, and a fleet of such machines behind a router
#   (`workbench/simulate/fleet.py`).
#
# To read: `workbench/scheduler/scheduler.py` (who runs), `workbench/scheduler/allocate.py` (who is preempted, and the words for
# it), `workbench/kv_cache/manager.py` (who holds what), `workbench/kv_cache/prefix.py` (what is found again).
