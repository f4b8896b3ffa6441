# %% [markdown]
# # Experiments: run, sweep, compare, reproduce
#
# An experiment is one value with a question. Written as YAML and read back it is the same value, and it decides
# everything that a run does: the same experiment gives the same tokens.
#
# - **Questions**: How do I ask a question so that anyone can run it again?
# - **Afterwards you can**: write an experiment with variants; say what an interval of a ratio allows; sweep, query and
#   reproduce runs.
# - **Minutes**: 30

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: an INT8 cache keeps its newest tokens in full precision. In steps of up to 64 tokens, from which
# context on is it smaller than a dense one?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: break_even_context(
        *(experiment.with_("variants={}", f"cache.format={name}") for name in ("int8", "dense"))
    ),
    unit="tokens",
    tolerance=0.25,
    prediction=True,
    because="Below is why: pages of both kinds are in use at once, and a short text fills neither.",
)

# %%
import tempfile
from pathlib import Path

import workbench

place = Path(tempfile.mkdtemp(prefix="workbench-"))  # runs are folders; these may go when the kernel does
experiment = workbench.Experiment.from_yaml("""
question: What does a smaller cache cost in time, and what does it save?
backend: eager
workload: {kind: random, requests: 1, prompt_tokens: 512, output_tokens: 6}
schedule: {chunk_tokens: 64}
measure: {warmup: 1, rounds: 5, ceilings: false}
variants:
  dense: {}
  int8: {cache.format: int8}
  int4: {cache.format: int4}
""")
experiment

# %% [markdown]
# A wrong key is refused with its path and the nearest right name. Try another.

# %%
try:
    experiment.with_("cache.fromat=int8")
except Exception as error:
    print(error)

# %% [markdown]
# ## Run
# Three variants, measured in turn, five rounds each: what the machine does meanwhile meets all of them.

# %%
record = workbench.run(experiment, place, "formats")
record

# %% [markdown]
# ## Compare
# Labels name only the settings that differ. An interval that spans 1 says that it is not yet known which is better.
# Choose another baseline; then show two measures against each other.

# %%
compare = widgets.Compare(record, baseline="dense", force=True)
compare

# %% [markdown]
# `kv_bytes_peak` is 0.64 of the dense cache's in INT8 and 0.44 in INT4. A quantized cache keeps the newest 64 tokens, a
# group of up to 64 that is not complete, and the tokens that a step computes in full precision besides: the scheduler
# allocates those pages chunk by chunk and frees them once all of their tokens are quantized, so two of them are in use
# here beside seven quantized ones, where the dense cache has nine. A short text takes *more* room than in a dense
# cache. Where a quantized one begins to pay follows from the formats' bytes a token (3,072 dense, 1,632 in INT8, 864 in
# INT4 in this model) and whole pages of 64 tokens, wherever chunks end; nothing has to run for it. With chunks of 64
# tokens that is from 321 tokens on in INT8, from 193 in INT4. A prompt that is computed in one step of up to 512 tokens
# lies there in full precision as a whole meanwhile, since each of its queries reads the 64 tokens before it
# unquantized: then it is from 1,281 and 833. Long prompts in long steps cost memory, `schedule.chunk_tokens` bounds it.

# %%
from workbench import break_even_context

for chunk in (64, 512):
    dense = experiment.with_("variants={}", f"schedule.chunk_tokens={chunk}")
    for format in ("int8", "int4"):
        tokens = break_even_context(dense.with_(f"cache.format={format}"), dense)
        print(f"steps of up to {chunk} tokens: {format} is smaller than dense from a context of {tokens:,} tokens on")

# %% [markdown]
# `force` compares times measured under contention too, as a notebook's often are; without it they are refused.
#
# ## Sweep
# Every combination of some settings, each point a process and a run folder of its own. Interrupted, a sweep goes on
# where it was: `workbench sweep --resume FOLDER`. Here are two points; the command line makes the same.

# %%
pages = workbench.Experiment.from_yaml("""
question: What do pages of another size hold?
backend: eager
workload: {kind: random, requests: 2, prompt_tokens: 96, output_tokens: 8}
measure: {warmup: 0, ceilings: false}
sweep: {axes: {cache.page_size: [16, 64]}}
""")
rows = workbench.run_sweep(pages, out=place)

# %% [markdown]
# ## A folder of runs is a database
# Settings are columns by dotted path, measures by name; every table of a run can be queried with SQL.

# %%
runs = workbench.open_runs(place)
runs.query("SELECT cache.page_size, pages_used_peak, kv_bytes_peak FROM runs WHERE pages_used_peak > 0").to_pylist()

# %% [markdown]
# ## Reproduce
# The resolved experiment lies in the folder. Run again it must give the same tokens; what else differs (versions,
# hardware, timings) is reported.

# %%
print(workbench.reproduce(workbench.Record.open(rows[0].outcome.folder), place))

# %% [markdown]
# ## Claims
# What texts on inference say, put to the test. Filter, choose a line (the arrow keys go through them), and measure it
# again: a quick look takes seconds and writes nothing.

# %%
widgets.Claims(claim="kv-gqa")

# %%
low, high = 0.97, 1.05

# %% [markdown]
# **Question**: INT8 takes about dense's time a token: the interval of their ratio goes from `low` to `high`. What may
# be said?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: "it is faster" if high < 1 else "it is slower" if low > 1 else "it is not known yet which is faster",
    choices=["it is faster", "it is slower", "they are equally fast", "it is not known yet which is faster"],
    hint="Which ratios does the interval allow?",
    because="The interval spans 1: either may be faster, by a few percent. More rounds make it narrower.",
)

# %% [markdown]
# ## Try
# - Add a variant `fp8: {cache.format: fp8}` and more rounds: when does an interval leave 1?
# - Sweep two settings at once, in a terminal:
#   `workbench sweep experiments/first_light.yaml --set cache.page_size=16,64 --set backend=eager,auto`
# - Write a claim of your own: a file in `experiments/claims/`, with evidence for each verdict that its rule can give.
#
# Read: `workbench/experiment/experiment.py`, `workbench/runs/`, `workbench/reports/`, `workbench/sweep/`,
# `workbench/claims/`.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Speculation](08_speculation.py) ·
# Next: [Conversations](10_conversations.py)
