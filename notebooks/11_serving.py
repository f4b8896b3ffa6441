# %% [markdown]
# # Serving: the engine behind an API
#
# Chat clients, agents, load generators and evaluation tools speak one of two protocols, OpenAI's or Anthropic's. A
# server that speaks both makes every variant of attention, cache or sampling testable by all of them. Here a runner is
# served from a cell, clients ask it, and what happens behind the API can be watched.
#
# - **Questions**: How do clients use it, and what happens behind the API?
# - **Afterwards you can**: serve a runner to OpenAI's and Anthropic's clients; read TTFT and TPOT of many; set limits
#   and prices.
# - **Minutes**: 30

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: twelve clients ask at once, and four sequences fit a step. The slowest wait for a first token (p99)
# is how many times the median one?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: now.ttft.p99 / now.ttft.p50,
    unit="times",
    tolerance=0.3,
    prediction=True,
    because="The last four wait for eight others to end. What a queue adds shows in the slow end of TTFT first.",
)

# %%
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai

import workbench

MODEL = workbench.default_model()  # smollm2 where it is at hand, else a tiny one
# Compiling pays for the larger model: it takes a while the first time, then what was compiled is found again.
BACKEND = "eager" if MODEL.startswith("demo") else "mlir"
runner = workbench.load(MODEL, backend=BACKEND, prefix="radix", page_size=16, max_num_seqs=4)
server = workbench.serve(runner)
server

# %% [markdown]
# The server runs in a thread and listens on this machine alone. The runner stays usable in cells: both put requests
# into the same queue. Below is what the server does; the picture fills as the next cells run. Click on a request for
# its tokens and for the scheduler's reasons, or go there with the arrow keys and press Enter.

# %%
view = widgets.ServerView(server)
view

# %% [markdown]
# ## A client
# Any client of OpenAI's protocol works, with this address for its own. The answer has the usage that a vendor would
# bill.

# %%
client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")


