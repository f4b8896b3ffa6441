# %% [markdown]
# # Attention variants: swap, draw, write your own, check it
#
# Attention in the workbench has exchangeable parts: a mask (the keys that a query sees), the number of KV heads that
# query heads share, a function of the scores. A variant is a few words of configuration, without a change of model
# code.
#
# - **Questions**: Which tokens does a head look at? How do I write a mask of my own?
# - **Afterwards you can**: read a map of attention weights; choose a variant by its cost; write a mask and have its
#   laws checked.
# - **Minutes**: 30

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: a text has 24 tokens, and each looks at itself and all before it. How many pairs of query and key?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: sum(bool(Causal()(query, key)) for query in range(24) for key in range(24)),
    unit="pairs",
    tolerance=0.1,
    prediction=True,
    because="1 + 2 + ... + 24: the filled half of the picture below. It grows with the square of the length.",
)

# %%
import tempfile
from dataclasses import dataclass

import workbench
from workbench import Causal, SlidingWindow, draw_mask, testing

TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"

# %% [markdown]
# ## Masks are predicates
# A query (row) sees the filled keys (columns). A window hides old tokens; sinks keep the first tokens visible.

# %%
draw_mask(Causal(), 24)

# %%
draw_mask(SlidingWindow(sliding_window=8, num_sink_tokens=2), 24)

# %% [markdown]
# **Question**: The query at position 20 (the first is 0): how many keys does it see in the picture above?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: sum(bool(SlidingWindow(sliding_window=8, num_sink_tokens=2)(20, key)) for key in range(24)),
    unit="keys",
    tolerance=0,
    hint="Count its row: the sinks at the left, then the window, which ends at the query itself.",
    because="Two sinks, and eight tokens up to and with its own.",
)

# %% [markdown]
# ## Attention weights
# The demo model, with a window in every other layer, continues a text, and the widget draws its attention meanwhile.
# Choose layers and heads (or click a small map), hover over a cell, zoom with plus and minus; *heads that share keys*
# stacks the maps of these heads.

# %%
runner = workbench.load(
    "demo", backend="eager", attention={"sliding_window": 16, "num_sink_tokens": 2, "pattern": ["window", "full"]}
)
view = widgets.AttentionView(runner, TEXT, max_tokens=24, temperature=0)
view

# %% [markdown]
# This is a layer without a window: which of its heads attend to tokens far back? The saved picture shows the whole
# text.

# %%
view.wait()
view.layer, view.head = 3, 1
view.keep()

# %% [markdown]
# ## Costs and benefits of a variant
# The cell measures four things briefly: the cache's bytes for each token, the distance of next-token distributions from
# the unchanged model's (`kl_mean`, `same_top`), bits for each byte of held-out text, and tokens decoded a second. Add a
# variant.

# %%
record = workbench.run(
    workbench.Experiment.from_yaml("""
question: What do a window with sinks and fewer key/value heads cost in quality, and what do they save?
model: {name: demo, dtype: float32}
backend: eager
cache: {page_size: 16}
variants:
  window and sinks: {attention.sliding_window: 64, attention.num_sink_tokens: 4}
  one KV head: {attention.num_kv_heads: multi_query}
workload:
  {kind: quality, windows: 1, context: 256, decode: 4, greedy_prompts: 1, greedy_tokens: 4, copying: null,
   speed: {contexts: [192], tokens: 2, rounds: 2}, pool: null}
"""),
    tempfile.mkdtemp(prefix="workbench-"),
    "variants",
)
record

# %% [markdown]
# ## Write your own
# A mask is any function of query and key positions that is true where the query sees the key. `register` gives it a
# name that experiments can use.


# %%
@workbench.register("dilated")
@dataclass(frozen=True)
class Dilated:
    """The last `near` tokens, and before them every `step`-th (Longformer, Beltagy et al., 2020)."""

    near: int = 8
    step: int = 4

    def __call__(self, query, key):
        return (key <= query) & ((query - key < self.near) | (key % self.step == 0))


draw_mask(Dilated(), 24)

# %% [markdown]
# **Question**: How many keys does the last query of this picture see, the one at position 23?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: sum(bool(Dilated()(23, key)) for key in range(24)),
    unit="keys",
    tolerance=0,
    hint="The last 8 are 16 to 23. Which of 0 to 15 are multiples of 4?",
    because="Eight near ones, and 0, 4, 8 and 12.",
)

# %% [markdown]
# The conformity kit tests your mask against the laws of the workbench's own variants: outputs computed in batches, in
# chunks and in pages equal those of the plain model, and no query sees a later key.

# %%
print(testing.check_attention(Dilated, examples=2, backends=["eager"]))


# %% [markdown]
# The kit reports a mistake with its smallest example: with this mask a query sees later keys.


# %%
def peeking(query, key):
    return key <= query + 1


print(testing.check_attention(peeking, examples=1, backends=["eager"]))

# %% [markdown]
# Now use the mask in the model, by its name:

# %%
own = workbench.load("demo", backend="eager", attention={"mask": "dilated"})
widgets.AttentionView(own, TEXT, max_tokens=0, layer=2)

# %%
single = workbench.load("demo", backend="eager", attention={"num_kv_heads": "multi_query"})

# %% [markdown]
# **Question**: The demo model has two KV heads. With one, what share of its cache's bytes is left?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 100 * single.store.bytes_per_token / own.store.bytes_per_token,
    unit="%",
    hint="Keys and values are stored for each KV head, however many query heads share it.",
    because="Bytes grow with the number of KV heads, and with nothing else that changed.",
)

# %% [markdown]
# ## Try
#
# - `{"num_kv_heads": "multi_head"}`, `{"position": "alibi"}`, `{"softcap": 20}`: how do the maps and the table change?
# - Write a mask that shows a query its own block of 16 tokens and the first token of each earlier block. Does it pass
#   the laws?
# - `backends=["eager", "inductor", "mlir"]` in the check: which backends support your mask, and with which error do the
#   others refuse it?
#
# Where to read: `compiled_kernels/attention.py` (masks and score functions), `workbench/model/attention_config.py` (the
# settings of attention), `experiments/custom_attention.py` (user-defined score functions and whole modules),
# `experiments/window_span.yaml` (the measurement above, in full). `03_kv_cache` counts the cache's bytes; `05_sampling`
# continues with the logits.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [The key-value cache](03_kv_cache.py) ·
# Next: [Sampling](05_sampling.py)
