"""Build the single request of a view that looks at one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.errors import WorkbenchError
from workbench.request import Request


def single_request(
    view: str,
    runner: Any,
    prompt: str | Sequence[int] | Request | None,
    sampling: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *more_prompts: str,
) -> Request:
    """Return a request of `runner` for one text or token ids, or the given Request, which has its own sampling
    parameters.

    Args:
        view: the view's name, for error messages.
        sampling: the user's parameters.
        defaults: the view's parameters of texts and token ids.
        more_prompts: names of what the view takes besides.

    Raises:
        WorkbenchError: there is no prompt, it cannot be encoded, several samples are asked for, or `sampling` is given
            with a Request.
    """
    from workbench.engine.runner_thread import RunnerThread

    if prompt is None:
        known = ", ".join(("text", "token ids", *more_prompts))
        raise WorkbenchError(f"{view}: a prompt is missing: {known} or a Request")
    is_read = isinstance(prompt, str | Request)
    values = dict(sampling) if isinstance(prompt, Request) else {**defaults, **sampling}
    (made,) = runner.make_requests([prompt] if is_read else [""], values)
    if not is_read:
        made = replace(made, prompt_ids=tuple(map(int, prompt)), prompt=None, invalid_reason="")
    if made.invalid_reason or not made.prompt_ids:
        raise WorkbenchError(f"{view}: {made.invalid_reason or 'the prompt is empty: give text or ids'}")
    if made.sampling.num_sequences > 1:
        raise WorkbenchError(f"{view} follows one text: leave out n, best_of and beams")
    if isinstance(prompt, Request):
        return made
    return replace(made, request_id=RunnerThread.attach(runner).new_request_id(view))
