"""Change the scheduler settings of a runner with requests in progress."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from workbench.engine.config import SchedulerConfig
from workbench.errors import WorkbenchError, explain, nearest
from workbench.scheduler.policies import parse_policy
from workbench.scheduler.validate import policy_name

CHANGEABLE = ("kind", "policy", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "chunk_tokens")
SIZED = ("max_num_seqs", "max_num_batched_tokens")  # upper limits: pages, buffers and a draft model are sized for them


def changed_schedule(made_for: SchedulerConfig, present: SchedulerConfig, settings: dict[str, Any]) -> SchedulerConfig:
    """Return the settings `present` with the new values in `settings`.

    Args:
        made_for: the settings at the runner's creation.
        present: the current settings.
        settings: new values by name, for names in `CHANGEABLE`.

    Raises:
        WorkbenchError: for a setting that is unknown, invalid, or fixed at the runner's creation.
    """
    for name in settings:
        if name in SchedulerConfig.model_fields and name not in CHANGEABLE:
            raise WorkbenchError(f"schedule.{name}: fixed once a runner is made; make another with workbench.load")
        if name not in CHANGEABLE:
            names = ", ".join(CHANGEABLE)
            raise WorkbenchError(f"schedule: no setting {name!r}{nearest(name, CHANGEABLE)}; these can change: {names}")
    values = {name: getattr(present, name) for name in SchedulerConfig.model_fields}
    try:
        changed = SchedulerConfig.model_validate({**values, **settings})
    except ValidationError as error:
        raise explain(error, "schedule", SchedulerConfig) from None
    for name in SIZED:
        if getattr(changed, name) > getattr(made_for, name):
            raise WorkbenchError(
                f"schedule.{name}: {getattr(changed, name)}, and the runner was made for {getattr(made_for, name)} at "
                "most; make another with workbench.load"
            )
    return changed


def differences(old: SchedulerConfig, new: SchedulerConfig) -> list[tuple[str, str, str]]:
    """Return (name, old, new) as text for each setting that differs."""
    pairs = ((name, _words(name, old), _words(name, new)) for name in CHANGEABLE)
    return [each for each in pairs if each[1] != each[2] or getattr(old, each[0]) != getattr(new, each[0])]


def _words(name: str, config: SchedulerConfig) -> str:
    value = getattr(config, name)
    return policy_name(parse_policy(value)) if name == "policy" else "none" if value is None else str(value)
