"""Open the source of a fleet view: a cluster, two pools, or recorded events."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.cluster.cluster import Cluster
from workbench.cluster.pools import PrefillDecodePools
from workbench.errors import WorkbenchError
from workbench.trace import events as kinds
from workbench.trace.events import Event
from workbench.trace.recorder import Recorder
from workbench.widgets.fleet.data import FleetMember, PagesOnTheWay

Members = tuple[FleetMember, ...]
KINDS = {each.kind: each for each in vars(kinds).values() if isinstance(each, type) and issubclass(each, Event)}
"""Event types by their name in a file."""
FIELDS = {"options": kinds.RoutingOption}
"""Row type of each event field with typed rows; rows of other fields stay tuples."""


@dataclass(frozen=True)
class FleetSource:
    """The source of a fleet view: recorded `events`; or, for a live fleet, `listen`, which subscribes to new events,
    and `read`, which returns its members and the pages in flight."""

    title: str = ""
    events: Sequence[Event] = ()
    listen: Callable[[Callable[[Event], None]], Callable[[], None]] | None = None
    read: Callable[[], tuple[Members | None, tuple[PagesOnTheWay, ...]]] = lambda: (None, ())


def open_fleet(source: Any) -> FleetSource:
    """Return the source of a fleet view.

    Args:
        source: a `workbench.Cluster`, `PrefillDecodePools`, a Recorder, events, or a file that `save_events` wrote.

    Raises:
        WorkbenchError: `source` is something else.
    """
    match source:
        case Cluster():
            return FleetSource(source.config.model.name, (), source.listen, lambda: (_of_cluster(source), ()))
        case PrefillDecodePools():
            name = source.slots[0].config.model.name
            return FleetSource(name, (), source.listen, lambda: _of_pools(source))
        case Recorder():
            return FleetSource(events=tuple(source.events))
        case str() | Path():
            return FleetSource(Path(source).name, load_events(source))
    if isinstance(source, Iterable):
        events = tuple(source)
        if all(isinstance(each, Event) for each in events):
            return FleetSource(events=events)
    raise WorkbenchError(
        "FleetView: give a cluster, prefill and decode pools, events, a Recorder, or a file that `save` wrote, "
        f"not {type(source).__name__}"
    )


def _of_cluster(cluster: Cluster) -> Members:
    found = [
        FleetMember(view.number, view.variant, "leaves" if view.is_leaving else "serves", sum(view.pages),
                    view.pages.used, view.pages.idle)
        for view in tuple(cluster.front.replicas.values())
    ]  # fmt: skip
    return (*found, *(FleetMember(number, name, "starts") for number, name in cluster.starting.items()))


def _of_pools(pools: PrefillDecodePools) -> tuple[Members, tuple[PagesOnTheWay, ...]]:
    now = pools.snapshot()
    members = tuple(
        FleetMember(each.number, each.role.removeprefix("any"), "serves" if each.state == "ready" else each.state)
        for each in now.engines
    )
    ways = (
        PagesOnTheWay((each.request_id, each.sample), each.source, each.target or 0, each.pages)
        for each in now.in_flight
    )
    return members, tuple(ways)


def save_events(events: Iterable[Event], path: str | Path) -> Path:
    """Write events to a compressed file of JSON lines; return its path."""
    path = Path(path)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for each in events:
            file.write(json.dumps({"kind": each.kind, **dataclasses.asdict(each)}) + "\n")
    return path


def load_events(path: str | Path) -> tuple[Event, ...]:
    """Return the events of a file that `save_events` wrote. Raises WorkbenchError for any other file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return tuple(_event(json.loads(line)) for line in file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkbenchError(f"{path}: no file of events that FleetView.save wrote ({error})") from None


def _event(values: dict[str, Any]) -> Event:
    kind = KINDS[values.pop("kind")]
    return kind(**{name: _frozen(value, FIELDS.get(name)) for name, value in values.items()})


def _frozen(value: Any, row: type | None) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(row(*each) if row is not None else _frozen(each, None) for each in value)
