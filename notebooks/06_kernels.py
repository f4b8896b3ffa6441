# %% [markdown]
# # Kernels: what was fused, from Python to MLIR to machine code
#
# An operator of the model is specified once, in a few readable lines. Four backends carry it out: `eager` runs it
# as written, `inductor` and `mlir` compile it for this processor, `triton` for a GPU. This notebook
# takes one operator apart: the sum and norm between the two halves of a block (see `01_one_request` for where it is
# used).
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
# many does it read and write when the sum is a loop of its own?

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
# Every box is a stage, with the number of its lines; choose one, or go from one to the next with the arrow keys. The
# backends are compiled when they are chosen: `mlir` and `triton` now, `inductor` with its graph below. Triton's code is
# compiled ahead of time, down to PTX, so no GPU is needed to read it.

# %%
view.make("mlir", "triton")
view.backend = "mlir"
view.keep()

# %% [markdown]
# ## What was fused
#
# Inductor's scheduler reports which operations became one loop: the same letter marks them in every stage. Two letters:
# the compiler counts the operation to both loops, as `mean` here, which is summed in one and divided in the other.
# Follow a letter from `post_grad` over `fused_ir` to `cpp`.

# %%
fused = widgets.KernelView("add_rms_norm", backend="inductor", backends=("eager", "inductor"), stage="post_grad")
fused

# %%
fused.stage = "fusion"
print(fused.text)

# %% [markdown]
# ## Where is this operator in the model?
#
# A step of the whole model: its operators in order with what each must compute and move, and a bracket around those
# that one compiled function carries out. Choose a prefill beside a decode, and *as written* beside *as it runs*.

# %%
graph = widgets.ModelGraph(workbench.load(), "decode", tokens=256)
graph

# %% [markdown]
# As the modules are written, each operator can be timed by itself: which ones take far longer than their FLOPs and
# bytes explain?

# %%
graph.functions = "as written"
graph.measure()
graph.keep()

# %% [markdown]
# ## How fast are the backends?
#
# Measured now, on this machine, in a process of its own: the median and its spread. The button *time the backends* also
# measures what memory can deliver and the cores can compute: how near is a backend to the limit that binds it?

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
# Such figures depend on the machine's other load: the line under the table reports it. To keep them, with everything
# that is needed to compare them later: `workbench kernels bench --out experiments/records`.
#
# ## Try
#
# - Choose `512x2048 float32` above and press *time the backends*: from where on do the backends differ?
# - Choose the operator `gated_silu`, then `paged_attention`: which of them becomes one loop?
# - `workbench kernels show decode_step --backend mlir` shows a whole step of the model as one function.
#
# Where to read: `compiled_kernels/rms_norm/` (one folder an operator: `api.py` has the specification),
# `compiled_kernels/mlir/schedule.py` (how loops are tiled and vectorized), `compiled_kernels/inductor_code/watch.py`
# (how the compiler is watched). `07_many_requests` goes on with the runner, which calls these kernels.

# %% [markdown] tags=["foot"]
# ---
# [Start page](00_start.py) ·
# Before: [Sampling](05_sampling.py) ·
# Next: [Many requests](07_many_requests.py)
