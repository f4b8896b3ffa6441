"""Load a proposer of the user's own, and tell it of the model that verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from workbench.custom import build_custom, check_arity, resolve_path
from workbench.errors import WorkbenchError, explain
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.speculative.config import CustomProposer, DraftModel
from workbench.speculative.proposers import Proposer


@dataclass(frozen=True)
class SpeculationTarget:
    """The model that verifies, as a proposer of the user's own is told of it: its class is built with this value first.

    `settings` are those of `speculate`; `tokenizer` is None for a model of random weights.
    """

    spec: ModelSpec
    tokenizer: Tokenizer | None
    settings: CustomProposer
    build_draft_model: Callable[[DraftModel], Proposer]

    def draft_model(self, **settings: Any) -> Proposer:
        """Load a draft model, with the settings of `{kind: draft}`, and return a proposer of its tokens.

        Raises:
            WorkbenchError: for settings that are unknown or wrong, and for a model that is not there.
        """
        shared = {"num_speculative_tokens": self.settings.num_speculative_tokens, "accept": self.settings.accept}
        try:
            parsed = DraftModel.model_validate({**shared, **settings})
        except ValidationError as error:
            raise explain(error, f"speculate {self.settings.path}: draft_model", DraftModel) from None
        return self.build_draft_model(parsed)


def load_proposer(settings: CustomProposer, target: SpeculationTarget) -> Proposer:
    """Build the proposer that `settings` name. Raises WorkbenchError where it cannot be one."""
    name = f"speculate {settings.path}"
    found = resolve_path(settings.path)
    if not isinstance(found, type):
        raise WorkbenchError(f"{name}: must be a class with propose(sequences, counts) and forget(request_id)")
    made = build_custom(found, settings.arguments, name, target)
    for verb, shape, count in (("propose", "(sequences, counts)", 2), ("forget", "(request_id)", 1)):
        if not callable(getattr(made, verb, None)):
            raise WorkbenchError(f"{name}: has no {verb}{shape}; derive it from workbench.parts.Proposer")
        check_arity(getattr(made, verb), count, f"{name}.{verb}", shape)
    top_k = getattr(made, "observed_top_k", None)
    if (top_k is None) is callable(getattr(made, "observe", None)):
        raise WorkbenchError(f"{name}: a proposer that observes has both observed_top_k and observe(verifications)")
    if top_k is not None and (not isinstance(top_k, int) or not 0 <= top_k <= target.spec.vocab_size):
        raise WorkbenchError(
            f"{name}: observed_top_k must be within 0 and the vocabulary's {target.spec.vocab_size}, not {top_k!r}"
        )
    return cast(Proposer, made)
