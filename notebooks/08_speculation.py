# %% [markdown]
# # Speculation: several tokens a step
#
# A decode step reads all weights to give one token. Where something cheap guesses the next few, one step can check all
# of them: those that are what the model would have chosen stand, and one more token comes besides. The output is the
# same as without guesses; only the time changes, and not always for the better.

# %%
import workbench
from workbench import widgets

PROMPT = "def read_file(path):\n    with open(path) as f:\n        return f.read()\n\ndef write_file(path, text):\n"
runner = workbench.load("demo", backend="eager")

# %% [markdown]
# ## Guesses from the text itself
# Prompt lookup proposes what followed the last few tokens where they stood before. Code repeats itself. Drag `check`:
# underlined tokens (✓) stand, struck ones (✗) fell, a box is what the model gave instead (→) or besides (+).

# %%
view = widgets.SpeculationView(runner, PROMPT, speculate="prompt_lookup", max_tokens=48).wait()
view

# %% [markdown]
# Plain greedy decoding gives the same tokens. (In bfloat16 a near tie may fall otherwise in a step of another shape;
# then the view says from which token on.)

# %%
print("the same tokens:", view.token_ids == view.plain_token_ids)

# %% [markdown]
# ## Guesses by a small model
# The demo model comes with a draft of the same tokenizer. It guesses anywhere, and each guess costs a step of its own.
# The diamonds show acceptance by position if every guess stood with the same chance: real ones come in runs.

# %%
pair = widgets.SpeculationView(runner, PROMPT, speculate="draft", max_tokens=48).wait()
pair

# %% [markdown]
# ## When does it pay?
# A check of k guesses gives (1 - a^(k + 1)) / (1 - a) tokens on average where each stands with chance a (Leviathan et
# al., 2023), and takes c times as long as a plain step: the speed-up is the one by the other. Guesses that are free
# pay early; a draft model must be much smaller than what it drafts for, and steps must be bound by memory, so that
# checking costs little. These are measured here, now, on the machine that you use.

# %%
for kind in ("prompt_lookup", "draft"):
    for count in (1, 4):
        guesses = {"kind": kind, "num_speculative_tokens": count}
        each = widgets.SpeculationView(runner, PROMPT, speculate=guesses, max_tokens=24, rounds=1).wait()
        speeds, length = each.speeds, each.figures["mean_acceptance_length"]
        print(
            f"{kind:<14}k = {count}: {length:.2f} tokens a check, which takes {speeds.cost:.2f} plain steps;", end=" "
        )
        print(f"predicted {speeds.predicted:.2f} times as fast, measured {speeds.measured:.2f}")

# %% [markdown]
# ## With sampling
# Drawn tokens can be checked too: a guess stands with probability min(1, p / q), else one is drawn from what is left of
# p. Every token has the distribution it has without guesses, though not the same number draws it. The hotter, the less
# stands.

# %%
for heat in (0.7, 1.3):
    each = widgets.SpeculationView(runner, PROMPT, speculate="draft", temperature=heat, max_tokens=48, rounds=0).wait()
    print(f"temperature {heat}: {each.figures['draft_acceptance_rate']:.0%} of the guesses stand")

# %% [markdown]
# ## A run that was
# A record holds its checks. Events of any stream do too.

# %%
lookup = workbench.load("demo", backend="eager", speculate="prompt_lookup")
prompts = [PROMPT, "def a(x):\n    return x + 1\n\ndef b("]
events = list(lookup.stream(prompts, temperature=0, max_tokens=32))
widgets.SpeculationView(events, tokenizer=lookup.tokenizer)

# %% [markdown]
# ## Try
# - Load the runner with `backend="auto"`: a plain step is shorter there, so checks cost more of them.
# - A prompt of prose, or one that repeats nothing: what is left of prompt lookup?
# - `speculate={"kind": "prompt_lookup", "num_speculative_tokens": 8, "length": "adaptive"}`: who has luck guesses more.
# - `accept: match` lets only those guesses stand that would have been drawn anyway: seeded output is the same, token
#   for token. What does it cost in acceptance?
#
# Read: `workbench/sampling/verify.py` (the rule), `workbench/speculative/proposers.py`, `draft_model.py` and `lookup.py`. The
# load from which on it loses is measured by `experiments/speculation.yaml`.
