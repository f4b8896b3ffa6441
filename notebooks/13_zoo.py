# %% [markdown]
# # A zoo: published techniques, a page each
#
# A new idea for inference is mostly one small thing: which keys a query sees, how a key is stored, which token is drawn
# next, which request goes first. Here such a thing is a part, one file, and the engine keeps pages, batches, prefix
# reuse and every backend. This notebook shows techniques that others published, written that way, with a verdict on
# what each paper claims. The verdict's rule was written down before anything was measured.
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
# `lines` are those of the part without its docstring; 0 means that settings of the engine are enough. `laws` come from
# the conformity kit of its kind. `bytes` are those of the cache and `speed` is tokens in the same time, both as shares
# of the baseline's. `KL` is the distance from the unchanged model, in nats a token: only techniques that change the
# model's own distribution have one. What is empty does not belong to the kind, or was not measured yet.
#
# Choose a kind: attention, format, eviction, sampling, draft, schedule.

# %%
zoo.of_kind("sampling")

# %% [markdown]
# ## One technique
# Everything about it: claim, rule, what was found here and on which machine, the line that turns it on, the equation
# and the source. The last two are folded.

# %%
typical = zoo["typical"]
typical

# %% [markdown]
# ## Turn it on
# The line works wherever an experiment or a runner takes settings. The same prompt and seed, without and with it:

# %%
PROMPT = "def read_lines(path):\n    "
(part,) = typical.settings.use["sampling.filters"]
runner = workbench.load("demo", backend="eager")
for name, filters in (("as it is", []), ("typical", [part])):
    events = runner.stream(PROMPT, max_tokens=48, seed=3, filters=filters)
    print(f"--- {name}\n{PROMPT}{''.join(event.text for event in events)}\n")

# %% [markdown]
# What it does to one distribution: move `position` through the text. Hatched tokens were removed by the part.

# %%
explorer = widgets.SamplingExplorer(runner, PROMPT, filters=[part], max_tokens=24, seed=3).wait()
explorer

# %% [markdown]
# ## Write one yourself
# A filter takes logits, one row a sample, and returns them with the tokens that may not come set to minus infinity.
# This one is top-p (Holtzman et al., 2019) seen from the other end: it removes the least probable tokens that hold at
# most `mass` together. It is registered under a name, so no file is needed while you try.


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
# The kit tries it on random rows: tied, constant, peaked, with tokens already removed. Break it and run the cell again:
# leave out the line that keeps the likeliest token and set `mass=1`, or write into `logits` itself.
#
# Every kind has such a kit: `check_attention` and `check_kv_format` try a part in small models, batched and alone, cut
# and whole, on every backend, `check_evict` and `check_policy` play scenes with it. In a terminal,
# `workbench zoo check typical` does the same for an entry.

# %%
events = runner.stream(PROMPT, max_tokens=48, seed=3, filters=[{"path": "tail", "arguments": {"mass": 0.1}}])
print(PROMPT + "".join(event.text for event in events))

# %% [markdown]
# ## What a verdict is
# Each entry has a rule over figures of its kind, such as `loop_ratio <= 1.0 and time_ratio <= 1.3`. All of it met: the
# claim holds here. A part of an `and` met, by a figure that the settings do not fix as they fix bytes: it holds with
# limits. Otherwise: refuted here, on this model, which is small and
# writes Python. That is no verdict on the paper's model, and a reason to ask what the claim depends on.

# %%
for item in zoo:
    print(f"{item.settings.technique}: {item.settings.claim}\n    rule: {item.settings.rule}\n    {item.verdict}")

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
#   minute and records nothing. Which of your predictions was wrong, and why?
# - Combine two: `workbench run experiments/zoo_pareto.yaml` crosses techniques of three kinds and names the
#   combinations that no technique reaches alone.
# - Give an entry another argument (`zoo["typical"].settings.use` is a dict) and find one at which the text breaks.
# - Add your own: `NAME.py` and `NAME.yaml` in a folder, then `workbench zoo --folder FOLDER`. Write the rule first.
#
# To read: `experiments/zoo/`, `workbench/parts.py` (all that a part may import), `workbench/zoo/rule.py`, and
# docs/guide/ for each kind of part.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [A fleet](12_fleet.py) ·
# Next: [A real model](14_real_model.py)
