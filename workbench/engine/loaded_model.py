"""Load the model of a config: a folder, a GGUF file, the name of a workbench model or a downloaded one, or `shape:NAME`
with random weights.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from compiled_kernels.backends import AUTO_BACKEND
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX
from workbench.engine.config import DTYPES, EngineConfig, ModelConfig, parse_dtype
from workbench.errors import WorkbenchError, nearest
from workbench.executors.autotune import autotune_backend, usual_seconds
from workbench.executors.capabilities import Role, unsupported
from workbench.executors.layout import choose_weight_layout
from workbench.executors.reference import CacheLayout
from workbench.executors.requirements import Requirements
from workbench.executors.select import Backends, select_backends
from workbench.files import note_own
from workbench.kv_cache.eviction import parse_eviction, policy_spread
from workbench.model import shapes
from workbench.model.attention_config import AttentionConfig
from workbench.model.formats.checkpoint import Checkpoint
from workbench.model.formats.gguf.file import GGUFFile
from workbench.model.formats.open import is_quantized, open_checkpoint, open_gguf_files, read_config
from workbench.model.formats.texts import absent_token_ids, open_chat_template, open_tokenizer
from workbench.model.hf import families
from workbench.model.hf.generation import read_sampling_defaults
from workbench.model.hf.kept import Refuses, bytes_of_kept, cost_of_widening, kept_matrices, stored_format
from workbench.model.hf.weights import Keep, keep_all, random_weights, read_weights, wanted_parameters
from workbench.model.memory import cache_shapes
from workbench.model.parameters import StoredParameter
from workbench.model.quantized import WeightFormat, matrix_format, quantize
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.model.variants import change_attention, change_spec
from workbench.models.known import KNOWN
from workbench.models.store import fetched_model, place_of
from workbench.progress import report_if_slow, to_stderr
from workbench.prompt.own_template import own_template
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.speculative.config import proposes_trees
from workbench.tensor_parallel.cut import check_ranks, cut_state
from workbench.tensor_parallel.processes import OtherRanks, open_ranks, transport_problem
from workbench.tensor_parallel.ranks import Ranks
from workbench.tensor_parallel.transformer import TensorParallelTransformer

LOAD, RANK_MODULE = "load", "workbench.engine.rank_process"
RANK_SECTIONS = {"model", "backend", "attention", "cache", "parallel"}  # settings that ranks other than 0 need
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo"
BUNDLED_MODELS = {
    "demo": DEMO_FOLDER / "target",
    "demo-draft": DEMO_FOLDER / "draft",
    "demo-chat": DEMO_FOLDER / "chat",
}
SHAPE_PREFIX = "shape:"
LOADING_AGAIN = 10.0  # seconds between progress lines of a long load


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with the backends that were selected for it; if there are none, the model's own backend
    computes all steps.
    """

    transformer: Transformer
    tokenizer: Tokenizer | None = None  # None for shapes, which only take token ids
    backends: Backends | None = None
    folder: Path | None = None  # the folder with the chat template, if there is one
    processes: OtherRanks | None = None  # processes of the other ranks; `model` is then rank 0's share

    def close(self) -> None:
        """End the processes of other ranks, if there are any."""
        if self.processes is not None:
            self.processes.close()

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """Return the template of the model's folder, or the workbench's own if the tokenizer has its control tokens."""
        template = None if self.folder is None else open_chat_template(self.folder)
        return template if template is not None or self.tokenizer is None else own_template(self.tokenizer)

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's authors recommend, which are defaults for requests."""
        return {} if self.folder is None or not self.folder.is_dir() else read_sampling_defaults(self.folder)

    def for_settings(self, before: EngineConfig, config: EngineConfig) -> LoadedModel | None:
        """Return this model for use with `config`, with the same weights in memory; None if it must be loaded again.

        The weights can be shared if `config` differs from `before` (the config it was loaded with) only in cache,
        schedule, speculation and settings outside of the engine. With backends `auto` and mlir the model is loaded
        again: `auto` measures with the cache settings, and mlir lays out weights for them.

        Raises:
            WorkbenchError: for unsupported settings.
        """
        same = ("model", "backend", "compile", "attention", "batch_invariant", "parallel")
        if any(getattr(before, name) != getattr(config, name) for name in same) or config.parallel.tensor > 1:
            return None
        if config.batch_invariant or config.backend not in (Backend.EAGER, Backend.INDUCTOR):
            return None
        return replace(self, backends=check_settings(config))

    @classmethod
    def load(cls, config: EngineConfig, report: Callable[[str], None] = to_stderr) -> LoadedModel:
        """Load `config.model` and select its backends for this machine; `report` receives a line for each slow part.

        Settings are checked before weights are read.

        Raises:
            WorkbenchError: for a missing or unreadable model, and for unsupported settings.
        """
        size = config.parallel.tensor
        if size == 1:
            return cls._load(config, report, None)
        if problem := transport_problem(config.parallel.transport, size):
            raise WorkbenchError(f"parallel.tensor: {problem}")
        source = _source(config.model.name, config.attention, config.model.context)
        check_ranks(source.spec, source.weight_format(config)[0], size)
        select_backends(config.backend, Requirements(source.spec, ranks=size, batch_invariant=config.batch_invariant))
        processes = open_ranks(size, config.parallel.rank_timeout, RANK_MODULE, config.parallel.transport)
        settings = config.engine.model_dump(mode="json", include=RANK_SECTIONS)
        try:
            loaded = processes.ranks.lead(LOAD, settings, lambda: cls._load(config, report, processes.ranks), None)
        except BaseException:
            processes.close()
            raise
        return replace(loaded, processes=processes)

    @classmethod
    def load_rank(cls, config: EngineConfig, ranks: Ranks) -> LoadedModel:
        """Load the part of the model that a rank other than 0 computes, as `load` does for rank 0."""
        return cls._load(config, lambda line: None, ranks)

    @classmethod
    def _load(cls, config: EngineConfig, report: Callable[[str], None], ranks: Ranks | None) -> LoadedModel:
        name = config.model.name
        auto = config.backend == AUTO_BACKEND and not config.batch_invariant and ranks is None
        device, page_size = _device(config.model.device), config.cache.page_size
        if ranks is not None and device.type == "cuda":
            device = torch.device("cuda", ranks.rank % torch.cuda.device_count())
        source = _source(name, config.attention, config.model.context)
        with (
            ThreadPoolExecutor(1) as beside,  # a large vocabulary takes as long to load as the weights
            report_if_slow(f"loading the weights of {name}", report, again=LOADING_AGAIN, share=source.share_read),
        ):
            tokenizer = beside.submit(source.tokenizer)
            format, reasons = source.weight_format(config)
            requirements = _requirements(config, source, format, device, 1 if ranks is None else ranks.size)
            dtype, shapes, cache_dtype = requirements.dtype, requirements.cache, config.cache_dtype(requirements.dtype)
            backends = select_backends(config.backend, requirements)
            if ranks is not None:  # eager modules in every step
                backends = Backends.uniform(backends.blocks, backends.reason, requirements)

            def state(each: Keep = keep_all) -> dict[str, Tensor]:
                return source.state(
                    dtype, config.model.seed, format, reasons, lambda cost: report(f"{name}: {cost}"), each
                )

            # The state dict has no name here, so matrices are freed one by one when they are laid out again.
            if ranks is None:
                model = Transformer.from_state(source.spec, state(), backends.blocks, format, dtype=dtype)
            else:
                share = state(lambda each: cut_state(each, source.spec, ranks.rank, ranks.size))
                model = TensorParallelTransformer.of_rank(source.spec, share, backends.blocks, format, ranks, dtype)
            model.to(device)
        if auto:
            trying = f"trying which backend decodes {name} fastest here: compiled now, then remembered"
            with report_if_slow(trying, report, usual=usual_seconds()):
                backends = autotune_backend(
                    backends, model, page_size, config.compile, cache=config.cache, cache_dtype=cache_dtype
                )
            model.set_backend(backends.blocks)
        with report_if_slow(f"laying out the weights of {name}", report):
            held = CacheLayout(shapes, page_size, cache_dtype)
            backends = choose_weight_layout(model, backends, held, auto=auto, in_place=True)
        if config.compile == "step" and backends.decode is not Backend.INDUCTOR:
            why = f"{backends.reason}; compile: step has no effect, since {backends.decode} decodes"
            backends = replace(backends, reason=why)
        trim_heap()
        if absent := source.absent_token_ids():
            report(f"{name}: {', '.join(absent)}: the vocabulary has no such row; the token is taken as absent")
        return cls(model, tokenizer.result(), backends, source.folder)


