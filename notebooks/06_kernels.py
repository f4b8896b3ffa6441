# %% [markdown]
# # Kernels: what was fused, from Python to MLIR to machine code
#
# Each operator of the model is specified once, in a few readable lines. Four backends compute it: `eager` runs it as
# written, `inductor` and `mlir` compile it for this processor, `triton` for a GPU. This notebook examines one operator,
# the sum and norm between the two halves of a block (`01_one_request` shows where it is used).
#
# - **Questions**: What did the compiler fuse, and what runs in the end?
# - **Afterwards you can**: follow an operation from Python to machine code; read what was fused; compare backends with
#   what the machine can do.
# - **Minutes**: 20

# %%
import workbench
from workbench import widgets

# %% [markdown]
# **Guess first**: an operation adds two arrays and norms the sum. As one loop it reads two arrays and writes two. How
# many does it read and write if the sum is a separate loop?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 2 + 1 + 1 + 1,
    unit="arrays",
    tolerance=0,
    prediction=True,
    because="The sum reads two and writes one; the norm reads that one again, and writes one.",
)

# %%
view = widgets.KernelView("add_rms_norm", backend="eager")
view

# %% [markdown]
# Each box is a stage of the compiler, with the number of its lines; choose a box, or move between them with the arrow
# keys. A backend compiles when you choose it: `mlir` and `triton` now, `inductor` with its graph below. Triton's code
# is compiled ahead of time to PTX, so you need no GPU to read it.

# %%
view.make("mlir", "triton")
view.backend = "mlir"
view.keep()

# %% [markdown]
# ## What was fused
#
# Inductor's scheduler reports the operations that became one loop; in every stage they have the same letter. An
# operation with two letters belongs to two loops, as `mean` does here: one loop sums, the other divides. Follow a
# letter from `post_grad` through `fused_ir` to `cpp`.

# %%
fused = widgets.KernelView("add_rms_norm", backend="inductor", backends=("eager", "inductor"), stage="post_grad")
fused

# %%
fused.stage = "fusion"
print(fused.text)

# %% [markdown]
# ## Where is this operator in the model?
#
# The graph shows a step of the whole model: its operators in order, with the FLOPs and bytes of each, and a bracket
# around the operators that one compiled function computes. Compare a prefill with a decode, and *as written* with *as
# it runs*.

# %%
graph = widgets.ModelGraph(workbench.load(), kind="decode", tokens=256)
graph

# %% [markdown]
# With the modules as written, each operator can be timed separately: which operators take far longer than their FLOPs
# and bytes explain?

# %%
graph.functions = "as written"
graph.measure()
graph.keep()

# %% [markdown]
# ## How fast are the backends?
#
# The times are measured now, on this machine, in a separate process: the median and its spread. The button *time the
# backends* also measures the best rates of memory and cores: how near is each backend to its limit?

# %%
timed = widgets.KernelView("add_rms_norm", case="16x576 float32", backends=("eager", "mlir"))
timed.measure(seconds=0.1, ceilings=False)
timed

# %%
timed.wait()
timed.keep()

# %%
rows, columns = map(int, timed.case.split()[0].split("x"))

# %% [markdown]
# **Question**: One loop reads two arrays of 16 × 576 float32 and writes two, the sum and the norm. What does it move at
# least?

# %% jupyter={"source_hidden": true}
widgets.Exercise(
    answer=lambda: 4 * rows * columns * 4 / 1024,
    unit="KiB",
    hint="Four arrays, four bytes a number. The weights of the norm are one row: leave them out.",
    because="Unfused it would be five: the sum is read once more.",
)

# %% [markdown]
# Such times depend on the machine's other load, which the line under the table reports.
# `workbench kernels bench --out experiments/records` stores them with all data for later comparisons.
#
# ## Try
#
# - Choose `512x2048 float32` above and press *time the backends*: how much do the backends differ now?
# - Choose the operator `gated_silu`, then `paged_attention`: which of them becomes one loop?
# - `workbench kernels show decode_step --backend mlir` shows a whole step of the model as one function.
#
# Where to read: `compiled_kernels/rms_norm/` (one folder an operator: `api.py` has the specification),
# `compiled_kernels/mlir/schedule.py` (how loops are tiled and vectorized), `compiled_kernels/inductor_code/watch.py`
# (how the compiler is observed). `07_many_requests` continues with the runner, which calls these kernels.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Sampling](05_sampling.py) ·
# Next: [Many requests](07_many_requests.py)
