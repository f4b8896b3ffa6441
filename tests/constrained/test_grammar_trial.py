"""Nothing that a grammar does to its compiler reaches the process that asks: a child dies, and it is refused."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import cast

import psutil
import pytest

from tests.constrained.dying_trial import DyingTrial
from tests.helpers.refusals import refuses
from tests.patience import until
from tests.prompt.samples import byte_level, trained
from workbench.constrained.grammar import TOOK_TOO_LONG, GrammarVocabulary
from workbench.constrained.grammar_trial import DRAWN_TOKENS, GrammarTrial, TrialUnavailable, take_drawn_tokens
from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.response_format import Choices, JSONSchema, Lark, Regex, ResponseFormat

SOUND: list[ResponseFormat] = [
    JSONSchema(json_schema=True),
    JSONSchema(json_schema={"type": "array", "items": {"type": "number"}, "minItems": 60}),
    Choices(choices=("yes", "no")),
    Regex(regex=r"[a-z]{2,} [0-9]{3}"),
    Lark(lark='start: e\ne: "(" e ")" | e "+" e | /[0-9]+/'),
]
UNSOUND: list[ResponseFormat] = [
    JSONSchema(json_schema={"enum": []}),
    JSONSchema(json_schema={"properties": {"a": {"enum": [-(2**63)]}}}),
    Regex(regex="(?=a)b"),
    Lark(lark='start: start "a"'),
]


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    with DyingTrial({"bytes": byte_level(), "words": trained()}) as opened:
        yield opened


def ask(trial: GrammarTrial, wanted: ResponseFormat) -> str:
    """Return the error of a grammar; empty where it passed."""
    try:
        trial.check("bytes", wanted)
    except WorkbenchError as error:
        return str(error)
    return ""


def children() -> set[int]:
    """Return the children of this process that try grammars; one that has ended has no command line."""
    found = set()
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if any("dying_trial" in word for word in each.cmdline()):
                found.add(each.pid)
    return found


@pytest.mark.parametrize("wanted", SOUND, ids=lambda each: each.kind)
def test_a_sound_grammar_passes_over_each_vocabulary(trial: GrammarTrial, wanted: ResponseFormat) -> None:
    for name in ("bytes", "words"):
        trial.check(name, wanted)


@pytest.mark.parametrize("wanted", UNSOUND, ids=str)
def test_an_unsound_grammar_has_the_compilers_error(trial: GrammarTrial, wanted: ResponseFormat) -> None:
    with pytest.raises(WorkbenchError) as expected:
        GrammarVocabulary(byte_level()).compile(wanted)
    assert ask(trial, wanted) == str(expected.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [("signal", "did not survive it (it ended by SIGSEGV)"), ("loop", TOOK_TOO_LONG), ("memory", "MemoryError")],
)
def test_what_ends_the_compiler_is_refused_and_the_next_grammar_passes(
    trial: GrammarTrial, name: str, words: str
) -> None:
    assert words in ask(trial, Choices(choices=(name,)))
    assert not ask(trial, Choices(choices=("fine", name)))
    assert words in ask(trial, Choices(choices=(name,)))


def test_a_verdict_is_remembered() -> None:
    asked, starts = (SOUND[2], UNSOUND[0], Choices(choices=("signal",))), 0
    with DyingTrial({"bytes": byte_level()}) as opened:
        start = opened._start_child

        def counted(connection: Connection) -> subprocess.Popen[bytes]:
            nonlocal starts
            starts += 1
            return start(connection)

        opened._start_child = counted  # type: ignore[method-assign] (what the test counts)
        verdicts = [ask(opened, each) for each in asked]
        assert not verdicts[0] and verdicts[1] and "SIGSEGV" in verdicts[2] and starts == 1
        assert verdicts == [ask(opened, each) for each in asked]
        assert starts == 1  # it died of the last one, and is started again by the next that is not known


def test_a_child_that_something_else_ended_is_replaced_and_nothing_is_refused() -> None:
    others = children()
    with DyingTrial({"bytes": byte_level()}) as opened:
        opened.start()
        until(lambda: children() - others)  # a child that has just begun has no command line yet
        (first,) = children() - others
        os.kill(first, signal.SIGKILL)
        assert not ask(opened, SOUND[0])
        (second,) = children() - others
        assert second != first
    assert not children() - others


def test_what_no_child_could_try_is_refused_for_now_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object) -> None:
        raise OSError("too many open files")

    with DyingTrial({"bytes": byte_level()}) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(opened, "_start_child", no_process)
            with pytest.raises(TrialUnavailable, match="no process can be started to try it"):
                opened.check("bytes", SOUND[0])
        assert not opened.knows("bytes", SOUND[0]) and not ask(opened, SOUND[0]) and opened.knows("bytes", SOUND[0])


def test_what_others_kill_again_and_again_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    with DyingTrial({"bytes": byte_level()}) as opened:
        start = opened._start_child

        def killed(connection: Connection) -> object:
            child = start(connection)
            child.kill()
            return child

        with monkeypatch.context() as patch:
            patch.setattr(opened, "_start_child", killed)
            with pytest.raises(TrialUnavailable, match="ended by SIGKILL"):
                opened.check("bytes", SOUND[0])
        assert not ask(opened, SOUND[0])


def test_a_known_grammar_waits_for_no_other() -> None:
    with DyingTrial({"bytes": byte_level()}) as opened:
        assert not ask(opened, SOUND[0])
        waiting = threading.Thread(target=ask, args=(opened, Choices(choices=("wait",))))
        waiting.start()
        until(opened._lock.locked)
        assert not ask(opened, SOUND[0])
        opened.close()
        waiting.join()


def test_a_vocabulary_that_cannot_be_built_is_refused_alone() -> None:
    class Broken:
        def to_json(self) -> str:
            return "{}"

    with DyingTrial({"broken": cast(Tokenizer, Broken()), "bytes": byte_level()}) as opened:
        assert not ask(opened, SOUND[0])
        refuses("Model missing", lambda: opened.check("broken", SOUND[0]))


def test_the_child_has_less_stack_than_a_thread_of_this_process(trial: GrammarTrial) -> None:
    own = resource.getrlimit(resource.RLIMIT_STACK)[0]
    assert 0 < int(ask(trial, Choices(choices=("stack",)))) < (2 << 20 if own == resource.RLIM_INFINITY else own)


def test_closing_ends_a_check_that_waits() -> None:
    others, errors = children(), list[str]()
    opened = DyingTrial({"bytes": byte_level()})
    waiting = threading.Thread(target=lambda: errors.append(ask(opened, Choices(choices=("wait",)))))
    waiting.start()
    until(lambda: children() - others)
    opened.close()
    waiting.join()
    assert errors == ["response_format: the server is ending, and compiles no grammar"]
    assert not children() - others


@pytest.mark.parametrize("wanted", SOUND, ids=lambda each: each.kind)
def test_drawn_tokens_leave_the_grammar_as_it_was(wanted: ResponseFormat) -> None:
    grammar = GrammarVocabulary(trained()).compile(wanted)
    first = grammar.tokens.compute_bitmask()
    taken = take_drawn_tokens(grammar)
    assert 0 < taken <= DRAWN_TOKENS and taken == take_drawn_tokens(grammar)
    assert grammar.tokens.compute_bitmask() == first
