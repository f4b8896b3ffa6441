# %% [markdown]
# # The key-value cache
#
# Decode reads the keys and values of every earlier token. The KV cache stores them, and grows with every token and
# every sequence. This notebook counts its bytes, by formula and in the tensors.
#
# - **Questions**: What is in the KV cache, how large is it, what does quantizing cost?
# - **Afterwards you can**: compute the bytes of a cache from a model's shape; read a map of pages; weigh a format's
#   bytes against what it changes.
# - **Minutes**: 30

# %%
import workbench
from workbench import widgets

# %% [markdown]
# **Guess first**: how many bytes does one token take in the cache of the demo model?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: runner.store.bytes_per_token,
    unit="bytes",
    tolerance=0.5,
    prediction=True,
    because="The formula below says why.",
)

# %%
runner = workbench.load("demo")  # compiled the first time, which takes a while; then it is found again
spec = runner.model.spec
spec

# %% [markdown]
# ## The formula
# A token has a key and a value in every layer, for every KV head. The cell compares the formula with the allocated
# bytes of the store, divided by the number of tokens that fit (its null page included).

# %%
layers, attention = len(spec.layers), spec.layers[0].attention
by_formula = 2 * layers * attention.num_kv_heads * attention.head_dim * runner.model.dtype.itemsize
room = sum(pages + 1 for pages in runner.store.num_pages) * runner.store.page_size
print(
    f"2 x {layers} layers x {attention.num_kv_heads} KV heads x {attention.head_dim} head_dim "
    f"x {runner.model.dtype.itemsize} bytes"
)
print(f"= {by_formula:,} bytes a token; allocated: {runner.store.bytes / room:,.0f}")

# %%
llama = workbench.named_shape("llama-3.1-8b")  # 32 layers, 8 KV heads, head_dim 128

# %% [markdown]
# **Question**: Llama 3.1 8B has 32 layers, 8 KV heads and head_dim 128. What does a token take in bfloat16?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 2 * sum(layer.attention.cache_values_per_token for layer in llama.layers) / 1024,
    unit="KiB",
    hint="A key and a value, in every layer, for every KV head: the formula above with other numbers.",
    because="2 × 32 × 8 × 128 numbers of 2 bytes.",
)

# %% [markdown]
# ## Pages
# The cache is allocated in pages, so that sequences of any length share one pool. A page is allocated for its first
# token, and all pages of a sequence are freed at its end. The map listens to the runner: run the cell below it, which
# ends at the fullest step, then move the slider through the steps.

# %%
pages = widgets.PageMap(runner)
pages

# %%
texts = ["def f(x):\n" * copies for copies in (2, 10, 30)]
events = list(runner.stream(texts, max_tokens=40, ignore_eos=True))
pages.step = pages.fullest()
pages.keep()

# %%
for step in [event for event in events if event.kind == "stepped"][::8]:
    print(f"{step.context_tokens:4} tokens: {step.pages_used} pages, {step.kv_bytes:9,} bytes")

# %% [markdown]
# ## Formats
# Older tokens can be quantized: 8 or 4 bits instead of 16 for each number, with a scale for each group of numbers; the
# newest tokens stay in full precision (the residual window). How many bytes does this save, and how much does it change
# the model? The same text is computed with each cache. `kl_mean` is the distance between the distributions of the next
# token and those with the dense cache, in nats; `same_top` is how often both have the same most probable token.

# %%
from workbench import ForcedText, ReferenceLogits, compare_memory, measure_divergence

text = "\n".join(f"def f{n}(x):\n    return x * {n} + 1\n" for n in range(30))
ids = tuple(runner.tokenizer.encode(text))[:400]
plain = workbench.load("demo", backend="eager")  # one backend for all, so that nothing but the cache differs
dense = ReferenceLogits.compute(plain, [ForcedText(ids, first_scored=200, num_prompt_tokens=392)])
caches = {name: workbench.load("demo", backend="eager", cache=name) for name in ("int8", "int4", "fp8")}
for name, other in caches.items():
    found = measure_divergence(other, dense).summary(len(text.encode()))
    print(f"{name}: {other.store.bytes_per_token:5,.0f} bytes a token", end=", ")
    print(f"KL {found['kl_mean']:.2e} nats, same first choice {found['same_top']:.1%}")

# %% [markdown]
# **Question**: An INT4 number has a quarter of a bfloat16's bits. What percentage of a dense token's bytes does an INT4
# token take here?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 100 * caches["int4"].store.bytes_per_token / plain.store.bytes_per_token,
    unit="%",
    tolerance=0.02,
    hint="The table above has the bytes of both. Each group of numbers has its scale besides.",
    because="More than 25 %: scales and zero points are stored for each group.",
)

# %% [markdown]
# ## The text itself
# Does the generated text change, and at which token? Both sides get the same prompt and the same seed, one after the
# other. The first token that differs is marked, with its probability on both sides, and the line below shows whether
# the distributions already differed before it. Choose other pairs in the list, such as "with and without speculation":
# their texts should be equal.
#
# The times of one run are noisy. The experiment at the end writes a rule into a file, repeats the pair on held-out
# prompts, and computes a verdict.

# %%
pair = widgets.Playground(plain, beside="INT4 KV cache")
pair

# %%
pair.run()
pair.wait()

# %% [markdown]
# ## The calculator
# The calculator compares predicted and measured bytes of the INT4 cache that was just loaded. Change a setting, or
# choose a bar to see its formula.

# %%
widgets.MemoryCalculator(runner=caches["int4"])

# %%
for each in compare_memory(caches["int4"]):
    print(f"{each.name}: predicted {each.predicted:,}, measured {each.measured:,} {each.note}")

# %% [markdown]
# The calculator also takes a model that does not fit on this machine, by name or by the path of a `config.json`. How
# many sequences of 8,192 tokens does an H100 serve, and how many more with an INT8 cache? How long may a single
# sequence be?

# %%
widgets.MemoryCalculator("shape:llama-3.1-8b", context=8192, batch=16, memory="h100")

# %% [markdown]
# ## Try
# - Compare `shape:llama-2-13b` with `shape:llama-3.1-8b`: which factor of the formula makes the difference?
# - `attention={"sliding_window": 128, "num_sink_tokens": 4}` in `workbench.load`: what happens to the pages above?
#   [04_attention_variants](04_attention_variants.py) explains it.
# - `cache={"format": "int4", "residual_length": 128}`: more tokens stay in full precision. Is the text nearer to the
#   dense cache's?
#
# The same figures in a terminal: `workbench model memory shape:llama-3.1-8b --context 8192 --batch 16 --memory 80GB`.
# Read on in `workbench/kv_cache/format.py`, `workbench/kv_cache/store.py`, `workbench/model/memory.py`.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Prefill and decode](02_prefill_and_decode.py) ·
# Next: [Attention variants](04_attention_variants.py)
