# %% [markdown]
# # A fleet: more than one engine
#
# One engine is one process with one model. If it is too slow or too small, there are three solutions: several engines
# behind one front (replicas), one engine for prompts and another for decodes (pools), or one model split among
# processes (ranks). In this notebook all three run on this machine, with a small model. They are faster only on
# machines with more cores or cards, but you can watch how they work.
#
# - **Questions**: What changes with more than one engine?
# - **Afterwards you can**: say where a router sends a request and why; predict the bytes of a handover; tell replicas,
#   pools and ranks apart.
# - **Minutes**: 35

# %%
from workbench import widgets

# %% [markdown]
# **Guess first**: an engine hands a computed prompt over to another engine, page by page. A page has 16 tokens of the
# demo model. How large is a page?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 16 * size / 1024,
    unit="KiB",
    tolerance=0.3,
    prediction=True,
    because="A token's keys and values in all layers, 16 times. Notebook 03_kv_cache has the formula.",
)

# %%
import os
import signal
import time

import workbench
from workbench import PrefillDecodePools, Request, SamplingParameters

config = workbench.EngineConfig.build("demo", backend="eager", prefix="radix", page_size=16, pages=512)
cluster = workbench.Cluster(config, replicas=2)
cluster

# %% [markdown]
# Each replica is a process with its own weights, scheduler and pages. The front has the tokenizer, the requests, and a
# router. The widget below shows the fleet while the next cells run: a large box is the front or a replica, and a small
# box in it is a sample with its tokens so far. The bar shows pages: in use, idle (kept only by the prefix cache), free.

# %%
view = widgets.FleetView(cluster)
view

# %% [markdown]
# ## Where a request goes, and why
# The router `prefix` sends a request to the replica that has the fewest tokens to compute before the first token of the
# answer: its pending prompts, and the uncached part of the new prompt. For the first prompt both replicas are equal.
# Two prompts with the same beginning go to the same replica, because its cache has most of their tokens. For the last
# prompt both replicas are equal again.

# %%
PROGRAM = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n" * 3
PROMPTS = [PROGRAM + "def write(", PROGRAM + "def append(", PROGRAM + "def lines(", "class Stack:\n    def push("]


def routings(handle):
    """Wait for requests and return where each was sent."""
    handle.wait()
    return [event for event in handle.events if event.kind == "routed"]


for prompt in PROMPTS:
    (sent,) = routings(cluster.submit(prompt, max_tokens=16, temperature=0))
    print(f"{prompt[-24:]!r:<28} to replica {sent.replica}: {sent.reason}")
    for option in sent.options:
        print(f"{'':31}{option}")

# %% [markdown]
# Load counts as well: if the replica with the prefix has many pending tokens, another one is chosen. Here sixteen such
# requests arrive at once.

# %%
sent = routings(cluster.submit([PROGRAM + f"def part_{n}(" for n in range(16)], max_tokens=24, temperature=0))
print({number: sum(each.replica == number for each in sent) for number in cluster.replicas})
view.keep()

# %% [markdown]
# ## A replica dies during an answer
# The cell reads a long answer token by token. After twenty tokens it kills the process of the replica, as if the
# machine had failed. The front still has the prompt and the streamed tokens: another replica computes both as one
# prompt, and continues with the next token. No token is lost, and none is sent twice.

# %%
ask = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
text, killed = "", 0
for event in cluster.stream(PROMPTS[0], **ask):
    text += event.text
    if event.kind == "decoded" and event.index == 20 and not killed:
        killed = event.replica
        os.kill(cluster.replicas[killed].process_id, signal.SIGKILL)
    if event.kind == "moved":
        tokens = event.generated_tokens
        print(f"moved from replica {event.source} to {event.replica} after {tokens} tokens: {event.reason}")
unharmed = "".join(event.text for event in cluster.stream(PROMPTS[0], **ask))
print("the same text as of an answer that nothing happened to:", text == unharmed)

# %% [markdown]
# A new replica starts in the place of the dead one, with a number of its own and an empty cache. The view below has the
# same events up to now. Choose the moved request to see its path and the router's data.

# %%
moved = next(event for event in view.history if event.kind == "moved")
after = widgets.FleetView([event for event in view.history if event.time <= moved.time])
after.chosen = moved.request_id
after

# %%
while len(cluster.replicas) < 2:
    time.sleep(0.1)
print("replicas now:", *cluster.replicas)
cluster.accounts[""]

# %%
view.keep()
encode = cluster.tokenizer.encode
cluster.close()

# %% [markdown]
# ## Prefill and decode apart
# A prompt takes a long step, and other answers on the same engine wait for it. Two pools avoid this: one engine
# computes the prompt and the first token, the other engine the rest. Between them the keys and values are transferred
# page by page. On one machine both engines can map the same memory, so that only page numbers are sent; here bytes are
# sent, as between machines.

# %%
pools = PrefillDecodePools(config, transfer="gloo")
apart = widgets.FleetView(pools)
apart

