"""Build a speculator from its settings."""

from __future__ import annotations

from collections.abc import Callable

from workbench.engine.draft_model import ModelDrafts
from workbench.engine.drafts import Drafts, Proposer
from workbench.engine.executors import MlirExecutor
from workbench.engine.lookup import LookupDrafts
from workbench.engine.mlir_drafts import DraftSteps
from workbench.engine.runner import Runner
from workbench.engine.speculation import DraftModel, PromptLookup
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenizer import Tokenizer


def drafts_of(
    settings: PromptLookup | DraftModel,
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    lane: str,
    load: Callable[..., Runner],
) -> Drafts:
    """Build a speculator for a model of `spec` on backend `backend`; `load` loads a draft model like the target.

    Raises:
        WorkbenchError: for a draft model with other tokens than the target's.
    """
    proposer: Proposer
    if isinstance(settings, PromptLookup):
        proposer = LookupDrafts(settings.min_ngram, settings.max_ngram)
    else:
        draft = load(settings.model, dtype=settings.dtype, lane=settings.lane or lane)
        check_same_tokens(settings.model, draft.tokenizer, draft.model.spec, tokenizer, spec)
        proposer = ModelDrafts(
            draft.model.spec, draft.executor, draft.cache.holdings, draft.scheduler.limits.chunk,
            coupled=settings.accept == "match", confidence_threshold=settings.confidence_threshold,
            several=_several(draft, settings),
        )  # fmt: skip
    return Drafts(proposer, settings.num_speculative_tokens, spec.context, settings.length, settings.accept)


def _several(draft: Runner, settings: DraftModel) -> DraftSteps | None:
    """The call for several tokens, where the draft decodes by compiled steps."""
    if not isinstance(draft.executor, MlirExecutor) or DraftSteps.problem(draft.model, draft.store):
        return None
    most, least = settings.num_speculative_tokens + 1, settings.confidence_threshold
    return DraftSteps(draft.model, draft.store, most, least)


def check_same_tokens(
    name: str, draft: Tokenizer | None, draft_spec: ModelSpec, target: Tokenizer | None, spec: ModelSpec
) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's (WorkbenchError)."""
    refused = f"speculate.model {name}: a draft must have the target's tokenizer"
    if draft_spec.vocab != spec.vocab:
        raise WorkbenchError(f"{refused}; its vocabulary has {draft_spec.vocab} tokens, {spec.name}'s {spec.vocab}")
    if draft is None or target is None:
        if draft is not target:
            raise WorkbenchError(f"{refused}; {'it' if draft is None else spec.name} has none at all")
        return
    for token in range(max(draft.vocab, target.vocab)):
        ours, theirs = (each.spelling(token) if token < each.vocab else "" for each in (target, draft))
        if ours != theirs:
            raise WorkbenchError(f"{refused}; token {token} is {theirs!r} there and {ours!r} in {spec.name}")
