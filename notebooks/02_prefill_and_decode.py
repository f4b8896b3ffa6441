# %% [markdown]
# # Prefill and decode
#
# A prompt is computed in one step, called prefill; the user waits for it during the time to first token (TTFT). Then
# tokens are computed one by one, called decode; each takes the time per output token (TPOT). Different limits of the
# same machine bound the two phases. [01_one_request](01_one_request.py) showed one request step by step.
#
# - **Questions**: Why is the first token slow and the rest quick? What is the limit of this machine?
# - **Afterwards you can**: measure TTFT and TPOT; place a step on a roofline; say whether memory or arithmetic binds
#   it, and what a larger batch changes.
# - **Minutes**: 30

# %%
import workbench
from workbench import widgets

model = workbench.default_model()  # smollm2 where it is at hand, else a tiny one that continues Python
short = "def add(a, b):\n    return a +" if model.startswith("demo") else "The cat sat on the mat because"
long = "\n".join(f"{n}. The cat sat on mat number {n}, because it was tired." for n in range(1, 17))

# %% [markdown]
# **Guess first**: How many times as long as each later token does the first token of the long text take?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: ttft / tpot,  # of the long text, as measured in the cell below
    unit="times",
    tolerance=0.3,
    prediction=True,
    because="All tokens of the prompt are computed before the first one of the answer; later steps compute one each.",
)

# %%
# Compiled the first time, which takes a while; then it is found again.
runner = workbench.load(model, backend="auto" if model.startswith("demo") else "mlir")
len(runner.tokenizer.encode(short)), len(runner.tokenizer.encode(long))

# %% [markdown]
# ## By hand
# Every event has its time. The first request is not measured, so that one-time work is not included.

# %%
list(runner.stream(long, max_tokens=4))
texts = {"short": short, "long": long}
events = {name: list(runner.stream(text, max_tokens=32, ignore_eos=True)) for name, text in texts.items()}
for name, mine in events.items():
    (arrival,) = (event.arrival for event in mine if event.kind == "submitted")
    times = [event.time for event in mine if event.kind == "decoded"]
    ttft, tpot = times[0] - arrival, (times[-1] - times[0]) / (len(times) - 1)
    print(f"{name:5}  TTFT {1000 * ttft:6.1f} ms  TPOT {1000 * tpot:5.1f} ms  {len(times)} tokens")

# %% [markdown]
# ## From the summary
# These are the same figures as in every record, computed from the same times. The longer prompt increases TTFT and
# hardly changes TPOT. Try other lengths above.

# %%
recorder = workbench.Recorder()
for event in [*events["short"], *events["long"]]:
    recorder.record(event)
summary = workbench.summarize(recorder.requests(), recorder.steps(), recorder.tokens())
{key: summary[key] for key in ("ttft_s", "tpot_s", "prefill_tokens_per_s", "decode_tokens_per_s")}

# %% [markdown]
# ## The path of a token
# What does a step compute, for a prompt or for one token? The widget follows a text from its ids through every layer to
# the sampled token, with the real values of this model. Press play, or choose a cell: it shows a matrix, and below it
# one number and the terms of its sum. `logit lens` shows the likeliest next token after each layer, `heads` the
# attention of each head, and `switch off` the text without some heads or layers.

# %%
path = widgets.TokenPath(runner, short)
path

# %% [markdown]
# ## The roofline
# The model's shape determines how many FLOPs a step computes and how many bytes it moves. A step takes at least the
# longer of two times: computing and moving at the best rates of this machine, which are measured here (once, then
# stored). Hollow marks show this bound, filled marks the measured time; the table below names the limit. Hover over a
# mark.

# %%
roofline = widgets.ModelGraph(runner, tab="roofline")
roofline.measure()
roofline

# %% [markdown]
# The picture is empty until the runner computes a step, because it is drawn from the runner's events. Run the next
# cell, and look at the picture again.

# %%
for text in texts.values():
    list(runner.stream(text, max_tokens=16, ignore_eos=True))
roofline.keep()

# %% [markdown]
# ## Why decode waits for memory
# One decode step reads every weight to compute one token: one to four FLOPs for each byte, as weights have 16 or 4
# bits. More sequences in a step share these reads, so the point moves to the right and up, until arithmetic is the
# limit. The next cell decodes one sequence, then 4, then 16 in one batch. How much time do 16 sequences take, and how
# much each of them?

# %%
roofline.forget()
for batch in (1, 4, 16):
    list(runner.stream([short] * batch, max_tokens=12, ignore_eos=True))
roofline.keep()

# %%
for work in roofline.works:
    took = f"predicted {1000 * work.predicted:7.3f} ms, measured {1000 * work.seconds:7.2f} ms"
    print(f"{work.name:16} {work.intensity:6.1f} FLOPs a byte, {took}, {work.bound.name} binds")

# %% [markdown]
# **Question**: By which factor do the FLOPs a byte of a step grow if it decodes 16 sequences instead of 1?

# %% jupyter={"source_hidden": true}
def intensity(name):
    """Return the FLOPs a byte of a step by its name in the table."""
    return next(work.intensity for work in roofline.works if work.name == name)


widgets.Exercise(
    answer=lambda: intensity("decode × 16") / intensity("decode × 1"),
    unit="times",
    tolerance=0.1,
    hint="The weights are read once a step, whatever it computes with them.",
    because="The weights are read once for all 16. Only keys and values, of each sequence its own, are read more.",
)

# %% [markdown]
# A gap between bound and measurement is time that the program adds. Here the model is compiled, and a decode step is
# one function. The backend `eager` runs one small operator after another from Python, and its gap is far larger.
# [06_kernels](06_kernels.py) shows how to close the gap.
#
# ## A machine that is not here
# This picture has only bounds, from an H100's data sheet: at which batch size does a step of an 8-billion-parameter
# model stop waiting for memory?

# %%
cost = workbench.StepCostModel(workbench.named_shape("llama-3.1-8b"), block_value=2, head_value=2, cache_value=2)
steps = {f"decode × {batch}": cost([(1024, 1)] * batch, batch) for batch in (1, 8, 64, 512)}
steps["prefill 512"] = cost([(0, 512)], 1)
points = [widgets.RooflinePoint(name, step.flops, step.bytes, dtype="bfloat16") for name, step in steps.items()]
h100 = widgets.ModelGraph(points, ceilings="h100")
h100

# %% [markdown]
# **Question**: Which of these steps does not wait for memory on an H100?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: next(work.name for work in h100.works if "memory" not in work.bound.name),
    choices=list(steps),
    hint="How many tokens use each weight that is read? What is read besides, for each of 512 sequences?",
    because="A prompt's tokens share weights and context. Each decoded sequence reads 1,024 tokens of its own cache, "
    "so 512 of them still wait for memory.",
)

# %% [markdown]
# ## Try
# - `workbench.load("demo-chat", backend="eager")` runs the modules as written: how far do the filled marks drop?
# - Use contexts of 8,192 instead of 1,024 tokens in the last cell: why do decodes of many sequences move left again?
# - Set `cache_value=1` or `block_value=0.5` there: how do an 8-bit cache and 4-bit weights move each point?
#
# Read on in `workbench/model/cost.py` (FLOPs and bytes of a step), `workbench/machine/ceilings.py` (what is measured),
# `workbench/runs/metrics.py` (every figure of a record); then [03_kv_cache](03_kv_cache.py).

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [One request](01_one_request.py) ·
# Next: [The key-value cache](03_kv_cache.py)