def check_settings(config: EngineConfig) -> Backends:
    """Return the backends that `LoadedModel.load` would select, without reading weights or autotuning.

    Raises:
        WorkbenchError: for a missing model, and for settings that the model or this machine does not support.
    """
    source = _source(config.model.name, config.attention, config.model.context)
    format, device = source.weight_format(config)[0], _device(config.model.device)
    return select_backends(config.backend, _requirements(config, source, format, device, config.parallel.tensor))


def _requirements(
    config: EngineConfig, source: _Source, format: WeightFormat, device: torch.device, ranks: int
) -> Requirements:
    """Return the requirements of `config` on a backend. Raises WorkbenchError for impossible weights or cache
    settings.
    """
    page_size = config.cache.page_size
    format.check(source.spec)
    config.cache.check(len(source.spec.layers), page_size)
    dtype = source.dtype(config.model)
    shapes = cache_shapes(source.spec, config.cache)
    for shape in shapes:
        shape.page_formats(page_size)
    policy = parse_eviction(config.cache.evict)
    return Requirements(
        source.spec, dtype, format, shapes, config.cache_dtype(dtype), device.type, config.batch_invariant, ranks,
        tree_drafts=proposes_trees(config.speculate), uneven_heads=policy is not None and policy_spread(policy) > 1,
    )  # fmt: skip


