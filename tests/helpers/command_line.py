"""Command lines called in this process: what they print where, and with which code they end."""

from __future__ import annotations

import io
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from workbench.cli import main

FRAME = dict.fromkeys(map(ord, "│┃"), " ")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """The printed words with a space between them, without the frame of a table."""
        return " ".join(self.out.translate(FRAME).split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def cli(words: str, *more: object, code: int = 0) -> Ran:
    """Call a command and hold it to its exit code.

    Args:
        words: as a shell reads them.
        more: further words, each as it is.
        code: with which it must end.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        found = main([*shlex.split(words), *map(str, more)])
    ran = Ran(found, out.getvalue(), err.getvalue())
    assert found == code, ran
    return ran


def answer(words: str, *more: object, code: int = 0) -> Any:
    """Return the one object that a command prints with `--json`."""
    return cli(words, *more, "--json", code=code).json


def refused(words: str, *more: object) -> str:
    """Return the reported error: one line on stderr, nothing on stdout, exit code 2."""
    ran = cli(words, *more, code=2)
    lines = ran.err.replace("\r", "\n").splitlines()
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert ran.out == "" and line == lines[-1] and "Traceback" not in ran.err, ran
    return line
