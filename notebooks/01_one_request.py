# %% [markdown]
# # One request: text to tokens to text
#
# One request goes all the way through a model here, and every step on the way can be seen: the text is cut into tokens,
# the prompt is computed in one step (prefill), then each step computes one token more (decode), and the tokens become
# text again. The model is SmolLM2, which speaks English, where it is at hand (`workbench model get smollm2` fetches
# it); else a tiny one of the workbench's own that continues Python.
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
# **Guess first**: into how many tokens is the text of `prompt` cut? (It can be checked when the cells have run.)

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
# A model knows no letters, only the numbers of its vocabulary. Point at a piece to see its bytes. On the right the same
# text one byte at a time: more tokens mean more steps. Type something else, with an umlaut or an emoji.

# %%
widgets.TokenView(prompt, runner, beside="bytes")

# %% [markdown]
# ## Prefill, then decode
# The runner emits events as they happen. `prefilled` is the prompt, all its tokens in one step; the same step
# already samples the first token. From then on each step computes one, because each depends on those before it.

# %%
events = list(runner.stream(prompt, max_tokens=6, temperature=0, logprobs=3))
for event in events:
    print(f"{1000 * (event.time - events[0].time):7.1f} ms  {event.kind:<9}  {event.text!r}")

# %% [markdown]
# A step does not compute the whole text again: keys and values of all earlier tokens are in the KV cache (see
# `03_kv_cache`). Each line has the tokens that a step computed and the context that its queries saw.

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
# The model gives a probability for each token of the vocabulary. Here temperature is 0, so the most probable one is
# taken; `05_sampling` shows other ways to sample.

# %%
first = next(event for event in events if event.kind == "decoded")
{runner.tokenizer.decode([token]): f"{math.exp(logprob):.1%}" for token, logprob in first.top_logprobs}

# %% [markdown]
# ## Tokens to text
# Text is given out only when it is whole characters: a token may be half of one, and then its text comes with the next.

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
# Press Run. The heavier a token's underline, the less probable it was; point at one to see what else there was. Below
# are all settings that matter to one request: of the model, its cache, attention and kernels, of schedule, speculation
# and sampling. (Settings of a measurement are left out: workload, rounds, variants, sweeps, the judge, simulated
# machines.) Those of sampling apply at once, others create a new runner. Each run has a new seed, so the text differs;
# untick that to see what another setting changes. Stop works at any time, also while a cell waits, and so does the
# kernel's stop button. "Copy as Python" gives the script that makes the tokens of the settings shown, seed included.

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
# To read: `workbench/engine/runner.py` (a step is one sentence), `workbench/prompt/tokenization/detokenize.py`,
# `workbench/trace/events.py`.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Next: [Prefill and decode](02_prefill_and_decode.py)
