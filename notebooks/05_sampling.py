# %% [markdown]
# # Sampling: from a distribution to a token
#
# A model computes a logit for every token of its vocabulary. Softmax turns the logits into probabilities, filters
# remove some tokens, and one uniform random number picks the next token. This notebook shows each of these steps on a
# real distribution.
#
# - **Questions**: What do temperature, top-p and penalties do to one distribution?
# - **Afterwards you can**: predict what a filter removes; say in which order filters apply, and why that matters; add a
#   filter of your own.
# - **Minutes**: 30

# %%
import workbench
from workbench import widgets

MODEL = workbench.default_model()  # smollm2 where it is at hand, else a tiny one that continues Python
PROMPT = "def read_file(path):\n    with open(" if MODEL.startswith("demo") else "The cat sat on the mat because"

# %% [markdown]
# **Guess first**: the model knows thousands of tokens. How many of them does top-p 0.9 leave after `PROMPT`?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: trace_filters(logits, History(ids), SamplingParameters(top_p=0.9)).steps[0].num_left,
    unit="tokens",
    tolerance=0.5,
    prediction=True,
    because="The most probable ones, as few as hold 90 % together: their number says how certain the model is here.",
)

# %%
from workbench import History, SamplingParameters, entropy_bits, trace_filters

# Compiling pays for the larger model: it takes a while the first time, then what was compiled is found again.
runner = workbench.load(MODEL, backend="eager" if MODEL.startswith("demo") else "mlir")

# %% [markdown]
# ## A distribution, filter by filter
# Drag `position` along the text, or click a token: which other tokens were possible there? Then move the filters'
# sliders. The table shows the order of the filters; hatched bars are removed tokens, and the number next to a bar names
# the filter.

# %%
settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1}
explorer = widgets.SamplingExplorer(runner, PROMPT, ignore_eos=True, **settings).wait()
explorer

# %% [markdown]
# The engine computes these figures with its own filters, in its own order; the cell prints the logits after each
# filter.

# %%
ids = tuple(runner.tokenizer.encode(PROMPT))
# The runner may be busy for a widget: this runs between two of its steps.
logits = widgets.between_steps(runner, lambda runner: runner.model.logits(ids))[-1]
parameters = SamplingParameters(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
for stage in trace_filters(logits, History(ids), parameters).steps:
    bits = entropy_bits(stage.probabilities)
    print(f"{stage.name:<16}{stage.num_left:>6,} tokens left{stage.kept_mass:>9.2%} kept{bits:>8.2f} bits")

# %% [markdown]
# ## Certain and uncertain positions
# Top-k keeps the same number of tokens at every position (and ties with the last of them). Top-p and min-p depend on
# the model's certainty: at some positions of a text they keep one token, at others many.

# %%
text = widgets.between_steps(runner, lambda runner: runner.model.logits(explorer.ids))  # [token vocab]
rules = {"top_k": 10, "top_p": 0.9, "min_p": 0.1}
for position in range(len(ids), len(ids) + 6):
    row, past = text[position - 1], History(explorer.ids[:position])
    found = {name: trace_filters(row, past, SamplingParameters(**{name: value})) for name, value in rules.items()}
    kept = {name: each.steps[0].num_left for name, each in found.items()}
    print(f"position {position}: {entropy_bits(row.double().softmax(-1)):.2f} bits; tokens left: {kept}")

# %% [markdown]
# ## The order matters
# Temperature comes before the filters. A high temperature flattens the distribution, and top-p then keeps many more
# tokens for the same `p`; min-p changes less. Press *Draw again*, and compare the drawn frequencies with the
# probabilities.

# %%
hot = widgets.SamplingExplorer(runner, PROMPT, temperature=1.6, top_p=0.9, seed=1).wait()
hot

# %% [markdown]
# **Question**: Temperature rises from 0.8 to 1.6. At the first position of the answer, what happens to the entropy?

# %% jupyter={"source_hidden": true}
def bits(temperature):
    """Return the entropy of the first position at a temperature."""
    return entropy_bits((logits / temperature).softmax(-1))


widgets.Exercise(
    answer=lambda: "it grows" if bits(1.6) > bits(0.8) else "it falls",
    choices=["it falls", "it stays", "it grows"],
    hint="Logits are divided by the temperature. What do smaller differences of logits make of probabilities?",
    because="Smaller differences: the distribution is flatter, and it takes more bits to say which token came.",
)

# %% [markdown]
# ## Penalties
# A penalty changes the logits of tokens that already occur in the text. Greedy text tends to repeat itself.
# Raise `frequency penalty` and press *Generate*.

# %%
greedy = widgets.SamplingExplorer(runner, "la la la la", max_tokens=40, temperature=0, ignore_eos=True).wait()
greedy.position = len(greedy.ids)
greedy

# %% [markdown]
# ## Any array
# The explorer shows any array of logits: from another model, or made up.

# %%
colours = {"red": 2.0, "green": 1.5, "blue": 1.5, "black": 0.0, "white": -1.0}
explored = widgets.SamplingExplorer([*colours.values()], texts=[*colours], top_p=0.8)
explored

# %% [markdown]
# **Question**: Top-p 0.8 removes black and white, the least probable. What does red's probability become?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 100 * explored.figures().candidates[0].after,
    unit="%",
    tolerance=0.02,
    hint="What is left is divided by its sum.",
    because="Each token that is left is divided by what all of them have together, so that they make 1 again.",
)