# %%
sampling = SamplingParameters(max_tokens=32, temperature=0, ignore_eos=True)
requests = [Request(f"r{number}", tuple(encode(text)), sampling) for number, text in enumerate(PROMPTS)]
for event in pools.stream(requests):
    if event.kind == "handed_over":
        print(f"{event.request_id} from {event.source} to {event.replica}: {event.pages} pages, {event.bytes:,} bytes")
apart.keep()
pools.close()

# %% [markdown]
# The number of transferred pages and bytes follows from the prompt's tokens in whole pages and the bytes of a token in
# the cache. The cell prints prediction and measurement:

# %%
size = 2 * sum(layer.attention.cache_values_per_token for layer in cluster.model.spec.layers)  # of bfloat16
handed = {event.request_id: event for event in apart.history if event.kind == "handed_over"}
for request in requests:
    pages = -(-len(request.prompt_ids) // 16)
    fact = handed[request.request_id]
    print(
        f"{request.request_id}: predicted {pages} pages, {16 * pages * size:,} bytes; sent {fact.pages}, {fact.bytes:,}"
    )

# %% [markdown]
# The transfer of these pages takes milliseconds. A view of past events has a slider for the time: move it (also with
# the arrow keys) to see pages in transfer. It begins at the first transfer.

# %%
first = handed["r0"]
slow = widgets.FleetView(apart.history)
slow.show_at(first.time - first.seconds / 2 - apart.history[0].time)
slow.chosen = "r0"
slow

# %% [markdown]
# ## The same picture of a fleet that is only simulated
# The simulator has the same scheduler, routers and events, with predicted times in place of weights. So the view can
# also show a fleet of H100s with a model of 8 billion parameters: two instances for prompts, one for decodes. Here the
# pages of a prompt have a hundred megabytes or more, and their transfer takes milliseconds.

# %%
recorder = workbench.Recorder()
executor = {"kind": "simulated", "hardware": "h100", "instances": 2, "decode": {"instances": 1}}
traffic = {"kind": "traffic", "lengths": {"kind": "azure"}, "arrivals": {"kind": "poisson", "rate": 30}, "requests": 60}
schedule = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
settings = {"schedule": schedule, "executor": executor, "workload": traffic, "question": "Where are the pages?"}
question = workbench.Experiment.model_validate({"model": {"name": "shape:llama-3.1-8b"}, **settings})
workbench.fleet_for(question, recorder.record).run()
handed = [event for event in recorder.events if event.kind == "handed_over"]
longest = max(handed, key=lambda event: event.seconds)
simulated = widgets.FleetView(recorder)
simulated.show_at(longest.time - longest.seconds / 2 - recorder.events[0].time)
simulated.chosen = longest.request_id
simulated

# %% [markdown]
# ## One model among two processes
# A model that is too large for one card is split: each rank has some heads and some columns of every layer. After
# attention and after the feed-forward the ranks add their parts. So a token needs two exchanges in each layer, one for
# the embedding, and one for the logits of the other half of the vocabulary. The cell prints prediction and measurement
# for a decode step:

# %%
ranks = workbench.load("demo", tensor=2, backend="eager")
spec = ranks.model.spec
sums = 2 * len(spec.layers) + 1
predicted = sums * spec.hidden_size * 2 + spec.vocab_size // 2 * 4  # bfloat16, and logits in float32
before, steps = 0, []
for event in ranks.stream("def add(a, b):", max_tokens=9, temperature=0, ignore_eos=True):
    if event.kind == "stepped":
        sent = ranks.model.ranks.traffic.bytes
        steps.append(sent - before)
        before = sent
print(f"predicted: {predicted:,} bytes a rank and decode step; measured: {min(steps[1:]):,} to {max(steps[1:]):,}")
ranks.close()

# %% [markdown]
# **Question**: Llama 3.1 8B has 32 layers. How many exchanges does a decode step take when ranks share it?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 2 * len(workbench.named_shape("llama-3.1-8b").layers) + 2,
    unit="exchanges",
    tolerance=0,
    hint="Two a layer, one for the embedding, one for the logits.",
    because="However short they are, they follow one another: their latency adds up.",
)

# %% [markdown]
# The exchanges are many and small, so their number and latency decide. On a machine without spare cores ranks only make
# a model slower. `workbench simulate azure --model shape:llama-3.1-70b --set executor.gpus=4` predicts ranks on cards,
# and docs/scale.md the fleet that a million users need.
#
# ## Try
# - Start the cluster with `router="round_robin"`, and send the prompts again. How many of their tokens are cached now?
#   `Finished` events have `cached_tokens`.
# - Kill a replica while it has eight requests. In which order do they continue, and on which replica?
# - Give the pools `transfer="shared"`. How long does a handover take then, and why are its bytes 0?
# - At which rate of the simulated traffic does the engine for decodes have more requests than it can run? What changes
#   with two of them and one for prompts?
#
# To read: `workbench/simulate/routers.py`, `workbench/cluster/front.py`, `workbench/cluster/apart/pool_requests.py` and
# `workbench/widgets/fleet/data.py`. `workbench serve demo --replicas 2` is the first half from a terminal, with the
# extra `serve`: `pip install 'inference-workbench[serve]'`.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Serving](11_serving.py) ·
# Next: [A zoo](13_zoo.py)
