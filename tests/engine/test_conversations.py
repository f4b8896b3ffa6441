"""Conversations through the runner: each turn begins on the cached prefix of those before it."""

from __future__ import annotations

import pytest

from tests.engine.tiny import layer, model_of, runner_of
from tests.helpers.events import of
from tests.prompt.samples import byte_level
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec
from workbench.prompt.answers import AnswerFormat, parse_answer
from workbench.prompt.conversation import Conversation
from workbench.trace.events import Finished


def runner(**settings: object) -> Runner:
    spec = ModelSpec(
        name="tiny",
        vocab_size=266,
        hidden_size=8,
        layers=(layer(),),
        max_position_embeddings=160,
        tie_word_embeddings=True,
        eos_token_ids=(1,),
    )
    return runner_of(model_of(spec), tokenizer=byte_level(), **{"prefix": "radix", "pages": 80, **settings})


def ended(talking: Runner, talk: Conversation, **sampling: object) -> Finished:
    (found,) = of(Finished, talking.stream(talk, max_tokens=9, seed=3, **sampling))
    return found


def test_a_turn_computes_only_what_is_new() -> None:
    """Answers of any bytes, most of them no text: the cached prefix reaches to the page in which the answer ends."""
    talking, talk = runner(), Conversation(system="S", turns=["one"])
    assert talking.tokenizer is not None and talking.chat_template is not None
    format = AnswerFormat.from_template(talking.chat_template, talking.tokenizer)
    bias = {id: 100.0 for id in talking.tokenizer.encode("abcdefgh ")}
    before, size = 0, talking.store.page_size
    for number in range(3):
        prompt = talking.assemble(talk)
        known = talking.cached_tokens(prompt.ids)
        finished = ended(talking, talk, logit_bias=bias)
        assert finished.prompt_tokens == len(prompt.ids) and finished.cached_tokens == known
        assert known >= (before - 1) // size * size
        table = talk.explain(talking)
        assert sum(int(str(row[3])) for row in table.rows) == talking.cached_tokens(prompt.ids) > 0
        before = len(prompt.ids) + len(finished.token_ids)
        answer = parse_answer(finished.token_ids, talking.tokenizer, format)
        talk = talk.with_turn(answer).user("more")
        following = talking.assemble(talk)
        assert following.divergence(prompt) is None and following.answers[2 * number + 1] == "kept"


def test_an_answer_ends_where_its_turn_does() -> None:
    talking = runner()
    turn = byte_level().special_token_ids["<|turn|>"]
    finished = ended(talking, Conversation(turns=["a"]), logit_bias={turn: 100.0})
    assert (finished.reason, finished.token_ids, finished.ended_by) == ("stop", (turn,), "stop_token")


def test_a_conversation_beyond_the_context() -> None:
    long = Conversation(turns=["a" * 70]).answer("b" * 70).user("c")
    with pytest.raises(WorkbenchError, match="the prompt has 174 tokens"):
        ended(runner(), long.answer("d").user("e" * 20))
    talking = runner(overflow="cut_oldest")
    (request,) = talking.make_requests(long.answer("d").user("e" * 20), {"max_tokens": 40})
    assert request.cut_tokens > 100 and request.prompt is not None and "aaa" not in request.prompt
    events = talking.stream([long.answer("d").user("e" * 300), Conversation(turns=["b"])], max_tokens=2)
    assert sorted(e.reason for e in of(Finished, events)) in (["length", "refused"], ["refused", "stop"])
