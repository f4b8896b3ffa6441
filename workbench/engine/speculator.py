"""Build the speculator that a config describes, with its draft model."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from compiled_kernels import Backend
from workbench.engine.cache import KVCache
from workbench.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from workbench.engine.core import EngineCore
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.shared_layers import share_layers
from workbench.errors import WorkbenchError
from workbench.executors.capabilities import unsupported
from workbench.executors.requirements import Requirements
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.speculative.config import CustomProposer, DraftModel, NoSpeculation, proposes_trees
from workbench.speculative.custom import SpeculationTarget, load_proposer, load_stop_rule
from workbench.speculative.draft_model import CompiledDraftSteps, DraftModelProposer
from workbench.speculative.proposers import PromptLookupProposer, Proposer, Speculator


class DraftRunner(Protocol):
    """The parts of a runner that draft proposers need."""

    config: EngineConfig
    model: Transformer
    tokenizer: Tokenizer | None
    kv_cache: KVCache
    core: EngineCore


class LoadDraft(Protocol):
    """A function that loads the runner of a draft model, from a config or around a model that is already in memory."""

    def __call__(self, config: EngineConfig, model: LoadedModel | None = None, /) -> DraftRunner: ...


def build_speculator(config: EngineConfig, target: LoadedModel, load: LoadDraft) -> Speculator | None:
    """Build the speculator that `config.speculate` describes, for the model `target`; None without speculation.

    Args:
        load: loads the runner of a draft model.

    Raises:
        WorkbenchError: for a draft model with another vocabulary than the target's, and for a user-defined proposer
            that cannot be built.
    """
    settings = config.speculate
    if isinstance(settings, NoSpeculation):
        return None
    spec, name = target.transformer.spec, f"speculate {settings.kind}"
    build_draft_model = partial(_build_draft_model, config, target, load)
    proposer: Proposer
    if isinstance(settings, DraftModel):
        proposer = build_draft_model(settings)
    elif isinstance(settings, CustomProposer):
        name = f"speculate {settings.path}"
        if settings.tree and (why := _why_no_trees(config, target)):
            raise WorkbenchError(f"{name}: tree: {why}")
        proposer = load_proposer(settings, SpeculationTarget(spec, target.tokenizer, settings, build_draft_model))
    else:
        proposer = PromptLookupProposer(settings.min_ngram, settings.max_ngram)
    return Speculator(
        proposer, settings.num_speculative_tokens, spec.max_position_embeddings, settings.length, settings.accept,
        spec.vocab_size, name, proposes_trees(settings),
    )  # fmt: skip


def _why_no_trees(config: EngineConfig, target: LoadedModel) -> str | None:
    """Return why the target's backends or cache cannot verify draft trees; None if they can."""
    model = target.transformer
    backends = target.backends
    requirements = Requirements(
        model.spec, cache=model.cache_shapes(config.cache), device=model.device.type, ranks=config.parallel.tensor,
        tree_drafts=True,
    )  # fmt: skip
    for backend in {model.backend} if backends is None else {backends.decode, backends.blocks, backends.attention}:
        if refusal := unsupported(backend, requirements):
            return f"backend {str(backend)!r} {refusal}"
    return None


def _build_draft_model(
    config: EngineConfig, target: LoadedModel, load: LoadDraft, settings: DraftModel
) -> DraftModelProposer:
    shared = share_layers(target, settings.layers) if settings.is_target else None
    draft = load(draft_config(config, settings), shared)
    if draft.kv_cache.manager.recurrent_groups:
        raise WorkbenchError(
            f"speculate.model {settings.model}: a draft model with recurrent states is not supported; its own "
            "states do not go back when drafts are rejected"
        )
    spec = target.transformer.spec
    check_same_vocabulary(settings.model, draft.tokenizer, draft.model.spec, target.tokenizer, spec)
    return DraftModelProposer(
        draft.model.spec, draft.core.executor, draft.kv_cache.manager, draft.config.schedule.max_chunk_tokens,
        common_random_numbers=settings.accept == "match", confidence_threshold=settings.confidence_threshold,
        multi_step=None if settings.stop is not None else _multi_step(draft, settings),
        stop=None if settings.stop is None else load_stop_rule(settings.stop, spec.vocab_size),
    )  # fmt: skip


def draft_config(config: EngineConfig, settings: DraftModel) -> EngineConfig:
    """Return the config of a draft model, with the device, number of sequences and page size of the target's
    `config`.
    """
    schedule, device, seed = config.schedule, config.model.device, config.model.seed
    model_config = ModelConfig(name=settings.model, dtype=settings.dtype, device=device, seed=seed)
    return EngineConfig(
        model=config.model if settings.is_target else model_config,
        backend=settings.backend or config.backend,
        compile=config.compile,
        cache=CacheConfig(page_size=config.cache.page_size),
        schedule=SchedulerConfig(
            max_num_seqs=schedule.max_num_seqs, max_num_batched_tokens=schedule.max_num_batched_tokens
        ),
    )


def _multi_step(draft: DraftRunner, settings: DraftModel) -> CompiledDraftSteps | None:
    """Return a function that drafts several tokens at once if the draft model decodes by compiled steps; otherwise
    None.
    """
    store = draft.kv_cache.store
    requirements = Requirements.from_model(draft.model, store)
    if not draft.core.backends.has_step or unsupported(Backend.MLIR, requirements, "drafts"):
        return None
    return CompiledDraftSteps(draft.model, store, settings.num_speculative_tokens + 1, settings.confidence_threshold)


def check_same_vocabulary(
    name: str, draft: Tokenizer | None, draft_spec: ModelSpec, target: Tokenizer | None, spec: ModelSpec
) -> None:
    """Raise WorkbenchError if the draft model's token ids stand for other tokens than the target's ids do."""
    refused = f"speculate.model {name}: a draft must have the target's tokenizer"
    if draft_spec.vocab_size != spec.vocab_size:
        raise WorkbenchError(
            f"{refused}; its vocabulary has {draft_spec.vocab_size} tokens, {spec.name}'s {spec.vocab_size}"
        )
    if draft is None or target is None:
        if draft is not target:
            raise WorkbenchError(f"{refused}; {'the draft' if draft is None else spec.name} has no tokenizer")
        return
    for token in range(max(draft.vocab_size, target.vocab_size)):
        entries = [each.id_to_token(token) if token < each.vocab_size else "" for each in (target, draft)]
        if entries[0] != entries[1]:
            raise WorkbenchError(f"{refused}; token {token} is {entries[1]!r}, but {entries[0]!r} in {spec.name}")
