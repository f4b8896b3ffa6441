"""Describe the models of the server in Anthropic's shape, for clients that send `anthropic-version`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from workbench.serve.dialects.anthropic.body import EFFORT_SHARES

if TYPE_CHECKING:
    from workbench.serve.served_model import ServedModel


def describe_model(model: ServedModel) -> dict[str, Any]:
    """Return a model in this protocol's shape."""
    has, lacks = {"supported": True}, {"supported": False}
    thinks = {"supported": model.can_think}
    efforts = dict.fromkeys(EFFORT_SHARES, thinks)
    kinds = {"adaptive": thinks, "disabled": has, "enabled": thinks, "between_tools": lacks}
    capabilities = {
        **dict.fromkeys(("citations", "code_execution", "image_input", "pdf_input"), lacks),
        "context_management": lacks,
        "server_tools": {**lacks, "code_execution": lacks, "web_search": lacks},
        "batch": has,
        "structured_outputs": {"supported": model.tokenizer is not None and model.tokenizer.byte_rule is not None},
        "effort": {**thinks, **efforts},
        "thinking": {**thinks, "types": kinds},
    }
    return {
        "id": model.name,
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len - 1,
        "capabilities": capabilities,
    }


def list_models(models: Iterable[ServedModel]) -> dict[str, Any]:
    """Return the answer of `GET /v1/models` to a client that sends `anthropic-version`."""
    data = [describe_model(each) for each in models]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}
