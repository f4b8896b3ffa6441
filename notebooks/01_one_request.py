# %% [markdown]
# # One request: text to tokens to text
#
# This notebook follows one request through a model and shows every step: the text is divided into tokens, the prompt is
# computed in one step (prefill), each further step computes one token (decode), and the tokens become text again. The
# model is SmolLM2, which knows English, if it has been fetched (`workbench model get smollm2`). Otherwise it is the
# workbench's own tiny model, which continues Python.
#
# - **Questions**: What happens to my text, from the first letter to the last token?
# - **Afterwards you can**: name the steps from a text to its continuation; read the events of a runner; say which
#   tokens were computed in which step.
# - **Minutes**: 20

# %%
import math

import workbench
from workbench import widgets

model = workbench.default_model()
prompt = "def is_even(number):\n    " if model.startswith("demo") else "The cat sat on the mat because"

# %% [markdown]
# **Guess first**: how many tokens does the text of `prompt` have? (The answer is checked after the cells have run.)

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: len(runner.tokenizer.encode(prompt)),
    unit="tokens",
    tolerance=0.25,
    prediction=True,
    because=lambda count: f"{len(prompt)} characters, and {len(prompt) / count:.1f} of them a token.",
)

# %%
# Compiled the first time, which takes a while; then it is found again.
runner = workbench.load(model, backend="auto" if model.startswith("demo") else "mlir")

# %% [markdown]
# ## Text to tokens
# A model reads token ids, not letters. Point at a token to see its bytes. On the right each byte of the same text is a
# token: more tokens mean more steps. Type another text, with an umlaut or an emoji.

# %%
widgets.TokenView(prompt, runner, beside="bytes")

# %% [markdown]
# ## Prefill, then decode
# The runner emits events as they happen. `prefilled` is the prompt, all its tokens in one step; the same step already
# samples the first token. After that each step computes one token, because each token depends on the ones before it.

# %%
events = list(runner.stream(prompt, max_tokens=6, temperature=0, logprobs=3))
for event in events:
    print(f"{1000 * (event.time - events[0].time):7.1f} ms  {event.kind:<9}  {event.text!r}")

# %% [markdown]
# A step does not compute the whole text again: keys and values of all earlier tokens are in the KV cache (see
# `03_kv_cache`). Each line below shows the tokens that a step computed and the context that its queries saw.

# %%
for step in (event for event in events if event.kind == "stepped"):
    computed, seen = step.prefill_tokens + step.decode_tokens, step.context_tokens
    print(f"step {step.step}, {step.phase:<7}: {computed} computed, {seen} seen, {step.kv_bytes:,} bytes of cache")

# %% [markdown]
# **Question**: The answer shall have 20 tokens. How many steps does the runner take for this prompt?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: [e.kind for e in runner.stream(prompt, max_tokens=20, ignore_eos=True)].count("stepped"),
    unit="steps",
    tolerance=0,
    hint="How many tokens does the step that computes the prompt sample, and how many each step after it?",
    because="The step that computes the prompt samples the first token already; each further token is one step.",
)

# %% [markdown]
# ## From probabilities to a token
# The model computes a probability for each token of the vocabulary. Here the temperature is 0, so the most probable
# token is taken; `05_sampling` shows other ways to sample.

# %%
first = next(event for event in events if event.kind == "decoded")
{runner.tokenizer.decode([token]): f"{math.exp(logprob):.1%}" for token, logprob in first.top_logprobs}

# %% [markdown]
# ## Tokens to text
# Only whole characters are shown: a token may be a part of a character, and then its text is shown with the next token.

# %%
ids = runner.tokenizer.encode("# 👋")
for count, token in enumerate(ids, 1):
    print(token, runner.tokenizer.token_bytes(token), repr(runner.tokenizer.decode(ids[:count])))

# %% [markdown]
# **Question**: How many bytes do the tokens of '# 👋' have together?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: sum(len(runner.tokenizer.token_bytes(token)) for token in ids),
    unit="bytes",
    tolerance=0,
    hint="The tokens lose nothing of the text. In UTF-8 an ASCII letter is one byte.",
    because="Two ASCII characters of one byte each and an emoji of four: tokens are pieces of the text's bytes.",
)

# %% [markdown]
# ## All of it, live
# Press Run. The thicker a token's underline, the less probable it was; point at a token to see the alternatives. Below
# are all settings of one request: model, cache, attention, kernels, schedule, speculation and sampling.
#
# Sampling settings apply at once; other settings create a new runner. Settings of measurements are not shown: workload,
# rounds, variants, sweeps, the judge, simulated machines.
#
# Each run has a new seed, so the text differs; untick this to see the effect of another setting. Stop works at any
# time, also while a cell waits, and so does the kernel's stop button. "Copy as Python" copies a script that makes the
# same tokens, with these settings and this seed.

# %%
play = widgets.Playground(runner, prompt)
play

# %%
play.run()
play.wait()

# %% [markdown]
# ## Try
# - `temperature` 0, then 1.5: which tokens were probable, and where does the text go wrong?
# - `executor`, `uncached`: with the same seed the same tokens, without the KV cache. Watch TPOT.
# - `cache`, `format` int8 and int4: how many bytes does the KV cache take now, and when does the text change?
# - `speculate`, `prompt_lookup` on a text that repeats itself: fewer steps than tokens.
#
# To read: `workbench/engine/runner.py` (the code of one step), `workbench/prompt/tokenization/detokenize.py`,
# `workbench/trace/events.py`.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Next: [Prefill and decode](02_prefill_and_decode.py)
