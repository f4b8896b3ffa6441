"""Follow an answer through its grammar: the number of allowed tokens at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from workbench.constrained.answer import GrammarAnswer
from workbench.constrained.grammar import GrammarVocabulary
from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError, explain
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.response_format import ResponseFormat


@dataclass(frozen=True)
class GrammarStep:
    """One step of an answer: the accepted token, its text, and the number of allowed tokens."""

    token_id: int
    text: str
    num_allowed: int


@dataclass(frozen=True)
class GrammarTrace(Displayable):
    """The steps of an answer, and the size of the vocabulary."""

    steps: tuple[GrammarStep, ...]
    vocab_size: int

    @property
    def shares(self) -> list[float]:
        """Return the fraction of the vocabulary that is allowed at each step."""
        return [each.num_allowed / self.vocab_size for each in self.steps]

    def _display_table(self) -> Table:
        rows = [
            (repr(step.text), step.num_allowed, f"{100 * share:.3g} %")
            for step, share in zip(self.steps, self.shares, strict=True)
        ]
        return Table("", rows, ("token", "allowed", "of the vocabulary"), left=["token"])


def trace_grammar(
    tokenizer: Tokenizer, response_format: ResponseFormat | Mapping[str, Any], token_ids: Sequence[int]
) -> GrammarTrace:
    """Return the number of tokens that a grammar allowed at each step of an answer.

        form = {"kind": "choices", "choices": ["yes", "no"]}
        workbench.trace_grammar(runner.tokenizer, form, runner.tokenizer.encode("yes"))

    Args:
        tokenizer: the tokenizer of the model.
        response_format: the format of the answer.
        token_ids: the answer's tokens, without its end and without a thought before it.

    Raises:
        WorkbenchError: for an unsupported format, and for a token that it forbids.
    """
    try:
        form = TypeAdapter(ResponseFormat).validate_python(response_format)
    except ValidationError as error:
        raise explain(error, "response_format") from None
    vocabulary = GrammarVocabulary(tokenizer)
    answer = GrammarAnswer(vocabulary.compile(form), (), vocabulary.size)
    banned = answer.banned([token for token in token_ids if 0 <= token < vocabulary.size])
    steps = []
    for place, token in enumerate(token_ids):
        if not 0 <= token < vocabulary.size or banned[place, token]:
            raise WorkbenchError(f"token_ids.{place}: the format does not allow token {token} there")
        text = tokenizer.decode([token], special=True)
        steps.append(GrammarStep(token, text, int((~banned[place]).sum())))
    return GrammarTrace(tuple(steps), vocabulary.size)
