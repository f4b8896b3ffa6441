# %% [markdown]
# # A real model: claims held to what comes out
#
# This notebook runs a pretrained model of English, SmolLM2 with 135 million parameters, on the examples of introductory
# texts about inference. Each example ends with its claims, whether they are right or wrong here, and the results. A
# wrong answer is shown as wrong.
#
# - **Questions**: Is what one reads about language models true of one that I can run?
# - **Afterwards you can**: search heads for what they look at; say what a long prompt costs and what it leaves as it
#   is; tell a guaranteed form from a true answer.
# - **Minutes**: 30

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: compare `Summarize this:` with 1,500 words and `What is 2+2?`. How many times as long does the first
# token of the long prompt take?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: examples.find("first tokens").numbers["times"],
    unit="times",
    tolerance=0.5,
    prediction=True,
    because="Thousands of tokens are computed before the first answer token, against a few dozen.",
)

# %% [markdown]
# One command fetches the model: `workbench model get smollm2`. Without the model this notebook shows recorded results,
# and says so.

# %%
from experiments.real_examples import BANK, CAT, TIRED, Examples

examples = Examples()
runner = examples.runner  # None where the model is not at hand
examples

# %% [markdown]
# ## One token, taken apart
# The text becomes token ids, the model computes a logit for every token of the vocabulary, and each filter removes some
# tokens.

# %%
examples.find("next token")

# %% [markdown]
# Do the same by hand: drag the sliders, or drag `position` to an earlier word.

# %%
runner and widgets.SamplingExplorer(runner, CAT, max_tokens=8, seed=1, temperature=0.5, top_k=5, top_p=0.5).wait()

# %% [markdown]
# **Question**: How many tokens does top-p 0.5 leave after `The cat sat on the mat because`?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: examples.find("next token").numbers["needed"],
    unit="tokens",
    tolerance=0,
    hint="Add up the model's probabilities from the top until they reach half.",
    because="The fewest that hold half of the probability together.",
)

# %% [markdown]
# ## "it" attends to "cat"
# This is a popular picture of attention. The cell searches all heads of all layers for the head in which `it` attends
# most to `cat`. The last claim is popular, but cannot be true here, because `it` comes before `tired`.

# %%
pronoun = examples.find("pronoun")
pronoun

# %% [markdown]
# This map shows that head: rows attend to columns.

# %%
layer, head, *_ = pronoun.rows[0]
runner and widgets.AttentionView(runner, TIRED, max_tokens=0, layer=layer, head=head)

# %% [markdown]
# **Question**: What does the row of `it` become if the text has `soft` in place of `tired`?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: "the same" if not pronoun.claims[-1][1] else "another",
    choices=["the same", "another"],
    hint="Which words have been read when `it` is computed?",
    because="A word looks at those before it. What comes later cannot change its row.",
)

# %% [markdown]
# ## The bank by the river
# Which meaning does `bank` have? The word itself is computed before `river` is read, so only later rows can decide its
# meaning. One such head is in the map above.

# %%
examples.find("bank")

# %%
_, layer, head, *_ = examples.find("bank").rows[1]  # had to bank
runner and widgets.AttentionView(runner, BANK, max_tokens=0, layer=layer, head=head)

# %% [markdown]
# ## A short question and a long text
# Time to first token grows with the prompt. Texts claim that the later tokens are as fast as before, but every token
# reads the keys and values of the whole prompt. Articles use 5,000 words. The cell uses 1,500 to save time: with
# `words=5_000` it takes two minutes.

# %%
examples.find("first tokens", words=1_500)

# %% [markdown]
# ## Extraction
# Temperature 0 makes an answer repeatable, a stop string ends it, a schema guarantees its format. None of them makes it
# true.

# %%
examples.find("extraction")

# %% [markdown]
# ## A system prompt, written once and read again
# The cache keeps whole pages of a prompt, and a second request with the same beginning reads them. With a vendor's
# prices this saves money: a cache write costs more than a plain token, and a read a tenth.

# %%
examples.find("system prompt")

# %% [markdown]
# ## Ten turns
# Every turn sends the whole conversation again, but only new tokens are computed. The last row computes the tenth
# turn's prompt with an empty cache.

# %%
examples.find("ten turns")

# %% [markdown]
# ## A tool that is called
# A model of this size cannot multiply reliably. With a calculator it need not multiply, if it calls the calculator with
# the right expression. A forced call follows the schema of its arguments, but a schema does not know the question.

# %%
examples.find("tool")

# %% [markdown]
# ## A thinking budget, honestly
# SmolLM2 was not trained to think between two control tokens, so there is nothing that a budget could close. If you ask
# for steps, it writes them as text, and only `max_tokens` limits steps and answer together.

# %%
examples.find("thinking")

# %% [markdown]
# ## Everything at once
# How many of the claims were true?

# %%
examples

# %% [markdown]
# **Question**: A schema was kept, token for token. Is the answer true then?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: "its form is" if examples.find("extraction").claims[4][1] else "nothing is",
    choices=["yes", "its form is", "nothing is"],
    hint="What does the grammar know of the text?",
    because="A grammar removes tokens that break the form. The values are the model's own.",
)

# %% [markdown]
# ## Try
# - Put a sentence of your own into `attention` of `experiments.real_examples`, and `strongest` finds its heads.
# - Exchange the tool's question for one with larger numbers: where does the call begin to be wrong?
# - `workbench chat` and `workbench serve` speak with the same model.
#
# Read: `experiments/real_examples.py` (every example in a function), `workbench/inspect/attention.py`,
# `workbench/economics/prompt_cache.py`. `python -m experiments.real_examples` runs all of it in a terminal.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [A zoo](13_zoo.py)