def describe_model(
    name: str, attention: AttentionConfig | None = None, context: int | None = None
) -> tuple[ModelSpec, str]:
    """Return the spec of the model `name` with changed attention and context, and the dtype for `auto`; reads no
    weights.
    """
    source = _source(name, attention or AttentionConfig(), context)
    return source.spec, str(source.stored_dtype).removeprefix("torch.")


def weight_format(
    model: ModelConfig, attention: AttentionConfig | None = None, backend: str = AUTO_BACKEND
) -> WeightFormat:
    """Return the format in which `LoadedModel.load` stores a model's weights for a backend; for a quantized folder this
    reads the scales.
    """
    config = EngineConfig(model=model, attention=attention or AttentionConfig(), backend=backend)
    return _source(model.name, config.attention).weight_format(config)[0]


def weight_storage(model: ModelConfig, backend: str = AUTO_BACKEND) -> dict[str, Any]:
    """Return how a model's weights are stored for a backend: formats of blocks and head, bytes of the quantized
    matrices in memory and in the files, and a line for each reason why a matrix is stored wider than in its file.
    """
    config = EngineConfig(model=model, backend=backend)
    source = _source(model.name, config.attention)
    format, reasons = source.weight_format(config)
    found = {"blocks": str(format), "head": str(format.head), "bytes": 0, "file_bytes": 0, "widened": list[str]()}
    if source.trained is not None:
        files = source.checkpoint, source.wanted, source.trained.tie_word_embeddings
        found["bytes"], found["file_bytes"] = bytes_of_kept(kept_matrices(*files, format).values())
        found["widened"] = cost_of_widening(*files, format, source.dtype(model), reasons)
    return found


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise WorkbenchError(f"device {name!r} does not work here ({reason}); cpu always does") from None


