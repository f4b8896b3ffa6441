# %% [markdown]
# # Start here
#
# How a language model is run: what happens between a text and its continuation, what it costs, and what makes it
# quicker. Everything is computed on this machine, by small models, and nothing is downloaded. A click on a title opens
# its notebook; there, run a cell with Shift+Enter, or all of them from the menu *Run*.
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
# **Try this first**: [A real model](14_real_model.py), 30 minutes.
# What a model would say next, after each of its layers:
#
# [![What a model would say next, after each of its layers](pictures/start.png)](14_real_model.py)
#
# <!-- made by `python -m tools.course`: end -->

# %% [markdown]
# ## With what you can do afterwards
# Run this cell for the same list with the aims of each notebook.

# %%
from workbench import widgets

widgets.Course()

# %% [markdown]
# ## How a notebook goes
# It begins with a guess, goes on with a running model, asks questions on the way, and ends with things to try. A
# question is checked against what the notebook itself has computed, so it may have another answer when you have changed
# something. The folded cell below it has the code, which says the answer: run it for a place to answer in. A guess has
# one try. Any other question has two, with a hint if you want one; then its answer is shown.

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
# The button above that table makes letters and pictures larger, dims code to its first line, and strengthens contrast,
# in every notebook that is open. A line of code that has the keyboard is shown whole. The same from any notebook:
# `widgets.projector(True)`, and `widgets.projector(False)` to end it.

# %% [markdown] tags=["foot"]
# ---
# Next: [One request](01_one_request.py)
