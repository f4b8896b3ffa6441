# %% [markdown]
# # A real model: claims held to what comes out
#
# A pretrained model of English, SmolLM2 with 135 million parameters, runs here on the examples that explanations of
# inference give. Each example ends with its claims: right or wrong here, and what was found. A wrong answer is shown as
# wrong.
#
# - **Questions**: Is what one reads about language models true of one that I can run?
# - **Afterwards you can**: search heads for what they look at; say what a long prompt costs and what it leaves as it
#   is; tell a guaranteed form from a true answer.
# - **Minutes**: 30

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: `Summarize this:` with 1,500 words against `What is 2+2?`. How many times as long does the first
# token take?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: examples.find("first tokens").numbers["times"],
    unit="times",
    tolerance=0.5,
    prediction=True,
    because="Thousands of tokens are computed before the first answer token, against a few dozen.",
)

# %% [markdown]
# The model is fetched by one command, `workbench model get smollm2`. Without it this notebook shows what was recorded,
# and says so.

# %%
from experiments.real_examples import BANK, CAT, TIRED, Examples

examples = Examples()
runner = examples.runner  # None where the model is not at hand
examples

# %% [markdown]
# ## One token, taken apart
# Text becomes ids, ids become a number for every token of the vocabulary, and each filter removes some of them.

# %%
examples.find("next token")

# %% [markdown]
# The same by hand: drag the sliders, or `position` to an earlier word.

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
# A popular picture of attention. All heads of all layers are searched for the one in which `it` gives `cat` the most:
# found, not assumed. The last claim is the popular one that cannot be true here: `it` comes before `tired`.

# %%
pronoun = examples.find("pronoun")
pronoun

# %% [markdown]
# That head as a map: rows look at columns.

# %%
layer, head, *_ = pronoun.rows[0]
runner and widgets.AttentionView(runner, TIRED, max_tokens=0, layer=layer, head=head)

# %% [markdown]
# **Question**: `soft` for `tired`: what does the row of `it` become?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: "the same" if not pronoun.claims[-1][1] else "another",
    choices=["the same", "another"],
    hint="Which words have been read when `it` is computed?",
    because="A word looks at those before it. What comes later cannot change its row.",
)

# %% [markdown]
# ## The bank by the river
# Which meaning of `bank`? The word itself is computed before `river` is read. What settles it has to happen in later
# rows. One head has been seen above.

# %%
examples.find("bank")

# %%
_, layer, head, *_ = examples.find("bank").rows[1]  # had to bank
runner and widgets.AttentionView(runner, BANK, max_tokens=0, layer=layer, head=head)

# %% [markdown]
# ## A short question and a long text
# Time to first token grows with the prompt. The pace afterwards is said to stay as it was; every token reads the keys
# and values of the whole prompt, though. Articles take 5,000 words. Here it is 1,500, for the sake of your time: with
# `words=5_000` the next cell takes two minutes.

# %%
examples.find("first tokens", words=1_500)

# %% [markdown]
# ## Extraction
# Temperature 0 makes it repeatable, a stop string cuts it, a schema guarantees its form. None of them makes it true.

# %%
examples.find("extraction")

# %% [markdown]
# ## A system prompt, written once and read again
# Whole pages of a prompt are kept, and a second request with the same beginning reads them. A vendor's prices make it
# money: a write costs more than a plain token, a read a tenth.

# %%
examples.find("system prompt")

# %% [markdown]
# ## Ten turns
# Every turn sends the whole conversation again. What is computed is what is new. The last row computes the tenth turn's
# prompt with an empty cache.

# %%
examples.find("ten turns")

# %% [markdown]
# ## A tool that is called
# A model of this size does not multiply. With a calculator it need not, if it calls it, and with the right expression:
# a call that it must make keeps the schema of its arguments, and no schema knows what was asked.

# %%
examples.find("tool")

# %% [markdown]
# ## A thinking budget, honestly
# SmolLM2 was not trained to think between two control tokens, so there is nothing that a budget could close. Asked for
# steps it writes them as text, which only `max_tokens` bounds, together with the answer.

# %%
examples.find("thinking")

# %% [markdown]
# ## Everything at once
# How much of it was true?

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
