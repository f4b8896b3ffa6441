"""Of the questions that the answer cache compares, the newest are kept."""

from __future__ import annotations

import workbench
from tests.event_loop import run_async
from tests.gateway.calls import answer, chat
from workbench.gateway.answer_cache import AnswerCache, AnswerCacheConfig, SemanticConfig
from workbench.request import CustomPart

WORDS = ("zebra", "quick", "jolly", "mambo")


@workbench.register("test-words")
def words(texts: list[str]) -> list[list[float]]:
    return [[1.0 if word in text else 0.0 for word in WORDS] for text in texts]


def test_the_newest_candidates_are_found() -> None:
    async def run() -> None:
        semantic = SemanticConfig(embedding=CustomPart(path="test-words"), second_gate=False, candidates=2, seconds=60)
        kept = AnswerCache(AnswerCacheConfig(exact=False, semantic=semantic))
        for number, word in enumerate(WORDS):
            assert await kept.keep(chat(f"A {word}?"), "demo@1", ((number,),), answer(word))
        hits = [(await kept.find(chat(f"The {word}?"), "demo@1", ((9,),)))[0] is not None for word in WORDS]
        assert hits == [False, False, True, True]

    run_async(run())
