"""Write limits as response headers of OpenAI's and Anthropic's protocols, and the error for a refused call."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from workbench.gateway.limits.limits import AT_ONCE, MICROS, MONEY, Remaining, Reservation
from workbench.serve.errors import ApiError

OPENAI = {"requests": "requests", "tokens": "tokens"}
ANTHROPIC = OPENAI | {"input_tokens": "input-tokens", "output_tokens": "output-tokens"}
AT_ONCE_WAIT = 1_000_000  # microseconds: the end of running calls is unknown
UNITS = {"requests": "requests", "tokens": "tokens", "input_tokens": "input tokens", "output_tokens": "output tokens"}


def limit_headers(dialect: str, remaining: Iterable[Remaining], now: int) -> dict[str, str]:
    """Return headers with the remaining limits: `x-ratelimit-*`, or `anthropic-ratelimit-*` in Anthropic's protocol."""
    found: dict[str, str] = {}
    for each in remaining:
        values = {"limit": str(each.limit), "remaining": str(each.remaining)}
        if dialect.startswith("anthropic"):
            values["reset"] = rfc3339(now + each.reset)
            found |= {f"anthropic-ratelimit-{ANTHROPIC[each.bucket]}-{name}": value for name, value in values.items()}
        elif each.bucket in OPENAI:
            values["reset"] = duration(each.reset)
            found |= {f"x-ratelimit-{name}-{OPENAI[each.bucket]}": value for name, value in values.items()}
    return found


def refusal(dialect: str, refused: Reservation) -> ApiError:
    """Return the error for a refused call, with `retry-after` if waiting helps."""
    headers = limit_headers(dialect, refused.remaining, refused.now)
    wait = AT_ONCE_WAIT if refused.refused_by == AT_ONCE else refused.wait
    whose = refused.holder.partition(":")[0]
    if wait < 0:
        headers["x-should-retry"] = "false"
        after = "make it smaller"
    else:
        headers |= {"retry-after": str(-(-wait // MICROS)), "retry-after-ms": str(-(-wait // 1_000))}
        after = f"try again in {duration(wait)}"
    if refused.refused_by == MONEY:
        left = f"what is left of the {whose}'s budget of the day"
        words = f"the call may cost more than {left}; {after}, or make it smaller"
        if wait < 0:
            words = f"the call may cost more than the {whose}'s whole budget of the day; {after}"
        return ApiError("billing_error", words, "", "budget", headers)
    if refused.refused_by == AT_ONCE:
        message = f"the {whose}'s limit of requests at once is reached; {after}"
        return ApiError("rate_limit_error", message, "", "rate_limit_exceeded", headers)
    unit = UNITS[refused.refused_by]
    if wait < 0:
        message = f"the call is larger than the whole limit of {unit} a minute of the {whose}; {after}"
        return ApiError("rate_limit_error", message, "", "rate_limit_exceeded", headers)
    message = f"the {whose}'s limit of {unit} a minute is reached; {after}"
    return ApiError("rate_limit_error", message, "", "rate_limit_exceeded", headers)


def duration(micros: int) -> str:
    """Format microseconds like OpenAI's reset headers: `12ms`, `1s`, `6m0s`; rounded up."""
    millis = -(-micros // 1_000)
    if millis < 1_000:
        return f"{millis}ms"
    minutes, rest = divmod(-(-millis // 1_000), 60)
    hours, minutes = divmod(minutes, 60)
    front = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{front}{rest}s"


def rfc3339(micros: int) -> str:
    """Format microseconds since 1970 as a UTC time, rounded up to a second."""
    return datetime.datetime.fromtimestamp(-(-micros // MICROS), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
