# %% [markdown]
# # Start here
#
# This course shows how a language model is run: the steps between a text and its continuation, their costs, and ways to
# make them faster. Everything is computed on this machine, with small models; after `make lab` nothing is downloaded. A
# click on a title opens its notebook. Run a cell with Shift+Enter, or all cells from the menu *Run*.
#
# <!-- made by `python -m tools.course`: begin -->
#
# | notebook | minutes | it answers |
# |:---|---:|:---|
# | [One request](01_one_request.py) | 20 | What happens to my text, from the first letter to the last token? |
# | [Prefill and decode](02_prefill_and_decode.py) | 30 | Why is the first token slow and the rest quick? |
# | [The key-value cache](03_kv_cache.py) | 30 | What is in the KV cache, how large is it, what does quantizing cost? |
# | [Attention variants](04_attention_variants.py) | 30 | Which tokens does a head look at? |
# | [Sampling](05_sampling.py) | 30 | What do temperature, top-p and penalties do to one distribution? |
# | [Kernels](06_kernels.py) | 20 | What did the compiler fuse, and what runs in the end? |
# | [Many requests](07_many_requests.py) | 45 | Who waits for whom when many requests share a step? |
# | [Speculation](08_speculation.py) | 25 | When do draft tokens pay? |
# | [Experiments](09_experiments.py) | 30 | How do I ask a question so that anyone can run it again? |
# | [Conversations](10_conversations.py) | 30 | What does the model read of a conversation, and what does a turn cost? |
# | [Serving](11_serving.py) | 30 | How do clients use it, and what happens behind the API? |
# | [A fleet](12_fleet.py) | 35 | What changes with more than one engine? |
# | [A zoo](13_zoo.py) | 25 | Which published techniques hold here, and how do I add one? |
# | [A real model](14_real_model.py) | 30 | Is what one reads about language models true of one that I can run? |
#
# **For a first look**: [A real model](14_real_model.py), 30 minutes; then the notebooks in order.
# What a model would say next, after each of its layers:
#
# [![What a model would say next, after each of its layers](pictures/start.png)](14_real_model.py)
#
# <!-- made by `python -m tools.course`: end -->

# %% [markdown]
# ## The aims of each notebook
# Run this cell for the same list with the aims of each notebook.

# %%
from workbench import widgets

widgets.Course()

# %% [markdown]
# ## How a notebook goes
# A notebook begins with a guess, continues with a running model and questions, and ends with things to try. An answer
# is checked against a value that the notebook has computed, so it may change when you change something. Below each
# question is a folded cell; run it to get a field for your answer. (Its code shows the answer.)
#
# A guess has one try. Any other question has two tries and a hint; then the answer is shown.

# %% [markdown]
# **Question**: A model gives ten tokens a second. How long does it take for an answer of 250 tokens?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 250 / 10,
    unit="s",
    hint="How often do 10 tokens fit into 250? Any unit of time will do: try it in minutes.",
    because="Each token takes a tenth of a second. Notebook 02_prefill_and_decode says what the first one takes.",
)

# %% [markdown]
# ## On a projector
# The button above the table makes letters and pictures larger, shows only the first line of code cells, dimmed, and
# increases contrast, in every open notebook. A code cell with the cursor is shown in full. In any notebook,
# `widgets.Course(projector=True)` and `widgets.Course(projector=False)` do the same.

# %% [markdown] tags=["foot"]
# ---
# Next: [One request](01_one_request.py)
