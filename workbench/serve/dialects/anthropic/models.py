"""Describe the models of the server in Anthropic's shape, for clients that send `anthropic-version`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from workbench.serve.batches.openai_batch_routes import page
from workbench.serve.dialects.anthropic.body import EFFORT_SHARES

if TYPE_CHECKING:
    from workbench.serve.served_model import ServedModel


def describe_model(model: ServedModel) -> dict[str, Any]:
    """Return a model in the shape of Anthropic's protocol."""
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


def list_models(
    models: Iterable[ServedModel], limit: int = 1000, after_id: str = "", before_id: str = ""
) -> dict[str, Any]:
    """Return a page of the list `GET /v1/models` for a client that sends `anthropic-version`; ApiError for an invalid
    page.
    """
    found = page([describe_model(each) for each in models], limit, after_id, before_id)
    return {name: value for name, value in found.items() if name != "object"}
