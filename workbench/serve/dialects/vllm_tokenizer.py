"""Serve a model's tokenizer for evaluation tools: `/tokenize`, `/detokenize`, `/tokenizer_info` (as in vLLM)."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from fastapi import APIRouter, Request

from workbench.request import SamplingParameters
from workbench.serve.answers.pieces import Piece, PromptRead, Text
from workbench.serve.answers.prompt_work import GIVES_BOS, GIVES_TEXT
from workbench.serve.bodies.fields import Body, IgnoredFields, Int, Refused
from workbench.serve.call import Call, Caller, PromptInput
from workbench.serve.dialect import RouteServices
from workbench.serve.dialects.openai.common import OpenAIDialect
from workbench.serve.dialects.openai.messages import continues_last, read_conversation
from workbench.serve.document import COUNT, TEXT, list_schema, object_schema
from workbench.serve.errors import invalid_field

if TYPE_CHECKING:
    from workbench.prompt.tokenization.tokenizer import Tokenizer
    from workbench.serve.served_model import ServedModel


class TokenizeBody(Body):
    """A text, or messages as read by a chat. `add_special_tokens` puts the begin token before a text."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "chat_template": Refused("the model's own chat template is used"),
        "chat_template_kwargs": Refused("template arguments have no effect here", ({},)),
    }


class DetokenizeBody(Body):
    """Token ids; control tokens are written out, as vLLM does."""

    model: str | None = None
    tokens: list[Int]


class _TokenizerDialect(OpenAIDialect):
    """The common base of both routes: without a model's name they use the first model."""

    def writer(self, call: Call, model: ServedModel) -> NoReturn:
        raise AssertionError("tokens are not streamed")


class VllmTokenize(_TokenizerDialect):
    """The dialect of `/tokenize`, and of `/tokenizer_info`, which has no body."""

    name, path, body = "vllm.tokenize", "/tokenize", TokenizeBody
    answer_schema = object_schema(tokens=list_schema(COUNT), count=COUNT, max_model_len=COUNT)

    def parse(self, body: TokenizeBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        if (body.prompt is None) == (body.messages is None):
            raise invalid_field("prompt", "give either prompt or messages")
        _tokenizer(model)
        prompt: PromptInput = body.prompt or ""
        if body.messages is not None:
            continues = continues_last(body.continue_final_message, body.add_generation_prompt)
            prompt = read_conversation(body.messages, body.tools or (), ignored, continues)[0]
        options = {GIVES_BOS: body.add_special_tokens, "names": bool(body.return_token_strs)}
        return _call(self.name, body.model or model.name, prompt, model.answer_tokens, options, ignored)

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        ids = next(each.token_ids for each in pieces if isinstance(each, PromptRead))
        values: dict[str, Any] = {"tokens": [*ids], "count": len(ids), "max_model_len": model.max_model_len}
        if call.options["names"]:
            values["token_strs"] = [_tokenizer(model).token_bytes(id).decode("utf-8", "replace") for id in ids]
        return values

    def routes(self, services: RouteServices) -> Iterable[APIRouter]:
        router = APIRouter()

        @router.get("/tokenizer_info", summary="Return the control tokens and the chat template")
        async def info(request: Request, model: str = "") -> dict[str, Any]:
            return _described(services.model_for(await services.identify(request), model or None))

        return [router]


class VllmDetokenize(_TokenizerDialect):
    """The dialect of `/detokenize`."""

    name, path, body = "vllm.detokenize", "/detokenize", DetokenizeBody
    answer_schema = object_schema(prompt=TEXT)

    def parse(self, body: DetokenizeBody, model: ServedModel, ignored: IgnoredFields, caller: Caller) -> Call:
        size = _tokenizer(model).vocab_size
        wrong = next((id for id in body.tokens if not 0 <= id < size), None)
        if wrong is not None:
            raise invalid_field("tokens", f"{wrong} is no id of the vocabulary, 0 to {size - 1}")
        return _call(self.name, body.model or model.name, tuple(body.tokens), 1, {GIVES_TEXT: True}, ignored)

    def answer(self, call: Call, model: ServedModel, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"prompt": "".join(each.text for each in pieces if isinstance(each, Text))}


def _call(
    dialect: str, model: str, prompt: PromptInput, max_tokens: int, options: dict[str, Any], ignored: Mapping[str, str]
) -> Call:
    return Call(
        f"tok_{secrets.token_hex(12)}", dialect, model, (prompt,), SamplingParameters(max_tokens=max_tokens),
        purpose="tokenize", ignored=ignored, options=options,
    )  # fmt: skip


def _described(model: ServedModel) -> dict[str, Any]:
    tokenizer, template = _tokenizer(model), model.chat_template
    ends = model.runner.model.spec.eos_token_ids
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _name(tokenizer, tokenizer.bos_token_ids[:1]),
        "eos_token": _name(tokenizer, ends[:1]),
        "eos_token_id": ends[0] if ends else None,
        "chat_template": template.text if template is not None else None,
        "model_max_length": model.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "additional_special_tokens": [*tokenizer.special_token_ids],
    }


def _tokenizer(model: ServedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise invalid_field("model", f"{model.name!r} has no tokenizer; give token ids")
    return model.tokenizer


def _name(tokenizer: Tokenizer, ids: Any) -> str | None:
    return tokenizer.decode(ids, special=True) if ids else None
