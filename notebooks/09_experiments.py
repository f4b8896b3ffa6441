# %% [markdown]
# # Experiments: run, sweep, compare, reproduce
#
# An experiment is one value with a question. Written as YAML and read back it is the same value. It determines
# everything that a run does, so the same experiment gives the same tokens.
#
# - **Questions**: How do I ask a question so that anyone can run it again?
# - **Afterwards you can**: write an experiment with variants; say what an interval of a ratio allows; sweep, query and
#   reproduce runs.
# - **Minutes**: 30

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: an INT8 cache keeps its newest tokens in full precision. With steps of up to 64 tokens, from which
# context length on is it smaller than a dense cache?

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
# An unknown key is refused with its path and the nearest known name. Try another key.

# %%
try:
    experiment.with_("cache.fromat=int8")
except Exception as error:
    print(error)

# %% [markdown]
# ## Run
# Three variants are measured in turn, for five rounds, so that other load on the machine affects all of them.

# %%
record = workbench.run(experiment, place, "formats")
record

# %% [markdown]
# ## Compare
# Labels name only the settings that differ. If an interval contains 1, it is not yet known which variant is better.
# Choose another baseline; then plot two measures against each other.

# %%
compare = widgets.Compare(record, baseline="dense", force=True)
compare

# %% [markdown]
# `kv_bytes_peak` is 0.64 of the dense cache's in INT8 and 0.44 in INT4. A quantized cache keeps some tokens in full
# precision: the newest 64, an incomplete group of up to 64, and the tokens of the current step. The scheduler allocates
# these residual pages chunk by chunk and frees them when all of their tokens are quantized. So here two residual pages
# and seven quantized pages are in use, and the dense cache has nine pages.
#
# A short text takes *more* memory than in a dense cache. The length from which a quantized cache is smaller can be
# computed without a run, from the formats' bytes for each token (3,072 dense, 1,632 in INT8, 864 in INT4 in this model)
# and whole pages of 64 tokens. With chunks of 64 tokens it is 321 tokens in INT8, and 193 in INT4.
#
# A prompt that is computed in one step of up to 512 tokens is in full precision during this step, because each of its
# queries reads the 64 tokens before it unquantized. Then these lengths are 1,281 and 833 tokens. So long prompts in
# long steps need more memory; `schedule.chunk_tokens` limits it.

# %%
from workbench import break_even_context

for chunk in (64, 512):
    dense = experiment.with_("variants={}", f"schedule.chunk_tokens={chunk}")
    for format in ("int8", "int4"):
        tokens = break_even_context(dense.with_(f"cache.format={format}"), dense)
        print(f"steps of up to {chunk} tokens: {format} is smaller than dense from a context of {tokens:,} tokens on")

# %% [markdown]
# `force` also compares times that were measured under contention, as in a notebook; without it they are refused.
#
# ## Sweep
# A sweep runs every combination of some settings; each point has its own process and run folder.
# `workbench sweep --resume FOLDER` continues an interrupted sweep. The cell runs two points, as the command line would.

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
# Each setting is a column, named by its dotted path, and so is each measure; every table of a run can be queried with
# SQL.

# %%
runs = workbench.open_runs(place)
runs.query("SELECT cache.page_size, pages_used_peak, kv_bytes_peak FROM runs WHERE pages_used_peak > 0").to_pylist()

# %% [markdown]
# ## Reproduce
# The run folder has the resolved experiment. A second run must give the same tokens; other differences (versions,
# hardware, timings) are reported.

# %%
print(workbench.reproduce(workbench.Record.open(rows[0].outcome.folder), place))

# %% [markdown]
# ## Claims
# The claims are statements of introductory texts, tested by measurement. Filter them, choose a line (with the arrow
# keys, too), and measure it again: a quick measurement takes seconds and stores nothing.

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
# - Add a variant `fp8: {cache.format: fp8}` and more rounds: when does an interval no longer contain 1?
# - Sweep two settings at once, in a terminal:
#   `workbench sweep experiments/first_light.yaml --set cache.page_size=16,64 --set backend=eager,auto`
# - Write a claim of your own: a YAML file in a folder of your own, with a rule that could refute it;
#   docs/guide/claims.md shows one.
#
# Read: `workbench/experiment/experiment.py`, `workbench/runs/`, `workbench/reports/`, `workbench/sweep/`,
# `workbench/claims/`.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Speculation](08_speculation.py) ·
# Next: [Conversations](10_conversations.py)
