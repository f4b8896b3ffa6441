"""Draw a prompt: figures, a strip to scale, its segments as bands, the chosen segment's tokens, and the templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from workbench import svg
from workbench.display import truncate_text
from workbench.prompt.turns import describe_turn
from workbench.units import format_percent
from workbench.widgets.prompt.data import KINDS, AssembledView, Band, BandGroup, TemplateOutcome, is_generated
from workbench.widgets.tokens.picture import STYLE as TOKEN_STYLE
from workbench.widgets.tokens.picture import draw_piece

LAYOUTS = ("segments", "text", "template")
PAGE_TOKENS = 500  # tokens of a segment that are drawn on a page
EXCERPT_TOKENS, EXCERPT_CHARACTERS = 64, 160
MAX_TEXT = 40_000  # characters of the layout `text`
MAX_CUT = 40  # most cut turns that are listed
MAX_STRIP = 240  # most groups of bands in the strip
COLOURS = {
    "system": "#0072b2", "tool": "#e69f00", "document": "#b8a800", "user": "#009e73", "answer": "#56b4e9",
    "thought": "#cc79a7", "call": "#d55e00", "result": "#e69f00", "argument": "#7d7d7d", "template": "#8a8a8a",
}  # fmt: skip
KIND_NAMES = {"template": "written by the template", "tool": "declaration of a tool", "argument": "template argument"}
BORDER = "var(--jp-border-color2,rgba(128,128,128,.35))"
MONO = "var(--jp-code-font-family,ui-monospace,monospace)"
STYLE = (
    ".wb-pic .wb-pf{display:flex;flex-wrap:wrap;gap:2px 22px;margin:4px 0 6px}.wb-pf div{display:flex;"
    "flex-direction:column}.wb-pf small{font-size:11px;opacity:.75}.wb-pf span{font-size:15px;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}"
    f".wb-strip{{display:flex;height:22px;border:1px solid {BORDER};border-radius:3px;overflow:hidden}}"
    ".wb-strip i{flex:1 1 0;min-width:0;overflow:hidden;font:600 11px/22px system-ui,sans-serif;text-align:center;"
    "color:#000}"
    ".wb-strip i.template{background:repeating-linear-gradient(45deg,#8a8a8a 0 2px,transparent 2px 5px)}"
    ".wb-under{position:relative;height:17px;margin:2px 0 6px;font-size:11px;white-space:nowrap}"
    ".wb-under b{position:absolute;left:0;top:0;height:4px;background:currentColor}"
    ".wb-under em{position:absolute;inset:0 0 auto;height:3px;border:1px dotted;opacity:.6}"
    ".wb-under span{position:absolute;top:4px}"
    ".wb-mark{position:absolute;top:-26px;height:30px;border-left:2px solid #d55e00}"
    f".wb-bands{{max-height:30em;overflow:auto;border:1px solid {BORDER};border-radius:3px}}"
    ".wb-row{display:grid;grid-template-columns:20px 11em 5.4em 4.6em 4.2em minmax(6em,1fr);gap:0 8px;"
    f"align-items:baseline;padding:2px 8px 2px 0;border-bottom:1px solid {BORDER}}}"
    ".wb-row[data-key]{cursor:pointer}.wb-row[data-key]:hover{background:var(--jp-layout-color2,rgba(128,128,128,.12))}"
    ".wb-row.on{background:var(--jp-layout-color2,rgba(128,128,128,.16))}"
    ".wb-row>*{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}"
    ".wb-row .num{text-align:right;font-variant-numeric:tabular-nums}"
    ".wb-row .sw{align-self:stretch;text-align:center;font-weight:600;font-size:11px;line-height:18px;color:#000;"
    "margin:-2px 0}"
    ".wb-row .sw.template{background:repeating-linear-gradient(45deg,#8a8a8a 0 2px,transparent 2px 5px)}"
    ".wb-row.template>:not(.sw){opacity:.75}"
    f".wb-row q{{quotes:none;font:12px {MONO}}}.wb-row small{{font-size:11px;opacity:.8}}"
    ".wb-head{position:sticky;top:0;z-index:1;background:var(--jp-layout-color1,#f4f4f4)}.wb-head>span{font-size:11px}"
    ".wb-pic .wb-ctl{font-style:normal;text-decoration:none;border-radius:2px;padding:0 2px;background:currentColor}"
    ".wb-pic .wb-ctl>span{color:var(--jp-layout-color0,#fff)}"
    ".wb-pic .wb-forged{outline:1px dotted;outline-offset:-1px;border-radius:2px}"
    f".wb-open{{padding:6px 10px 8px 28px;border-bottom:1px solid {BORDER}}}.wb-open p{{margin:0 0 4px}}"
    ".wb-break{color:var(--jp-error-color1,#b00020);padding:3px 8px 3px 28px;font-weight:600;cursor:pointer;"
    f"overflow-wrap:anywhere;border-bottom:1px solid {BORDER}}}"
    f".wb-pages{{display:flex;gap:8px;align-items:baseline}}"
    f".wb-pic .wb-button{{font-family:inherit;font-size:12px;padding:0 8px;"
    f"border:1px solid {BORDER};border-radius:3px;background:none;color:inherit;cursor:pointer}}"
    ".wb-pic .wb-button[disabled]{opacity:.4;cursor:default}"
    ".wb-pic pre.wb-prompt{white-space:pre-wrap;overflow-wrap:anywhere;word-break:normal;max-height:30em;overflow:auto}"
    f".wb-pic pre.wb-prompt{{"
    f"font:12px/1.6 {MONO};margin:0;padding:6px 8px;border:1px solid {BORDER};border-radius:3px;background:none;"
    "color:inherit}"
    "pre.wb-prompt .w{opacity:.6}pre.wb-prompt .p{border-bottom:2px solid}"
    ".wb-pic table.wb-outcomes{border-collapse:collapse;margin:8px 0 2px;border:0}"
    ".wb-pic .wb-outcomes :is(th,td){border:0;text-align:right;padding:1px 18px 1px 0;background:none;"
    "font-size:12px;font-weight:400;vertical-align:top;white-space:nowrap}"
    ".wb-pic .wb-outcomes :is(th,td):is(:first-child,:last-child){text-align:left}"
    ".wb-pic .wb-outcomes td:last-child{white-space:normal;overflow-wrap:anywhere}"
    ".wb-outcomes thead th{font-size:11px;opacity:.75}.wb-outcomes tr[data-key]{cursor:pointer}"
    ".wb-pic .wb-outcomes tr.on th{font-weight:600}"
    "@media print{.wb-bands,.wb-pic pre.wb-prompt{max-height:none}}"
)


@dataclass(frozen=True)
class PromptState:
    """The state of a prompt's picture: layout, chosen segment (-1: none), its page of tokens, and the open group."""

    layout: str = LAYOUTS[0]
    chosen: int = -1
    opened: str = ""
    page: int = 0


