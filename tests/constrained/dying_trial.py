"""The child of a trial, with a compiler that dies of some choices: `python -m tests.constrained.dying_trial`."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from workbench.constrained import grammar_trial
from workbench.constrained.grammar import Grammar, GrammarVocabulary
from workbench.errors import WorkbenchError
from workbench.response_format import Choices, ResponseFormat

compile_grammar = GrammarVocabulary.compile


class DyingTrial(grammar_trial.GrammarTrial):
    """A trial whose compiler, for choices of these names, ends by a signal, runs or waits without end, wants too much
    memory, or tells its stack."""

    module = __name__


def compile_or_die(self: GrammarVocabulary, form: ResponseFormat) -> Grammar:
    name = form.choices[0] if isinstance(form, Choices) else ""
    if name == "signal":
        signal.raise_signal(signal.SIGSEGV)  # to this thread: of `os.kill` another may die, after the answer
    if name == "loop":
        while True:
            pass
    if name == "wait":
        signal.pause()
    if name == "memory":
        block: Any = bytearray(2 * grammar_trial.MAX_BYTES)
        raise AssertionError(len(block))
    if name == "stack":
        raise WorkbenchError(str(threading.stack_size()))
    return compile_grammar(self, form)


if __name__ == "__main__":
    grammar_trial.MAX_CPU_SECONDS = 1
    GrammarVocabulary.compile = compile_or_die
    grammar_trial.serve_trials(*map(int, sys.argv[1:]))
