"""Speak OpenAI's embeddings: the mean of a layer's hidden states over a text's tokens, of unit length."""

from __future__ import annotations

import base64
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import Discriminator, Field, Tag

from workbench.request import SamplingParameters
from workbench.serve.answers.pieces import Embedded, Piece, Used
from workbench.serve.answers.prompt_work import DIMENSIONS, LAYER
from workbench.serve.bodies.fields import Body, IgnoredFields, Int, Refused
from workbench.serve.call import Call, Caller
from workbench.serve.dialects.openai.common import (
    NO_ACCOUNT,
    SET_BY_SERVER,
    OpenAIDialect,
    SamplingBody,
    kind_of_prompt,
)
from workbench.serve.document import COUNT, OBJECT, list_schema, object_schema, one_of
from workbench.serve.errors import invalid_field
from workbench.serve.served_model import ServedModel

MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingBody(Body):
    """The body of an embedding.

    `dimensions` keeps the first numbers of a vector and normalizes them again. `layer` is our field: hidden states
    after that many layers; default: all layers and the final norm.
    """

    model: str
    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[Int], Tag("<ids>")]
        | Annotated[list[str], Tag("<texts>")]
        | Annotated[list[list[Int]], Tag("<lists>")],
        Discriminator(kind_of_prompt),
    ]
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    layer: Annotated[Int, Field(ge=0)] | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "cache_salt": Refused(SET_BY_SERVER),
        "truncate_prompt_tokens": Refused("shorten the input"),
        "add_special_tokens": Refused("the tokenizer adds its special tokens before a text", (True,)),
        "normalize": Refused("vectors have unit length", (True,)),
        **dict.fromkeys(
            ("input_type", "task", "prompt_name", "instruction", "messages"),
            Refused("texts are embedded unchanged"),
        ),
        **dict.fromkeys(("embed_dtype", "output_dtype"), Refused("numbers are floats", ("float", "float32"))),
    }
    IGNORED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("user", "safety_identifier"), NO_ACCOUNT),
        "request_id": SamplingBody.OTHERS_IGNORED["request_id"],
        "priority": "a call takes turns with others, chunk by chunk",
    }


class OpenAIEmbeddings(OpenAIDialect):
    """The dialect of `/v1/embeddings`."""

    name, path, body = "openai.embeddings", "/v1/embeddings", EmbeddingBody
    answer_schema = object_schema(
        object=one_of("list"), data=list_schema(object_schema(object=one_of("embedding"), index=COUNT)), usage=OBJECT,
    )  # fmt: skip

    def parse(self, body: EmbeddingBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        texts = _texts(body)
        return Call(
            id=f"embd_{secrets.token_hex(12)}",
            dialect=self.name,
            model=body.model,
            prompts=tuple(text if isinstance(text, str) else tuple(text) for text in texts),
            sampling=SamplingParameters(max_tokens=1),
            purpose="embed",
            ignored=ignored,
            options={LAYER: body.layer, DIMENSIONS: body.dimensions, "as_text": body.encoding_format == "base64"},
        )

    def writer(self, call: Call, model: ServedModel) -> NoReturn:
        raise AssertionError("embeddings are not streamed")

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        layers = len(model.runner.model.spec.layers)
        layer = layers if call.options[LAYER] is None else call.options[LAYER]
        tokens = sum(each.prompt_tokens for each in pieces if isinstance(each, Used))
        found = [each for each in pieces if isinstance(each, Embedded)]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": each.choice, "embedding": _vector(each.vector, call)} for each in found
            ],
            "model": model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "workbench": {"pooling": "mean", "layer": layer, "num_layers": layers, "unit_length": True},
        }


def _texts(body: EmbeddingBody) -> list[str] | list[Sequence[int]]:
    given: Any = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 1 <= len(given) <= MAX_INPUTS:
        raise invalid_field("input", f"give 1 to {MAX_INPUTS:,} texts, not {len(given):,}")
    empty = next((place for place, text in enumerate(given) if not text), None)
    if empty is not None:
        raise invalid_field(f"input.{empty}", "is empty; give a text or token ids")
    return given


def _vector(vector: Sequence[float], call: Call) -> list[float] | str:
    wanted = call.options[DIMENSIONS]
    if wanted is not None and wanted < len(vector):
        vector = vector[:wanted]
        length = sum(each * each for each in vector) ** 0.5
        vector = [each / length for each in vector] if length else vector
    if not call.options["as_text"]:
        return [*vector]
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