@dataclass(frozen=True)
class _Source:
    """The source of a model: `spec` is the model to build, `trained` the spec of its folder, if there is one."""

    spec: ModelSpec
    attention: AttentionConfig
    folder: Path | None = None
    trained: ModelSpec | None = None
    files: list[GGUFFile] = field(default_factory=list, repr=False)  # open files, if any
    read: list[StoredParameter] = field(default_factory=list, repr=False)  # several threads increase it

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint on disk; None for shapes."""
        assert self.folder is not None
        return open_checkpoint(self.folder)

    @cached_property
    def wanted(self) -> dict[str, StoredParameter]:
        """Return the stored parameters; empty for shapes."""
        return {} if self.trained is None else wanted_parameters(self.checkpoint, self.trained)

    def share_read(self) -> float:
        """Return the fraction of the weights that has been read; quantized files are also scanned once before."""
        if "wanted" not in vars(self):  # another thread, which must not open a file
            return 0.0
        looked_at = list(self.checkpoint.kept) if self.wanted else []
        numbers = sum(math.prod(each.shape) for each in (*looked_at, *self.read))
        whole = sum(math.prod(each.shape) for each in self.wanted.values()) * (2 if looked_at else 1)
        return numbers / whole if whole else 0.0

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        """Return the dtype for `auto`: that of the files, or bfloat16 for shapes."""
        return torch.bfloat16 if self.folder is None else stored_dtype(self.folder)

    def dtype(self, model: ModelConfig) -> torch.dtype:
        """Return the dtype of computation."""
        return self.stored_dtype if model.dtype == "auto" else parse_dtype(model.dtype)

    def weight_format(self, config: EngineConfig) -> tuple[WeightFormat, dict[str, str]]:
        """Return the format of the weights in memory, and by stored tensor the reason why it is widened (see
        `cost_of_widening`). For auto it is the files' format if the backend has products for it.
        """
        settings = config.model
        setting = settings.format
        if settings.weights != "auto":
            return setting, {"": f"weights: {settings.weights} is set"}
        if self.folder is None or self.trained is None or not is_quantized(self.folder):
            return setting, {}
        if not self.attention.is_unchanged:
            return setting, {"": "its attention is changed"}
        format, reasons = stored_format(
            self.checkpoint, self.wanted, self.trained.tie_word_embeddings, *self._refusals(config),
            self.dtype(settings),
        )  # fmt: skip
        format = replace(format, activations=settings.activations)
        group = format.blocks.group if format.blocks.codes == "int4" else settings.weight_group
        if settings.head_weights is not None:
            format = replace(format, head=matrix_format(settings.head_weights, group))
        if settings.expert_weights is not None:
            format = format.with_experts(matrix_format(settings.expert_weights, group))
        return format, reasons

    def _refusals(self, config: EngineConfig) -> tuple[Refuses, str | None]:
        """Return why the decode backend has no product for a format, and why it has none for a fused matrix in several
        formats. Under `auto` a format is kept only if mlir has a product for it: in plain torch, a product with packed
        words is slower than a dense one.
        """
        device, ranks = _device(config.model.device), config.parallel.tensor
        backends = select_backends(config.backend, _requirements(config, self, WeightFormat(), device, ranks))
        quick = config.backend == AUTO_BACKEND and device.type == "cpu" and not backend_problems()[Backend.MLIR]

        def refusal(backend: Backend, role: Role, weights: WeightFormat) -> str | None:
            found = unsupported(backend, Requirements(weights=weights, device=device.type), role)
            return found and f"backend {backend}: {found.reason}"

        several = WeightFormat(own=(("a fused matrix", ((1, INT8_MATRIX), (1, DENSE_MATRIX))),))
        return (
            lambda format: refusal(Backend.MLIR if quick else backends.decode, "blocks", WeightFormat(format)),
            "ranks share a fused matrix in one format"
            if ranks > 1
            else refusal(backends.decode, "step" if backends.has_step else "blocks", several),
        )

    def state(
        self,
        dtype: torch.dtype,
        seed: int,
        format: WeightFormat,
        reasons: Mapping[str, str],
        report: Callable[[str], None],
        keep: Keep = keep_all,
    ) -> dict[str, Tensor]:
        """Return the parameters in `format`, but dense if attention is changed; `report` receives a line on the cost of
        widening quantized matrices of the files. `keep` selects the part of each parameter to keep.
        """
        if self.folder is None or self.trained is None:
            return random_weights(self.spec, dtype, seed, format, keep)
        checkpoint, names, unchanged = self.checkpoint, self.wanted, self.attention.is_unchanged
        kept_as, format = format, format if unchanged else WeightFormat()
        for cost in cost_of_widening(checkpoint, names, self.trained.tie_word_embeddings, format, dtype, reasons):
            report(cost)
        keep_own = keep if unchanged else keep_all
        stored = read_weights(checkpoint, self.trained, names, dtype, format, keep_own, self.read.append)
        checkpoint.kept.clear()  # scales, which use memory
        if unchanged:
            return stored
        changed = change_attention(self.trained, stored, self.attention)[1]
        return changed if keep is keep_all else keep(quantize(changed, self.spec, kept_as))

    def absent_token_ids(self) -> list[str]:
        """Return the special tokens with an id outside of the vocabulary."""
        ends: list[str] = []
        if self.folder is None:
            return ends
        families.read_spec(self.folder, ends)
        return [*ends, *absent_token_ids(self.folder)]

    def tokenizer(self) -> Tokenizer | None:
        return None if self.folder is None else open_tokenizer(self.folder)


def _source(name: str, attention: AttentionConfig, context: int | None = None) -> _Source:
    if name.startswith(SHAPE_PREFIX):
        shape = change_spec(shapes.named_shape(name.removeprefix(SHAPE_PREFIX)), attention)
        return _Source(_with_context(shape, context), attention)
    folder = _folder(name)
    files, trained = open_gguf_files(folder), families.read_spec(folder)
    return _Source(_with_context(change_spec(trained, attention), context), attention, folder, trained, files)


def _with_context(spec: ModelSpec, context: int | None) -> ModelSpec:
    """Return the spec for texts of up to `context` tokens. Raises WorkbenchError for a trained table of positions."""
    if context is None or context == spec.max_position_embeddings:
        return spec
    if spec.learned_positions is not None:
        message = f"{spec.name} has a trained table of {spec.max_position_embeddings} positions"
        raise WorkbenchError(f"model.context {context}: {message}; leave it out")
    return spec.model_copy(update={"max_position_embeddings": context})


def model_folder(name: str) -> Path | None:
    """Return the folder or GGUF file of a model by its name; None for `shape:NAME`."""
    return None if name.startswith(SHAPE_PREFIX) else _folder(name)


def _folder(name: str) -> Path:
    folder = BUNDLED_MODELS.get(name, Path(name))
    is_here = name not in KNOWN and (folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()))
    path = folder if is_here else fetched_model(name)
    if path is None:
        names = [*BUNDLED_MODELS, *KNOWN]
        known = ", ".join([*BUNDLED_MODELS, f"{SHAPE_PREFIX}NAME", "FILE.gguf", *KNOWN])
        hub = "" if place_of(name) is None else f"; `workbench model get {name}` looks on the hub"
        raise WorkbenchError(f"no model {name!r}: not a folder here, nor one of {known}{nearest(name, names) or hub}")
    return note_own(path)


def stored_dtype(path: Path) -> torch.dtype:
    """Return the dtype that a model's config gives, under its new or old key; float32 if it gives none."""
    fields = read_config(path)
    key = "torch_dtype" if fields.get("dtype") is None else "dtype"
    name = fields.get(key)
    if name is None:
        return torch.float32
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
        raise fields.invalid(key, name, f"one of {', '.join(DTYPES)}; or choose what to load as with dtype=...")
    return parse_dtype(name)


def trim_heap() -> None:
    """Return freed memory to the system (glibc's malloc_trim; no effect on other systems).

    Creating or converting weights leaves about a hundred megabytes of freed pieces that decode never uses.
    """
    try:
        release = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return
    release(0)
