"""Draw a fleet: the front, replicas with their samples and pages, pages between pools, and the latest routings.

Cards flow: side by side if they fit, one below the other on a phone. A mark's border and pattern show its phase in
addition to its colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from workbench import svg
from workbench.display import truncate_text
from workbench.trace.events import Routed
from workbench.units import format_bytes, format_seconds
from workbench.widgets.fleet.data import FleetReplica, FleetSample, FleetState, News, count_of, news_line, summarize

MAX_SAMPLES = 12  # samples on a card; the others are counted
MAX_NEWS = 10  # lines of routings, moves and handovers
MAX_NAME_LETTERS = 22
BAR_HEIGHT = 14.0
PHASES = {"waiting": "qu", "prefill": "pf", "decode": "de"}
STYLE = (
    ".wb-fl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,260px),1fr));gap:8px;margin:6px 8px;"
    "max-width:1300px}"
    ".wb-fl.pools{display:flex;flex-wrap:wrap}.wb-fl.pools>div{flex:1 1 260px;min-width:0}.wb-fl.one{display:block}"
    ".wb-fl .col{display:flex;flex-direction:column;gap:8px}.wb-fl.pools .mid{flex:0 1 200px}"
    ".wb-fl .card{border:1px solid rgba(128,128,128,.55);border-radius:4px;padding:5px 8px;min-width:0}"
    ".wb-fl .lost{border-style:dashed;opacity:.75}.wb-pic h4{font-size:13px;margin:0 0 3px}"
    ".wb-fl .head{display:flex;justify-content:space-between;gap:8px;flex-wrap:wrap}"
    ".wb-fl .under{margin-top:4px}.wb-fl .none{font-style:italic;opacity:.62}"
    ".wb-fl .chips{display:flex;flex-wrap:wrap;align-items:center;gap:4px;margin-top:4px}"
    ".wb-fl .chip{font:12px var(--jp-code-font-family,ui-monospace,monospace);border:1px solid;border-radius:3px;"
    "padding:1px 5px;cursor:pointer;max-width:100%;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}"
    ".wb-fl .qu{border-style:dashed;border-color:rgba(128,128,128,.9)}"
    ".wb-fl .pf{border-color:#e69f00;background:rgba(230,159,0,.25)}"
    ".wb-fl .de{border-color:#0072b2;background:rgba(0,114,178,.25)}"
    ".wb-fl .fly{border-color:#009e73;background:rgba(0,158,115,.22);border-style:double;border-width:3px}"
    ".wb-fl .ended{border-color:transparent;opacity:.7}.wb-pic .on{outline:2px solid #d55e00;outline-offset:1px}"
    ".wb-pic .us{fill:#0072b2;fill-opacity:.8}"
    ".wb-pic .id{fill:#0072b2;fill-opacity:.22;stroke:#0072b2;stroke-dasharray:2 2}"
    ".wb-fl .pages{display:block;width:100%;outline:1px solid rgba(128,128,128,.7)}.wb-fl .unknown{outline:0}"
    ".wb-pic .b{font-weight:600}"
    ".wb-pic .wb-news{font-size:12px;margin:4px 8px 8px;padding:0;list-style:none}"
    ".wb-pic .wb-news li{padding:1px 0;overflow-wrap:anywhere}.wb-pic .wb-news li.own{font-weight:600}"
    ".wb-pic .wb-options{margin:4px 8px;border-collapse:collapse;font-size:12px}.wb-pic .wb-options td,"
    ".wb-pic .wb-options th{padding:1px 10px 1px 0;text-align:right;font-weight:400}"
    ".wb-pic .wb-options .own td{font-weight:600}"
    ".wb-pic .wb-scroll{overflow-x:auto}"
)


def draw_fleet(state: FleetState, chosen: str = "", title: str = "") -> str:
    """Draw a fleet, then the latest routings, moves and handovers, then the path of the sample named `chosen`."""
    samples = {each.name: each for each in state.samples}
    drawn = _drawn(state)
    stop = chosen if chosen in drawn else next(iter(drawn), "")
    most = max((each.used + each.idle for each in state.replicas), default=0)

    def card(replica: FleetReplica) -> str:
        return _card(replica, chosen, stop, most)

    prefill = [each for each in state.replicas if each.role == "prefill"]
    decode = [each for each in state.replicas if each.role == "decode"]
    others = [each for each in state.replicas if each not in prefill and each not in decode]
    parts = [svg.tag("style", STYLE), _head(state, title)]
    if prefill or decode or state.in_flight:
        columns = [
            _column(map(card, prefill)),
            svg.tag("div", _flight(state, chosen, stop), class_="mid"),
            _column(map(card, decode)),
        ]
        parts.append(_flow(_front(state, chosen, stop), class_="wb-fl one"))
        parts.append(_flow(*columns, class_="wb-fl pools"))
        parts += [_flow(*map(card, others), class_="wb-fl")] if others else []
    else:
        parts.append(_flow(_front(state, chosen, stop), *map(card, others), class_="wb-fl"))
    parts += [_legend(), _news(state, chosen)]
    if chosen in samples:
        parts.append(_chosen(state, samples[chosen]))
    return svg.html(*parts)


def _drawn(state: FleetState) -> list[str]:
    """Return the names of the samples that are drawn."""
    groups = (state.waiting, *(each.samples for each in state.replicas), state.in_flight, _last_ended(state))
    return [each.name for group in groups for each in group[:MAX_SAMPLES]]


def _last_ended(state: FleetState) -> tuple[FleetSample, ...]:
    return state.ended[-MAX_SAMPLES // 2 :]


def _flow(*parts: str, class_: str) -> str:
    return svg.tag("div", *(parts or ("",)), class_=class_)


def _column(cards: Iterable[str]) -> str:
    return svg.tag("div", *(tuple(cards) or ("",)), class_="col")


def _head(state: FleetState, title: str) -> str:
    words = svg.tag("b", escape(title)) + " · " if title else ""
    moment = f" · after {format_seconds(max(0.0, state.time - state.began))}"
    return svg.tag("p", words, escape(summarize(state)), svg.tag("span", escape(moment), class_="faint"),
                   style="margin:6px 8px")  # fmt: skip


def _front(state: FleetState, chosen: str, stop: str) -> str:
    """Draw the front: its waiting samples, the number of ended samples by reason, and the last ended ones."""
    ended = ", ".join(f"{count:,} {reason}" for reason, count in sorted(state.num_ended.items())) or "none"
    return svg.tag(
        "div", svg.tag("h4", "front"), _chips(state.waiting, chosen, stop, "no sample waits"),
        svg.tag("div", escape(f"ended: {ended}"), class_="faint under"),
        _chips(_last_ended(state), chosen, stop, ""), class_="card", role="group", aria_label="front",
    )  # fmt: skip


def _card(replica: FleetReplica, chosen: str, stop: str, most: int) -> str:
    name = f"replica {replica.number}" if replica.number else "engine"
    about = " · ".join(filter(None, (replica.role, replica.state, count_of(len(replica.samples), "sample"))))
    done = f"{count_of(replica.steps, 'step')}, {count_of(replica.output_tokens, 'token')}"
    head = svg.tag("div", svg.tag("h4", name), svg.tag("span", escape(about), class_="faint"), class_="head")
    return svg.tag(
        "div", head, _pages(replica, most), _chips(replica.samples, chosen, stop, "no sample"),
        svg.tag("div", done, class_="faint under"),
        class_="card" if replica.state == "serves" else "card lost", role="group", aria_label=f"{name}: {about}",
    )  # fmt: skip


def _pages(replica: FleetReplica, most: int) -> str:
    """Draw a bar of pages in use and idle pages, framed by all pages where their number is known; else the replica with
    the most fills it."""
    whole = replica.pages or max(most, 1)
    words = f"{replica.used:,} in use, {replica.idle:,} idle"
    words = f"pages after its last step: {words}" if replica.free is None else f"pages: {words}, {replica.free:,} free"
    x, parts = 0.0, list[str]()
    for count, css in ((replica.used, "us"), (replica.idle, "id")):
        wide = 100 * min(1.0, count / whole)
        if count:
            parts.append(svg.tag("rect", x=f"{x:g}%", y=1, width=f"{wide:g}%", height=BAR_HEIGHT - 2, class_=css))
        x += wide
    frame = "pages" if replica.pages else "pages unknown"
    bar = svg.tag("svg", *parts, class_=frame, height=BAR_HEIGHT, role="img", aria_label=words)
    return (bar if parts or replica.pages else "") + svg.tag("div", words, class_="faint")


def _chips(samples: Sequence[FleetSample], chosen: str, stop: str, none: str) -> str:
    shown = samples[:MAX_SAMPLES]
    if not shown:
        return svg.tag("div", none, class_="none") if none else ""
    chips = [_chip(each, chosen, stop) for each in shown]
    if len(samples) > len(shown):
        chips.append(svg.tag("span", f"and {len(samples) - len(shown):,} more", class_="faint"))
    return svg.tag("div", *chips, class_="chips")


def _chip(sample: FleetSample, chosen: str, stop: str) -> str:
    css = {"in flight": "fly", "ended": "ended"}.get(sample.place) or PHASES.get(sample.phase, "qu")
    count = f" {count_of(sample.pages, 'page')}" if sample.place == "in flight" else f" {sample.output_tokens}"
    moved = f" ↷{sample.moves}" if sample.moves else ""
    tip = f"{sample.name}: {sample.phase}, {sample.prompt_tokens:,} prompt tokens, {sample.output_tokens:,} of output"
    tip += f"; left {count_of(sample.moves, 'replica')}" if sample.moves else ""
    tip += f"; from {sample.source} to {sample.replica or 'none yet'}" if sample.place == "in flight" else ""
    return svg.tag(
        "span", escape(truncate_text(sample.name, MAX_NAME_LETTERS) + moved + count),
        class_=f"chip {css} on" if sample.name == chosen else f"chip {css}", data_key=f"@{sample.name}", data_tip=tip,
        role="button", aria_label=tip, aria_pressed="true" if sample.name == chosen else "false",
        tabindex=0 if sample.name == stop else -1,
    )  # fmt: skip


def _flight(state: FleetState, chosen: str, stop: str) -> str:
    """Draw the pages in flight between the pools, and the totals handed over so far."""
    head = f"in flight: {count_of(sum(each.pages for each in state.in_flight), 'page')} →"
    over = f"{count_of(state.num_handed_over, 'sample')}, {count_of(state.pages_handed_over, 'page')}"
    return svg.tag(
        "div", svg.tag("h4", head), _chips(state.in_flight, chosen, stop, "nothing now"),
        svg.tag("div", f"handed over: {over}, {format_bytes(state.bytes_handed_over)}", class_="faint under"),
        class_="card", role="group", aria_label="pages in flight",
    )  # fmt: skip


def _legend() -> str:
    chips = "".join(
        svg.tag("span", word, class_=f"chip {css}", style="cursor:default")
        for word, css in (("waiting", "qu"), ("prefill", "pf"), ("decode", "de"), ("pages in flight", "fly"))
    )
    words = "the number: output tokens; ↷ left a replica. Click a sample for its way."
    return svg.tag(
        "div", svg.tag("div", chips, svg.tag("span", words, class_="faint"), class_="chips"), class_="wb-fl one"
    )


def _news(state: FleetState, chosen: str) -> str:
    """Draw a list of the latest routings, moves and handovers, the last one first."""
    latest = state.news[: -MAX_NEWS - 1 : -1]
    if not latest:
        return ""
    items = [svg.tag("li", escape(news_line(each, state.began)), class_="own" if _name(each) == chosen else None)
             for each in latest]  # fmt: skip
    return svg.tag("ul", *items, class_="wb-news", data_scroll="", aria_label="where requests went, and why")


def _name(event: News) -> str:
    return f"{event.request_id}#{event.sample}" if event.sample else event.request_id


def _chosen(state: FleetState, sample: FleetSample) -> str:
    """Draw a sample's path, and the figures of each replica at the router's last choice for it."""
    own = [each for each in state.news if _name(each) == sample.name]
    where = {"front": "at the front", "ended": f"ended: {sample.phase}", "in flight": "its pages are on their way"}
    place = where.get(sample.place, f"at replica {sample.replica}, {sample.phase}")
    parts = [
        svg.tag("h4", escape(f"{sample.name}: {place}, {count_of(sample.output_tokens, 'token')}"), style="margin:8px")
    ]
    if own:
        parts.append(svg.tag("ul", *(svg.tag("li", escape(news_line(each, state.began))) for each in own),
                             class_="wb-news wb-own"))  # fmt: skip
    routed = next((each for each in reversed(own) if isinstance(each, Routed) and each.options), None)
    if routed is not None:
        heads = "".join(svg.tag("th", head) for head in ("replica", "samples", "tokens to compute", "cached of it"))
        rows = [
            svg.tag("tr", *(svg.tag("td", f"{value:,}") for value in option),
                    class_="own" if option.replica == routed.replica else None)
            for option in routed.options
        ]  # fmt: skip
        parts.append(svg.tag("div", svg.tag("table", svg.tag("tr", heads), *rows, class_="wb-options"),
                             class_="wb-scroll"))  # fmt: skip
    return "".join(parts)
