"""Load a user-defined proposer or stop rule, and describe the target model to a proposer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from workbench.custom import build_custom, check_arity, load_custom, resolve_path
from workbench.errors import WorkbenchError, explain
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import CustomPart
from workbench.speculative.config import CustomProposer, DraftModel
from workbench.speculative.draft_model import StopRule
from workbench.speculative.proposers import Proposer


@dataclass(frozen=True)
class SpeculationTarget:
    """The target model as a user-defined proposer sees it: the first argument of the proposer's constructor.

    `settings` are those of `speculate`; `tokenizer` is None for a model of random weights.
    """

    spec: ModelSpec
    tokenizer: Tokenizer | None
    settings: CustomProposer
    build_draft_model: Callable[[DraftModel], Proposer]

    def draft_model(self, **settings: Any) -> Proposer:
        """Load a draft model with the settings of `{kind: draft}`, and return its proposer.

        Raises:
            WorkbenchError: for unknown or invalid settings, and for a missing model.
        """
        shared = {"num_speculative_tokens": self.settings.num_speculative_tokens, "accept": self.settings.accept}
        try:
            parsed = DraftModel.model_validate({**shared, **settings})
        except ValidationError as error:
            raise explain(error, f"speculate {self.settings.path}: draft_model", DraftModel) from None
        return self.build_draft_model(parsed)


def load_proposer(settings: CustomProposer, target: SpeculationTarget) -> Proposer:
    """Build the proposer that `settings` name; raises WorkbenchError if it is not a proposer."""
    name = f"speculate {settings.path}"
    found = resolve_path(settings.path)
    if not isinstance(found, type):
        raise WorkbenchError(f"{name}: must be a class with propose(sequences, counts) and forget(request_id)")
    made = build_custom(found, settings.arguments, name, target)
    for verb, shape, count in (("propose", "(sequences, counts)", 2), ("forget", "(request_id)", 1)):
        if not callable(getattr(made, verb, None)):
            raise WorkbenchError(f"{name}: has no {verb}{shape}; derive it from workbench.parts.Proposer")
        check_arity(getattr(made, verb), count, f"{name}.{verb}", shape)
    check_observer(made, name, target.spec.vocab_size)
    return cast(Proposer, made)


def load_stop_rule(part: CustomPart, vocab_size: int) -> StopRule:
    """Build the stop rule that `part` names; raises WorkbenchError if it is not callable."""
    made, name = load_custom(part), f"speculate.stop {part.path}"
    if not callable(made):
        raise WorkbenchError(f"{name}: not callable; it needs __call__(self, probabilities, request_ids)")
    check_arity(made, 2, name, "(probabilities, request_ids)")
    check_observer(made, name, vocab_size)
    return cast(StopRule, made)


def check_observer(made: Any, name: str, vocab_size: int) -> None:
    """Raise WorkbenchError if an observer lacks one of its two members, `observed_top_k` and `observe`."""
    top_k = getattr(made, "observed_top_k", None)
    if (top_k is None) is callable(getattr(made, "observe", None)):
        raise WorkbenchError(f"{name}: needs both observed_top_k and observe(verifications), or neither")
    if top_k is not None and (not isinstance(top_k, int) or not 0 <= top_k <= vocab_size):
        raise WorkbenchError(
            f"{name}: observed_top_k must be from 0 to the vocabulary's {vocab_size}, not {top_k!r}"
        )
