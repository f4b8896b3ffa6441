# %% [markdown]
# # Serving: the engine behind an API
#
# Chat clients, agents, load generators and evaluation tools use one of two protocols, OpenAI's or Anthropic's. The
# workbench's server speaks both, so all these tools can test any variant of attention, cache or sampling. In this
# notebook a cell serves a runner, clients call it, and widgets show the work behind the API. The server needs the extra
# `serve` (`pip install 'inference-workbench[serve]'`; `make lab` installs it), and the client is OpenAI's own
# (`pip install openai`).
#
# - **Questions**: How do clients use it, and what happens behind the API?
# - **Afterwards you can**: serve a runner to OpenAI's and Anthropic's clients; read TTFT and TPOT of many; set limits
#   and prices.
# - **Minutes**: 30

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: twelve clients ask at once, and a step has room for four sequences. The slowest wait for a first
# token (p99) is how many times as long as the median wait?

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

import workbench

MODEL = workbench.default_model()  # smollm2 where it is at hand, else a tiny one
# Compiling pays for the larger model: it takes a while the first time, then what was compiled is found again.
BACKEND = "eager" if MODEL.startswith("demo") else "mlir"
runner = workbench.load(MODEL, backend=BACKEND, prefix="radix", page_size=16, max_num_seqs=4)
server = workbench.serve(runner)
server

# %% [markdown]
# The server runs in a thread and accepts connections only from this machine. The runner stays usable in cells: cells
# and server put requests into the same queue. The widget below shows the server's work while the next cells run. Select
# a request by a click, or by the arrow keys and Enter, to see its tokens and the scheduler's reasons.

# %%
view = widgets.ServerView(server)
view

# %% [markdown]
# ## A client
# Any client of OpenAI's protocol works with the server's address as its base URL. The answer has the usage that a
# vendor would bill.

# %%
import openai

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
# Twelve clients ask at once, and a step has room for four sequences. So eight requests wait: their dashed bars above
# end when another request ends. The wait is a part of the time to first token (TTFT), but not of the time per output
# token (TPOT).


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
# A snapshot is a value that can be saved, sent and shown again, as in this cell. The last request is chosen. The bars
# are the times between its tokens. Red bars took at least twice the median, because prompts of other requests were
# computed in the same steps.

# %%
kept = widgets.ServerView(now)
kept.chosen = max(answers, key=lambda each: each.created).id
kept

# %% [markdown]
# The server also keeps a trace of each call, for the client who made it: its phases, the source of each prompt token,
# every token with its step, and the predicted work of each step.

# %%
trace = client.get(f"/traces/{answers[0].id}", cast_to=object)
for span in trace["spans"]:
    print(f"{span['name']:<8} {1e3 * span['start']:>7.1f} to {1e3 * span['end']:>7.1f} ms")
for segment in trace["prompts"][0]["segments"]:
    print(f"{segment['tokens']:>3} tokens of the prompt from {segment['name']}")
print("scheduler:", trace["decisions"][-1]["reason"])

# %% [markdown]
# ## A client that disconnects
# When a client closes its stream, the request is cancelled: within one step its pages are free, for other requests or
# for the prefix cache. The tokens generated so far are in the accounts.

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
# A client sends the whole conversation with each call, and its beginning is in the prefix cache. The server stores the
# generated tokens of each answer, so it finds them again when the client sends the text.

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
# A gateway checks each call before the server: it has keys, limits, prices, moderation, and a cache of answers. Here it
# has no keys, so all callers share one limit of three requests a minute, and a budget for the day. The fourth call is
# refused in the words of the protocol, with the time to wait. The view shows both.

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
# The server lets streams finish first, and the runner stays usable.

# %%
view.keep()
server.stop()
server

# %% [markdown]
# **Question**: Sixteen calls come at once, each for an answer of 20 tokens. After about how many steps is the last one
# done, if prefill is not counted?

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
# - Serve with `max_num_seqs=12`, and ask the twelve questions again. How do TTFT and TPOT change?
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