# %% [markdown]
# ## The explorer draws as the engine does
# The random number for a token depends only on the request's seed and the token's position. So the samples of one
# request equal the explorer's draws, in any batch. (If the model computes in bfloat16, a draw close to the boundary
# between two tokens may give the other token.)

# %%
samples = [e.token_id for e in runner.stream(PROMPT, max_tokens=1, n=100, **settings) if e.kind == "decoded"]
drawn = widgets.SamplingExplorer(runner, PROMPT, draws=100, max_tokens=1, **settings).wait().figures().draws
for token in sorted(drawn, key=drawn.get, reverse=True)[:5]:
    print(
        f"{runner.tokenizer.decode([token])!r:<12}{drawn[token]:>5} drawn here{samples.count(token):>5} by the engine"
    )

# %% [markdown]
# ## A filter of your own
# A filter is a class with `__call__(logits, histories)`, named by its import path; it runs after the built-in filters.
# This filter keeps tokens that are about as surprising as the model expects (Meister et al., 2022).

# %%
own = [{"path": "experiments.zoo.typical:Typical", "arguments": {"mass": 0.5}}]
widgets.SamplingExplorer(runner, PROMPT, filters=own, max_tokens=8, seed=1).wait()

# %% [markdown]
# **Question**: How many of the five colours does min-p 0.1 leave?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: widgets.SamplingExplorer([*colours.values()], texts=[*colours], min_p=0.1).figures().sieves[0].left,
    unit="colours",
    tolerance=0,
    hint="It removes what has less than a tenth of the most probable token's probability.",
    because="Black, at e^-2 of red, has more than a tenth of it; white, at e^-3, has less.",
)

# %% [markdown]
# ## Try
# - Find a position at which top-k 5 removes almost nothing, and one at which it removes half of the probability.
# - Set `min_p` to 0.1 and raise the temperature to 2: how many tokens stay? Do the same with `top_p` 0.9.
# - `explorer.parameters` are the settings of the sliders: give them to a request of notebook `01_one_request`.
#
# Read: `workbench/sampling/filters.py` (every filter in a few lines), `samplers.py`, `filter_trace.py`, and
# `experiments/zoo/typical.py`. `experiments/sampling_texts.yaml` measures how texts change with these settings.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Attention variants](04_attention_variants.py) ·
# Next: [Kernels](06_kernels.py)
