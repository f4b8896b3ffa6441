"""A grammar's trace counts what its mask allows: never the token that breaks it, always the one that was taken."""

from __future__ import annotations

import pytest

import workbench
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(BUNDLED_MODELS["demo"])
    assert found is not None
    return found


def test_every_token_of_a_valid_answer_was_allowed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('{"n": 12}')
    trace = workbench.trace_grammar(tokenizer, {"kind": "json_schema", "json_schema": SCHEMA}, ids)
    assert [each.token_id for each in trace.steps] == ids and trace.vocab_size == tokenizer.vocab_size
    assert all(1 <= each.num_allowed < trace.vocab_size for each in trace.steps)
    assert trace.shares[0] == trace.steps[0].num_allowed / trace.vocab_size and "%" in str(trace)


def test_choices_leave_what_begins_one_of_them(tokenizer: Tokenizer) -> None:
    trace = workbench.trace_grammar(tokenizer, {"kind": "choices", "choices": ["yes", "no"]}, tokenizer.encode("yes"))
    begins = {tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size) if not tokenizer.is_special(id)}
    allowed = {each for each in begins if each and (b"yes".startswith(each) or b"no".startswith(each))}
    assert trace.steps[0].num_allowed == len(allowed)


def test_what_the_format_does_not_allow_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(WorkbenchError, match=r"token_ids.0: the format does not allow token"):
        workbench.trace_grammar(tokenizer, {"kind": "choices", "choices": ["yes"]}, tokenizer.encode("no"))
