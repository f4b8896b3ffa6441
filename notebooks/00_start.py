# %% [markdown]
# # Start here
#
# Fourteen notebooks on how a language model is run: what happens between a text and its continuation, what it costs,
# and what makes it quicker. Everything is computed here, by a small model on this machine; nothing is downloaded. The
# last one runs a real model, once a person has fetched it.
#
# Read them in order, or go to the one that answers your question: a click on its title opens it. Run a cell with
# Shift+Enter, or all of them from the menu *Run*.

# %%
from workbench import widgets

widgets.Course()

# %% [markdown]
# ## How a notebook goes
# It begins with a guess, goes on with a running model, asks questions on the way, and ends with things to try. A
# question is checked against what the notebook itself has computed, so it may have another answer when you have changed
# something. A guess has one try. Any other question has two, with a hint if you want one; then its answer is shown.

# %%
widgets.Exercise(
    "A model gives 10 tokens a second. How long does it take for an answer of 250 tokens?",
    lambda: 250 / 10,
    unit="s",
    hint="How often do 10 tokens fit into 250? Any unit of time will do: try it in minutes.",
    because="Each token takes a tenth of a second. Notebook 02_prefill_and_decode says what the first one takes.",
)

# %% [markdown]
# ## On a projector
# The button above the table makes letters and pictures larger, dims code to its first line, and strengthens contrast,
# in every notebook that is open. A line of code that has the keyboard is shown whole. The same from any notebook:
# `widgets.projector(True)`, and `widgets.projector(False)` to end it.
