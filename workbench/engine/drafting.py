"""Build a speculator from its settings."""

from __future__ import annotations

from collections.abc import Callable

from workbench.engine.draft_model import DraftModelProposer
from workbench.engine.drafts import Speculator, Proposer
from workbench.engine.executors import MlirExecutor
from workbench.engine.lookup import PromptLookupProposer
from workbench.engine.mlir_drafts import CompiledDraftSteps
from workbench.engine.runner import Runner
from workbench.engine.speculation import DraftModel, PromptLookup
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenizer import Tokenizer


def build_speculator(
    settings: PromptLookup | DraftModel,
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    backend: str,
    load: Callable[..., Runner],
) -> Speculator:
    """Build a speculator for a model of `spec` on backend `backend`; `load` loads a draft model like the target.

    Raises:
        WorkbenchError: for a draft model with other tokens than the target's.
    """
    proposer: Proposer
    if isinstance(settings, PromptLookup):
        proposer = PromptLookupProposer(settings.min_ngram, settings.max_ngram)
    else:
        draft = load(settings.model, dtype=settings.dtype, backend=settings.backend or backend)
        check_same_vocabulary(settings.model, draft.tokenizer, draft.model.spec, tokenizer, spec)
        proposer = DraftModelProposer(
            draft.model.spec, draft.executor, draft.kv_cache.manager, draft.scheduler.limits.max_prefill_tokens,
            common_random_numbers=settings.accept == "match", confidence_threshold=settings.confidence_threshold,
            multi_step=_multi_step(draft, settings),
        )  # fmt: skip
    return Speculator(proposer, settings.num_speculative_tokens, spec.max_position_embeddings, settings.length, settings.accept)


def _multi_step(draft: Runner, settings: DraftModel) -> CompiledDraftSteps | None:
    """The call for several tokens, where the draft decodes by compiled steps."""
    if not isinstance(draft.executor, MlirExecutor) or CompiledDraftSteps.unsupported_reason(draft.model, draft.store):
        return None
    max_draft_tokens, least = settings.num_speculative_tokens + 1, settings.confidence_threshold
    return CompiledDraftSteps(draft.model, draft.store, max_draft_tokens, least)


def check_same_vocabulary(
    name: str, draft: Tokenizer | None, draft_spec: ModelSpec, target: Tokenizer | None, spec: ModelSpec
) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's (WorkbenchError)."""
    refused = f"speculate.model {name}: a draft must have the target's tokenizer"
    if draft_spec.vocab_size != spec.vocab_size:
        raise WorkbenchError(f"{refused}; its vocabulary has {draft_spec.vocab_size} tokens, {spec.name}'s {spec.vocab_size}")
    if draft is None or target is None:
        if draft is not target:
            raise WorkbenchError(f"{refused}; {'it' if draft is None else spec.name} has none at all")
        return
    for token in range(max(draft.vocab_size, target.vocab_size)):
        ours, theirs = (each.id_to_token(token) if token < each.vocab_size else "" for each in (target, draft))
        if ours != theirs:
            raise WorkbenchError(f"{refused}; token {token} is {theirs!r} there and {ours!r} in {spec.name}")