def draw_prompt(view: AssembledView, state: PromptState, template_text: str) -> str:
    parts = [svg.tag("style", TOKEN_STYLE + STYLE), _figures(view), _strip(view)]
    if view.error:
        parts.append(svg.tag("div", f"✗ {escape(view.error)}", role="alert", class_="wb-break"))
    if state.layout == "text":
        parts.append(_whole_text(view))
    elif state.layout == "template":
        names = tuple(view.tokenizer.special_token_ids)
        source = _spelled(template_text[:MAX_TEXT], names, "wb-forged")
        parts.append(svg.tag("pre", source, class_="wb-prompt", data_scroll="", tabindex=0, aria_label="the template"))
    else:
        parts.append(_bands(view, state))
    if len(view.outcomes) > 1:
        parts.append(_outcomes(view))
    return svg.html(*parts)


def _figures(view: AssembledView) -> str:
    anew = view.num_tokens - (view.cached_tokens or 0)
    rows = [("prompt", f"{view.num_tokens:,} tokens", "all segments together")]
    if view.cached_tokens is None:
        rows.append(("cached", "no prefix cache", "load the runner with prefix='radix' for one"))
    else:
        rows.append(("cached", f"{view.cached_tokens:,}", "tokens whose keys and values are in the prefix cache"))
        rows.append(("computed anew", f"{anew:,}", "tokens that a request for this prompt would compute"))
    share = format_percent(view.written_tokens / view.num_tokens) if view.num_tokens else "–"
    rows.append(("of the template", f"{view.written_tokens:,} ({share})", "tokens that people did not write"))
    rows.append(("control tokens", f"{view.num_control_tokens:,}", "tokens without a text: only the template's own"))
    if view.context:
        rows.append(("context", f"{view.context:,}", "tokens that prompt and answer may have together"))
    if view.prompt.cut:
        words = f"{len(view.prompt.cut):,} turns, {view.prompt.cut_tokens:,} tokens"
        rows.append(("cut to fit", words, "the oldest turns, which the model does not see"))
    cells = (svg.tag("div", svg.tag("small", n), svg.tag("span", escape(v)), data_tip=tip) for n, v, tip in rows)
    return svg.tag("div", *cells, class_="wb-pf")