def ask(*messages, model=MODEL, **settings):
    """Return the answer to messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    talk = [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
    return client.chat.completions.create(model=model, messages=talk, **settings)


answer = ask("What is the capital of France?", temperature=0, max_tokens=32)
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens} prompt tokens, {answer.usage.completion_tokens} of the answer, {answer.id}")

# %% [markdown]
# ## Many clients
# Twelve clients ask at once, and four sequences fit a step. So eight wait: their dashed bars above end where another
# request does. Waiting is a part of the time to the first token (TTFT), and no part of the time per output token
# (TPOT).


# %%
def tell(number):
    """Ask for an answer of some length."""
    length = 16 + 8 * (number % 4)
    return ask(f"What is {number} * 12?", temperature=0.8, max_tokens=length, extra_body={"ignore_eos": True})


with ThreadPoolExecutor(12) as clients:
    answers = list(clients.map(tell, range(12)))
view.keep()
now = server.log.snapshot(traces=True)
for name, cuts in {"TTFT": now.ttft, "TPOT": now.tpot}.items():
    print(f"{name} of {cuts.count} requests: p50 {1e3 * cuts.p50:.0f} ms, p99 {1e3 * cuts.p99:.0f} ms")

# %% [markdown]
# ## One request, token by token
# A snapshot is a value: it can be saved, sent and shown again, as here. Chosen is the last request. The bars are the
# times between its tokens. Those in red took twice the median or more: other requests' prompts were computed in the
# same steps.

# %%
kept = widgets.ServerView(now)
kept.chosen = max(answers, key=lambda each: each.created).id
kept

# %% [markdown]
# The server keeps a trace of each call too, for the client who made it: the phases, who brought which tokens of the
# prompt, every token with its step, what each step was predicted to cost.

# %%
trace = client.get(f"/traces/{answers[0].id}", cast_to=object)
for span in trace["spans"]:
    print(f"{span['name']:<8} {1e3 * span['start']:>7.1f} to {1e3 * span['end']:>7.1f} ms")
for segment in trace["prompts"][0]["segments"]:
    print(f"{segment['tokens']:>3} tokens of the prompt from {segment['name']}")
print("scheduler:", trace["decisions"][-1]["reason"])

# %% [markdown]
# ## A client that leaves
# A stream that its client closes is cancelled: within a step its pages are free, for others or for the prefix cache.
# What was generated until then stands in the accounts.

# %%
stream = ask("Tell me a story.", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
for number, _ in enumerate(stream):
    if number == 12:
        break
print("while it streams:", server.log.snapshot().pages)
stream.close()
while server.log.snapshot().requests["decode"]:
    time.sleep(0.01)
left = server.log.snapshot()
print("after it:        ", left.pages)
print(f"{left.recent[-1].state}, with {left.recent[-1].output_tokens} tokens of 400")

# %% [markdown]
# ## The second turn is cheap here too
# A conversation comes whole with each call, and its beginning is in the prefix cache. The generated tokens are kept by
# their answer: the client sends text, and the server knows which tokens it was.

# %%
question = "How many seconds are 3 weeks and 2 days, and how many minutes? Answer with both numbers."
first = ask(question, temperature=0, max_tokens=40)
second = ask(question, first.choices[0].message.content, "And 4 weeks?", temperature=0, max_tokens=40)
for name, each in {"first": first, "second": second}.items():
    cached = each.usage.prompt_tokens_details.cached_tokens
    print(f"{name:<7} {each.usage.prompt_tokens:>3} prompt tokens, {cached:>3} of them cached")

# %% [markdown]
# ## The other protocol, without a client
# The same model answers Anthropic's Messages, at the same address. A request is plain JSON over HTTP.

# %%
body = {"model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": "What is 7 * 8?"}]}
headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
request = urllib.request.Request(f"{server.url}/v1/messages", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as message:
    print(json.dumps(json.load(message), indent=1))

# %% [markdown]
# ## Limits and money
# A gateway stands before a server: it knows keys, limits, prices, moderation, and answers that it keeps. Here it has no
# keys, so all callers share one limit of three requests a minute, and a budget for the day. The fourth call is refused
# in the words of the protocol, with the time to wait. The view shows both.

# %%
limits = {"each_key": {"requests_per_minute": 3, "tokens_per_minute": 400, "money_per_day": "0.0001"}}
gateway = workbench.Gateway({"limits": limits, "accounting": {"prices": "example-small"}})
with workbench.serve(runner, gate=gateway) as limited:
    watched = widgets.ServerView(limited)
    strict = openai.OpenAI(base_url=f"{limited.url}/v1", api_key="any", max_retries=0)
    for number in range(4):
        try:
            talk = [{"role": "user", "content": f"What is {number} + 1?"}]
            found = strict.chat.completions.create(model=MODEL, messages=talk, max_tokens=16)
            print(found.choices[0].message.content)
        except openai.RateLimitError as error:
            print(f"{error.status_code}: {error.body['message']}")
watched

# %% [markdown]
# ## A variant is one line away
# A second runner, with a cache of four bits, is served beside the first one, under a name of its own. Evaluation tools
# ask for the log-probabilities of a text (`echo` and `logprobs`), so they can score any variant that a setting
# describes. Here is that score, in nats a token, on a text that both read.

# %%
int4 = {"format": "int4", "quant_group": 16, "residual_length": 16}
quantized = workbench.load(MODEL, backend=BACKEND, page_size=16, cache=int4)
text = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write(path, text):\n" * 3
with workbench.serve({"dense": runner, "int4": quantized}) as both:
    scored = openai.OpenAI(base_url=f"{both.url}/v1", api_key="any")
    for model in ("dense", "int4"):
        found = scored.completions.create(model=model, prompt=text, echo=True, logprobs=1, max_tokens=1)
        values = found.choices[0].logprobs.token_logprobs[1:-1]
        print(f"{model:<6} {-sum(values) / len(values):.4f} nats a token over {len(values)} tokens")

# %% [markdown]
# ## Stop
# Streams may end first, and the runner stays as it is.

# %%
view.keep()
server.stop()
server

# %% [markdown]
# **Question**: Sixteen calls come at once, each for an answer of 20 tokens. Beside prefill, about how many steps is the
# last one done after?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 16 / runner.scheduler.limits.max_num_seqs * 20,
    unit="steps",
    tolerance=0.1,
    hint="The runner was loaded with max_num_seqs=4.",
    because="Four groups one after another, each for 20 steps: waiting is three quarters of the last one's time.",
)

# %% [markdown]
# ## Try
# - Serve with `max_num_seqs=12`, and ask the twelve questions again. What becomes of TTFT, and what of TPOT?
# - Watch the server from a terminal while the cells run: `workbench top URL`, with the address that `server` shows.
# - Close the tab's connection in the middle of a long prompt instead of a stream.
#
# To read: `workbench/serve/call_run.py`, `workbench/serve/watch/serving_log.py` and
# `workbench/serve/dialects/openai/chat.py`. `workbench serve` is the same from a terminal.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Conversations](10_conversations.py) ·
# Next: [A fleet](12_fleet.py)
