"""Run calls that generate nothing: embed prompts, or tokenize them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from workbench.cluster.cluster import Cluster
from workbench.engine.embeddings import TextMean, texts_to_ids
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.serve.answers.pieces import Embedded, Piece, PromptRead, Text, Used
from workbench.serve.bodies.fields import invalid
from workbench.serve.call import Call
from workbench.serve.errors import ApiError
from workbench.serve.memory.generated_turns import GeneratedTurns
from workbench.serve.served_model import ServedModel

MAX_EMBEDDED_TOKENS = 300_000  # total over the texts of a call
LAYER, DIMENSIONS = "layer", "dimensions"  # option names of a call that embeds
GIVES_TEXT, GIVES_BOS = "gives_text", "gives_bos"  # option names of a call that tokenizes


class InThread(Protocol):
    """The type of a function that runs another function outside of the event loop and returns its result."""

    def __call__(self, function: Callable[[], Any]) -> Awaitable[Any]: ...


async def embed_prompts(
    call: Call,
    texts: Sequence[Sequence[int]],
    model: ServedModel,
    in_thread: InThread,
    turn: asyncio.Lock,
    count: Callable[[int], None],
) -> list[Piece]:
    """Return the embeddings of a call's prompts, without blocking a thread.

    Args:
        call: the call, with the layer in its options.
        texts: the token ids of its prompts.
        model: the model that computes the hidden states.
        in_thread: runs the check of the ids.
        turn: held for one chunk, so that calls take turns and a step of the engine waits for one chunk at most.
        count: called in the engine's thread with the number of tokens of each chunk as its computation begins.

    Raises:
        ApiError: invalid_request_error for prompts that cannot be embedded.
    """
    layer, wanted, size = call.options.get(LAYER), call.options.get(DIMENSIONS), model.runner.model.spec.hidden_size
    runner, thread = model.runner, model.thread
    if isinstance(runner, Cluster):
        words = f"model: {model.name!r} is served by a cluster without embeddings; embed with a runner"
        raise ApiError("invalid_request_error", words, "model")
    assert isinstance(thread, RunnerThread)
    if wanted is not None and wanted > size:
        words = f"dimensions: {wanted}, and the model's states have {size}; give at most that"
        raise ApiError("invalid_request_error", words, DIMENSIONS)
    try:
        rows = await in_thread(lambda: texts_to_ids(runner, texts, layer, MAX_EMBEDDED_TOKENS))
        found: list[Piece] = []
        for number, ids in enumerate(rows):
            mean = TextMean(runner.model, ids, layer)
            has_more = True
            while has_more:
                async with turn:
                    has_more = await asyncio.wrap_future(thread.submit_call(partial(_advance, mean, count)))
            found.append(Embedded(number, mean.embedding().vector))
    except WorkbenchError as error:
        raise invalid(WorkbenchError(str(error).replace("texts", "input", 1))) from None
    return [*found, Used(prompt_tokens=sum(map(len, rows)))]


def _advance(mean: TextMean, count: Callable[[int], None], runner: Runner) -> bool:
    count(mean.next_tokens)
    return mean.advance(runner)


async def tokenize_prompts(
    call: Call, model: ServedModel, in_thread: InThread, turns: GeneratedTurns | None
) -> list[Piece]:
    """Return the tokens of a call's prompts as the model reads them; if a prompt is token ids, return their text. Raise
    ApiError for a prompt that cannot be read.
    """

    def read() -> list[Piece]:
        try:
            if call.options.get(GIVES_TEXT):
                return [Text(number, text=model.decode(each)) for number, each in enumerate(call.prompts)]
            rows = model.prompt_ids(call, turns, bool(call.options.get(GIVES_BOS, True)))
            return [PromptRead(number, prompt_tokens=len(ids), token_ids=ids) for number, ids in enumerate(rows)]
        except WorkbenchError as error:
            raise invalid(error) from None

    return [*await in_thread(read), Used()]