def _strip(view: AssembledView) -> str:
    """Draw the prompt to scale, with its cached part below, and its first difference from the previous prompt."""
    total = max(1, view.num_tokens)
    pieces = [
        svg.tag(
            "i", _letter(kind, tokens / total), style=f"flex-grow:{tokens}" + _background(kind),
            class_=kind if kind == "template" else None, data_tip=f"{name}: {tokens:,} tokens",
        )
        for kind, name, tokens in _strip_pieces(view)
    ]  # fmt: skip
    under = []
    if view.cached_tokens is not None:
        share = 100 * view.cached_tokens / total
        under = [svg.tag("em", ""), svg.tag("b", "", style=f"width:{share:.2f}%")]
        if view.cached_tokens:
            under.append(svg.tag("span", f"cached: {view.cached_tokens:,}"))
    if view.divergence is not None:
        at = 100 * view.divergence.token / total
        place = f"right:{max(0.0, 100 - at):.2f}%" if at > 50 else f"left:{at:.2f}%"
        under.append(svg.tag("i", "", class_="wb-mark", style=f"left:{min(at, 99.8):.2f}%"))
        words = f"&nbsp;the prefix breaks at token {view.divergence.token:,}&nbsp;"
        under.append(svg.tag("span", words, style=place, class_="wb-at"))
    if 0 < view.context < view.num_tokens:
        at = f"left:{100 * view.context / total:.2f}%"
        under.append(svg.tag("i", "", class_="wb-mark", style=f"{at};border-color:currentColor"))
        under.append(svg.tag("span", "&nbsp;the context ends here", style=at))
    bar = svg.tag("div", *pieces, class_="wb-strip", role="img", aria_label=_strip_words(view))
    return bar + svg.tag("div", *(under or [""]), class_="wb-under")


def _strip_words(view: AssembledView) -> str:
    counts: dict[str, int] = {}
    for band in view.bands:
        counts[band.kind] = counts.get(band.kind, 0) + band.num_tokens
    words = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    return f"tokens by what they are: {words}; {view.cached_tokens or 0:,} of {view.num_tokens:,} cached"


