# %% [markdown]
# # A zoo: published techniques, a page each
#
# A new idea for inference usually changes one small thing: the keys that a query sees, the storage of a key, the choice
# of the next token, the order of requests. In the workbench such a thing is a part, written in one file; pages,
# batches, prefix reuse and every backend keep working. This notebook shows published techniques as such parts, with a
# verdict on each paper's claim. The rule of each verdict was written before the measurement.
#
# - **Questions**: Which published techniques hold here, and how do I add one?
# - **Afterwards you can**: read an entry's claim, rule and verdict; turn a technique on; write a part of your own and
#   have its laws checked.
# - **Minutes**: 25

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: of the published techniques that were tried here, what share keeps its claim, with or without limits?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 100 * sum(verdict.startswith("holds") for verdict in tried) / len(tried),
    unit="%",
    tolerance=0.2,
    prediction=True,
    because="The model here is small and writes Python: a refuted claim says what it depends on.",
)

# %%
import torch

import workbench
from workbench import History

zoo = workbench.open_zoo()
tried = [item.verdict for item in zoo if item.verdict in ("holds", "holds-with-limits", "refuted")]
zoo

# %% [markdown]
# `lines` counts the lines of the part without its docstring; 0 means that settings of the engine are enough. `laws` is
# the result of the kind's conformity kit; `bytes` is the size of the cache and `speed` the number of tokens in the same
# time, both as ratios to the baseline. `KL` is the distance from the unchanged model, in nats for each token, for
# techniques that change the model's distribution. An empty cell does not apply to the kind, or was not measured yet.
#
# Choose a kind: attention, format, eviction, sampling, draft, schedule.

# %%
zoo.of_kind("sampling")

# %% [markdown]
# ## One technique
# The entry shows the claim, the rule, the result with its machine, the setting that enables the technique, the equation
# and the source. The last two are folded.

# %%
typical = zoo["typical"]
typical

# %% [markdown]
# ## Turn it on
# The setting works in any experiment or runner. The cell runs the same prompt and seed without and with it:

# %%
PROMPT = "def read_lines(path):\n    "
(part,) = typical.settings.use["sampling.filters"]
runner = workbench.load("demo", backend="eager")
for name, filters in (("as it is", []), ("typical", [part])):
    events = runner.stream(PROMPT, max_tokens=48, seed=3, filters=filters)
    print(f"--- {name}\n{PROMPT}{''.join(event.text for event in events)}\n")

# %% [markdown]
# The explorer shows its effect on one distribution: move `position` through the text. The part removed the hatched
# tokens.

# %%
explorer = widgets.SamplingExplorer(runner, PROMPT, filters=[part], max_tokens=24, seed=3).wait()
explorer

# %% [markdown]
# ## Write one yourself
# A filter takes logits, one row for each sample, and returns them with forbidden tokens set to minus infinity. This
# filter is top-p (Holtzman et al., 2019) from the other end: it removes the least probable tokens that together have at
# most the probability `mass`. It is registered under a name, so you need no file while you try it.


# %%
@workbench.register("tail")
class Tail:
    """Remove the least probable tokens that hold at most `mass` together."""

    def __init__(self, mass: float = 0.1):
        self.mass = mass

    def __call__(self, logits: torch.Tensor, histories: tuple[History, ...] = ()) -> torch.Tensor:
        probabilities, order = logits.softmax(-1).sort()
        removed = probabilities.cumsum(-1) <= self.mass
        removed[:, -1] = False  # the likeliest token stays
        return logits.masked_fill(removed.scatter(-1, order, removed), -torch.inf)


print(workbench.testing.check_sampler("tail", examples=20))

# %% [markdown]
# The kit tests the filter on random rows: tied, constant, peaked, with tokens already removed. Break the filter and run
# the cell again: leave out the line that keeps the likeliest token and set `mass=1`, or write into `logits` itself.
#
# Every kind has such a kit: `check_attention` and `check_kv_format` test a part in small models, batched and alone,
# chunked and whole, on every backend; `check_evict` and `check_policy` test it in generated scenarios. In a terminal,
# `workbench zoo check typical` does the same for an entry.

# %%
events = runner.stream(PROMPT, max_tokens=48, seed=3, filters=[{"path": "tail", "arguments": {"mass": 0.1}}])
print(PROMPT + "".join(event.text for event in events))

# %% [markdown]
# ## Verdicts
# Each entry has a rule over figures of its kind, such as `loop_ratio <= 1.0 and time_ratio <= 1.3`. If the whole rule
# is met, the claim holds. If only some comparisons joined by `and` are met, at least one of them of another figure than
# `bytes_ratio` (which the settings fix), it holds with limits. Otherwise it is refuted here, on this small model that
# writes Python.
#
# This is no verdict on the paper's model, but a reason to ask on which conditions the claim depends.

# %%
for item in zoo:
    print(f"{item.settings.technique}: {item.settings.says}\n    rule: {item.settings.rule}\n    {item.verdict}")

# %% [markdown]
# **Question**: What share of the probability do the tokens that `tail` leaves have at least, before they are scaled to
# 1?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 100 * (1 - Tail().mass),
    unit="%",
    hint="`mass` is the most that the removed tokens hold together.",
    because="So it is top-p with p = 1 - mass, up to the token at the boundary.",
)

# %% [markdown]
# ## Try
# - Pick an entry and read its source: which line is the paper's equation? `print(zoo["typical"].entry.docstring)`
# - Predict its figures, then measure: `workbench zoo run typical --quick` in a terminal takes a first look of about a
#   minute and stores nothing. Which of your predictions was wrong, and why?
# - Combine two: `workbench run experiments/zoo_pareto.yaml` crosses techniques of three kinds and names the
#   combinations that no technique reaches alone.
# - Give an entry another argument (`zoo["typical"].settings.use` is a dict) and find one at which the text breaks.
# - Add your own: `NAME.py` and `NAME.yaml` in a folder, then `workbench zoo --folder FOLDER`. Write the rule first.
#
# To read: `experiments/zoo/`, `workbench/parts.py` (all that a part may import), `workbench/experiment/rule.py`, and
# docs/guide/ for each kind of part.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [A fleet](12_fleet.py) ·
# Next: [A real model](14_real_model.py)
