# %% [markdown]
# # Speculation: several tokens a step
#
# A decode step reads all weights to compute one token. If a cheap proposer drafts the next few tokens, one step can
# verify all of them. Draft tokens that the model would have chosen are accepted, and the step gives one further token.
# The output is the same as without drafts; only the time changes, and not always for the better.
#
# - **Questions**: When do draft tokens pay?
# - **Afterwards you can**: read which draft tokens were accepted; predict a speed-up from acceptance and cost; say why
#   the output stays the same.
# - **Minutes**: 25

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: drafts are copied from the earlier text, which repeats itself here. How many tokens does a
# verification give on average?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: view.figures["mean_acceptance_length"],
    unit="tokens",
    tolerance=0.25,
    prediction=True,
    because="The accepted draft tokens, and one more of the model's own each time.",
)

# %%
import workbench

PROMPT = "def read_file(path):\n    with open(path) as f:\n        return f.read()\n\ndef write_file(path, text):\n"
runner = workbench.load("demo", backend="eager")

# %% [markdown]
# ## Drafts from the text itself
# Prompt lookup finds an earlier place with the same last few tokens, and proposes the tokens that followed there. Code
# often repeats itself. Drag `check`, the number of the verification: underlined tokens (✓) were accepted, struck tokens
# (✗) rejected. A boxed token is the model's own, in place of a rejected one (→) or after the accepted ones (+).

# %%
view = widgets.SpeculationView(runner, PROMPT, speculate="prompt_lookup", max_tokens=48).wait()
view

# %% [markdown]
# Plain greedy decoding gives the same tokens. (In bfloat16 a step of another shape may decide a near tie differently;
# then the view names the first token that differs.)

# %%
print("the same tokens:", view.token_ids == view.plain_token_ids)

# %% [markdown]
# ## Drafts by a small model
# The demo model comes with a draft model that has the same tokenizer. It can draft at any place, but each draft token
# costs a step of the draft model. The diamonds show acceptance by position if every draft token were accepted with the
# same probability: real acceptances come in runs.

# %%
pair = widgets.SpeculationView(runner, PROMPT, speculate="draft", max_tokens=48).wait()
pair

# %% [markdown]
# ## When is speculation faster?
# If each draft token is accepted with probability a, a verification of k draft tokens gives (1 - a^(k + 1)) / (1 - a)
# tokens on average (Leviathan et al., 2023). It takes c times as long as a plain step, so the speed-up is the number of
# tokens divided by c.
#
# Drafts without cost need only a low acceptance. A draft model must be much smaller than its target, and steps must be
# bound by memory, so that a verification costs little.
#
# The cell measures these figures now, on your machine.

# %%
for kind in ("prompt_lookup", "draft"):
    for count in (1, 4):
        drafts = {"kind": kind, "num_speculative_tokens": count}
        each = widgets.SpeculationView(runner, PROMPT, speculate=drafts, max_tokens=24, rounds=1).wait()
        speeds, length = each.speeds, each.figures["mean_acceptance_length"]
        print(f"{kind:<14}k = {count}: {length:.2f} tokens a verification,", end=" ")
        print(f"which takes {speeds.cost:.2f} plain steps;", end=" ")
        print(f"predicted {speeds.predicted:.2f} times as fast, measured {speeds.measured:.2f}")

# %% [markdown]
# ## With sampling
# Sampled tokens can be verified too: a draft token is accepted with probability min(1, p / q), else one is sampled from
# the rest of p. Every token has the same distribution as without drafts, although other random numbers draw it. The
# higher the temperature, the fewer draft tokens are accepted.

# %%
few = {"max_tokens": 48, "rounds": 0}
for temperature in (0.7, 1.3):
    each = widgets.SpeculationView(runner, PROMPT, speculate="draft", temperature=temperature, **few).wait()
    print(f"temperature {temperature}: {each.figures['draft_acceptance_rate']:.0%} of the draft tokens are accepted")

# %% [markdown]
# ## A recorded run
# A record contains its verifications, and so do the events of any stream.

# %%
lookup = workbench.load("demo", backend="eager", speculate="prompt_lookup")
prompts = [PROMPT, "def a(x):\n    return x + 1\n\ndef b("]
events = list(lookup.stream(prompts, temperature=0, max_tokens=32))
widgets.SpeculationView(events, tokenizer=lookup.tokenizer)

# %%
accepted, drafted, cost = 0.8, 4, 1.5

# %% [markdown]
# **Question**: Each of 4 draft tokens is accepted with probability 0.8, and a verification takes 1.5 plain steps. How
# many times as fast is that?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: (1 - accepted ** (drafted + 1)) / (1 - accepted) / cost,
    unit="times",
    tolerance=0.02,
    hint="First the tokens a verification, by the formula above; then divide by its cost.",
    because="3.36 tokens a verification, in the time of 1.5.",
)

# %% [markdown]
# ## Try
# - Load the runner with `backend="auto"`: a plain step is shorter there, so a verification costs more of them.
# - Use a prompt of prose, or one without repetitions: how many drafts of prompt lookup are accepted then?
# - `speculate={"kind": "prompt_lookup", "num_speculative_tokens": 8, "length": "adaptive"}`: drafts grow after each
#   acceptance.
# - `accept: match` accepts only draft tokens that would have been sampled anyway: seeded output is the same, token for
#   token. How much lower is the acceptance?
#
# Read: `workbench/sampling/verify.py` (the rule), `workbench/speculative/proposers.py` and `draft_model.py`.
# `experiments/speculation.yaml` measures the load above which speculation is slower.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Many requests](07_many_requests.py) ·
# Next: [Experiments](09_experiments.py)
