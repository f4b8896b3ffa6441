"""Define the server's only error class, independent of protocols; each dialect writes it in its own shape."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.errors import WorkbenchError
from workbench.files import without_own_paths

# HTTP status by kind. The names are Anthropic's, OpenAI's are made of them in its dialect.
ENGINE_FAILED = "the engine failed; the server's log has the reason"
SERVER_FAILED = "the server failed; its log has the reason"
RETRY_SECONDS = 1  # until a client refused for lack of room may retry
STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "unavailable_error": 503,
    "overloaded_error": 529,
    "timeout_error": 504,
}


class ApiError(WorkbenchError):
    """An error for a client.

    Args:
        kind: one of `STATUS`.
        message: one sentence: the fault, its place and the fix.
        param: path of the wrong field.
        code: a word for programs.
        headers: further headers (`retry-after`).
        detail: internal detail, hidden from clients, since it may hold data of other calls; administrators find it in
            the trace.
    """

    def __init__(
        self, kind: str, message: str, param: str = "", code: str = "", headers: Mapping[str, str] | None = None,
        detail: str = "",
    ):  # fmt: skip
        message = without_own_paths(message)
        super().__init__(message)
        self.kind, self.message, self.param, self.code = kind, message, param, code
        self.headers, self.detail = dict(headers or {}), detail

    @property
    def status(self) -> int:
        return STATUS[self.kind]


def invalid_field(param: str, message: str) -> ApiError:
    """Return the error for an invalid field: an ApiError invalid_request_error with its path."""
    return ApiError("invalid_request_error", f"{param}: {message}", param)