def _strip_pieces(view: AssembledView) -> Iterator[tuple[str, str, int]]:
    """Yield (kind, name, tokens) in order; of many bands, some neighbours are merged by kind."""
    bands = view.bands
    step = -(-len(bands) // MAX_STRIP) if bands else 1
    for first in range(0, len(bands), step):
        some = bands[first : first + step]
        counts: dict[str, int] = {}
        for each in some:
            counts[each.kind] = counts.get(each.kind, 0) + each.num_tokens
        name = some[0].segment.name if len(some) == 1 else f"{some[0].segment.name} to {some[-1].segment.name}"
        yield from ((kind, name, tokens) for kind, tokens in counts.items())


def _letter(kind: str, share: float) -> str:
    return KINDS[kind] if share > 0.02 else ""


def _background(kind: str) -> str:
    return "" if kind == "template" else f";background:{COLOURS[kind]}"


def _bands(view: AssembledView, state: PromptState) -> str:
    heads = ("", "segment", "from", "tokens", "cached", "text")
    marks = ("", "", "num", "num", "num", "")
    head = (svg.tag("span", name, class_=mark or None) for name, mark in zip(heads, marks, strict=True))
    rows = [svg.tag("div", *head, class_="wb-row wb-head")]
    broken = view.containing(view.divergence.token) if view.divergence is not None else -1
    cut_at = next((each.index for each in view.bands if each.segment.turn is not None), 0) if view.prompt.cut else -1
    for row in view.rows:
        inside = range(row.first, row.last) if isinstance(row, BandGroup) else range(row.index, row.index + 1)
        if cut_at in inside:
            rows.append(_cut(view, state))
        if isinstance(row, BandGroup):
            opened = state.opened == str(row.first)
            rows.append(_group_row(row, opened))
            rows += [_band_row(view, each, state) for each in view.bands[row.first : row.last] if opened]
        else:
            rows.append(_band_row(view, row, state))
        if broken in inside:
            words = f"▲ the prefix of the prompt before ends at {escape(str(view.divergence))}"
            rows.append(svg.tag("div", words, class_="wb-break", data_key="break:", tabindex=-1, role="button"))
    return svg.tag("div", *rows, class_="wb-bands", data_scroll="", role="group", aria_label="segments of the prompt")


def _band_row(view: AssembledView, band: Band, state: PromptState) -> str:
    segment, chosen = band.segment, band.index == state.chosen
    name = segment.name if segment.turn is None else f"{segment.name.split(':')[0]} · {band.kind}"
    name = "template" if band.kind == "template" else name
    tip = f"{segment.name}: {KIND_NAMES.get(band.kind, band.kind)}"
    if band.note:
        tip += f"\nread back from text, not as it was generated: {band.note}"
    if band.forged:
        tip += f"\nspells {', '.join(band.forged)}: plain text to the model"
    cells = [
        svg.tag("span", KINDS[band.kind], class_=f"sw {band.kind}", style=_background(band.kind).lstrip(";") or None),
        svg.tag("span", escape(name) + (" ⟲" if band.note else "")),
        svg.tag("span", f"{segment.start:,}", class_="num"),
        svg.tag("span", f"{band.num_tokens:,}", class_="num"),
        svg.tag("span", _cached(view, band.cached, band.num_tokens), class_="num"),
        svg.tag("q", _excerpt(view, band)),
    ]
    row = svg.tag(
        "div", *cells, class_="wb-row" + " template" * (band.kind == "template") + " on" * chosen, role="button",
        aria_expanded=str(chosen).lower(), data_key=f"band:{band.index}", tabindex=0 if band.index == 0 else -1,
        data_row="", data_tip=tip,
    )  # fmt: skip
    return row + (_tokens(view, band, state.page) if chosen else "")


def _cached(view: AssembledView, cached: int, tokens: int) -> str:
    if view.cached_tokens is None:
        return "–"
    return "all" if cached == tokens else f"{cached:,}"


def _group_row(group: BandGroup, opened: bool) -> str:
    turns = "" if group.turns is None else f"messages {group.turns[0]:,} to {group.turns[1]:,}"
    count = f"{group.last - group.first} segments"
    cells = [
        svg.tag("span", "▾" if opened else "▸"),
        svg.tag("span", turns or count),
        svg.tag("span", "", class_="num"),
        svg.tag("span", f"{group.num_tokens:,}", class_="num"),
        svg.tag("span", "all" if group.cached == group.num_tokens else f"{group.cached:,}", class_="num"),
        svg.tag("small", f"{count}; click to {'close' if opened else 'open'}"),
    ]
    return svg.tag(
        "div", *cells, class_="wb-row", role="button", aria_expanded=str(opened).lower(), tabindex=-1,
        data_key=f"group:{group.first}", data_row="",
    )  # fmt: skip


def _cut(view: AssembledView, state: PromptState) -> str:
    cut, opened = view.prompt.cut, state.opened == "cut"
    cells = [
        svg.tag("span", "✂"), svg.tag("span", f"{len(cut):,} turns cut"), svg.tag("span", "", class_="num"),
        svg.tag("span", f"−{view.prompt.cut_tokens:,}", class_="num"), svg.tag("span", "", class_="num"),
        svg.tag("small", f"the model does not see them; click to {'close' if opened else 'list'}"),
    ]  # fmt: skip
    row = svg.tag(
        "div", *cells, class_="wb-row", role="button", aria_expanded=str(opened).lower(), tabindex=-1,
        data_key="group:cut", data_row="",
    )  # fmt: skip
    if not opened:
        return row
    lines = [f"{turn.role}: {truncate_text(describe_turn(turn), EXCERPT_CHARACTERS)}" for turn in cut[:MAX_CUT]]
    lines += [f"and {len(cut) - MAX_CUT:,} more"] * (len(cut) > MAX_CUT)
    return row + svg.tag("div", *(svg.tag("p", escape(each), class_="faint") for each in lines), class_="wb-open")


def _tokens(view: AssembledView, band: Band, page: int) -> str:
    first = page * PAGE_TOKENS
    pieces = view.pieces(band, first, PAGE_TOKENS)
    notes = []
    if band.note:
        notes.append(f"read back from text, because {band.note}")
    if band.forged:
        control = sum(view.tokenizer.is_special(id) for id in band.segment.token_ids)
        notes.append(f"spells {', '.join(band.forged)}, as plain text: {control} control tokens among these")
    parts = [svg.tag("p", svg.tag("small", escape("; ".join(notes))))] if notes else []
    if band.num_tokens > PAGE_TOKENS:
        last = min(first + PAGE_TOKENS, band.num_tokens)
        parts.append(
            svg.tag(
                "div",
                _button("◀", f"page:{page - 1}", "tokens before these", page == 0),
                svg.tag("span", f"tokens {first + 1:,} to {last:,} of {band.num_tokens:,}"),
                _button("▶", f"page:{page + 1}", "tokens after these", last == band.num_tokens),
                class_="wb-pages",
            )
        )
    marks = [draw_piece(piece, 0, index) for index, piece in enumerate(pieces)]
    parts.append(svg.tag("pre", " ".join(marks), class_="wb-side", data_scroll=""))
    return svg.tag("div", *parts, class_="wb-open")


def _button(sign: str, key: str, label: str, disabled: bool) -> str:
    off = {"disabled": "disabled"} if disabled else {"data_key": key}
    return svg.tag("button", sign, type="button", class_="wb-button", aria_label=label, **off)


def _excerpt(view: AssembledView, band: Band) -> str:
    """Return the beginning of a band on one line, with control tokens marked."""
    ids = band.segment.token_ids[:EXCERPT_TOKENS]
    names = tuple(view.tokenizer.special_token_ids) if band.forged else ()
    if band.kind != "template" and not is_generated(band.segment):
        text = truncate_text(_one_line(band.segment.text[: EXCERPT_CHARACTERS + 1]), EXCERPT_CHARACTERS)
        return _spelled(text, names, "wb-forged")
    more = "…" if len(band.segment.token_ids) > EXCERPT_TOKENS else ""
    return _with_controls(view, ids) + more


def _with_controls(view: AssembledView, ids: Sequence[int]) -> str:
    """Return the text of tokens as HTML, with control tokens as chips."""
    known, parts, run = view.tokenizer, list[str](), b""
    for id in ids:
        if known.is_special(id):
            parts += [escape(_one_line(run.decode("utf-8", "replace")), quote=False), _chip(known.id_to_token(id))]
            run = b""
        else:
            run += known.token_bytes(id)
    return "".join([*parts, escape(_one_line(run.decode("utf-8", "replace")), quote=False)])


def _chip(name: str) -> str:
    return svg.tag("u", svg.tag("span", escape(name)), class_="wb-ctl")


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎")


def _spelled(text: str, names: Sequence[str], style: str) -> str:
    """Return a text as HTML, with the names of control tokens in it marked by the CSS class `style`."""
    found = escape(text, quote=False)
    for name in names:
        known = escape(name, quote=False)
        if name and known in found:
            found = found.replace(known, svg.tag("span", known, class_=style))
    return found


def _whole_text(view: AssembledView) -> str:
    """Draw the prompt as one text: the template's parts faint with marked control tokens, the others underlined in the
    colour of their kind."""
    parts, size, total = [], 0, sum(len(each.segment.text) for each in view.bands)
    for band in view.bands:
        if size > MAX_TEXT:
            parts.append(f"… and {total - size:,} more characters")
            break
        room = MAX_TEXT - size
        text = band.segment.text[: max(room, 0)]
        size += len(band.segment.text)
        if band.kind == "template":
            markup = _with_controls(view, band.segment.token_ids).replace("⏎", "\n")
            parts.append(svg.tag("span", markup or "", class_="w"))
        else:
            names = tuple(view.tokenizer.special_token_ids) if band.forged else ()
            style = f"border-color:{COLOURS[band.kind]}"
            tip = f"{band.segment.name}: {band.num_tokens:,} tokens"
            parts.append(svg.tag("span", _spelled(text, names, "wb-forged"), class_="p", style=style, data_tip=tip))
    return svg.tag("pre", *(parts or [""]), class_="wb-prompt", data_scroll="", tabindex=0, aria_label="the prompt")


def _outcomes(view: AssembledView) -> str:
    heads = ("template", "tokens", "its own", "compared with the previous prompt" if view.compared else "")
    head = svg.tag("thead", svg.tag("tr", *(svg.tag("th", each, scope="col") for each in heads)))
    rows = (_outcome(each, each.name == view.template, view.compared) for each in view.outcomes)
    return svg.tag("table", head, svg.tag("tbody", *rows), class_="wb-outcomes")


def _outcome(outcome: TemplateOutcome, chosen: bool, compared: bool) -> str:
    if outcome.prompt is None:
        words, counts = f"✗ {outcome.error}", ("–", "–")
    else:
        counts = f"{len(outcome.prompt.ids):,}", f"{outcome.written_tokens:,}"
        words = str(outcome.divergence) if outcome.divergence is not None else "begins with all of it"
        words = ("parts at " * (outcome.divergence is not None) + words) if compared else ""
        words = f"✗ {outcome.error}" if outcome.error else words
    cells = [svg.tag("th", escape(outcome.name), scope="row"), *(svg.tag("td", each) for each in counts)]
    return svg.tag(
        "tr", *cells, svg.tag("td", escape(words)), class_="on" if chosen else None, tabindex=-1,
        data_key=f"template:{outcome.name}", data_row="",
    )  # fmt: skip
