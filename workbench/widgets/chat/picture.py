"""Draw a chat: questions with branches, answers with folded thoughts, tool calls, and the cost of each round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from workbench import svg
from workbench.display import truncate_text
from workbench.trace.agent_events import RoundFinished
from workbench.units import format_seconds
from workbench.widgets.chat.data import ChatPart, Exchange

MAX_INLINE = 120  # most characters of arguments or a result without a fold
MAX_RESULT = 20_000  # most characters of a result
CACHED_TIP = "the part of the prompt that was cached: whole pages of tokens, the same from the first one on"
BORDER = "var(--jp-border-color2,rgba(128,128,128,.35))"
MONO = "var(--jp-code-font-family,ui-monospace,monospace)"
ENDS = {
    "cancelled": "stopped", "max_tokens": "cut at max_tokens", "stop_sequence": "", "end_turn": "",
    "tool_use": "a call waits for a result: its tool has no function", "max_rounds": "the limit of rounds",
    "max_seconds": "the limit of seconds", "max_total_tokens": "the limit of tokens",
    "max_context": "the model's context is full", "error": "",
}  # fmt: skip
STYLE = (
    f".wb-pic .wb-talk{{max-height:36em;max-width:62em;box-sizing:border-box}}"
    f".wb-talk{{overflow:auto;border:1px solid {BORDER};border-radius:4px;padding:8px 10px}}"
    ".wb-exchange+.wb-exchange{margin-top:10px}"
    ".wb-ask{display:flex;flex-direction:column;align-items:flex-end;margin-bottom:6px}"
    ".wb-say{max-width:85%;max-height:14em;overflow:auto;background:var(--jp-layout-color2,#eee);"
    "border-radius:10px 10px 2px 10px;padding:6px 10px;"
    "font-size:13px;line-height:1.45;white-space:pre-wrap;overflow-wrap:anywhere}"
    ".wb-tools{display:flex;gap:6px;align-items:center;font-size:11px;margin-top:2px;min-height:20px}"
    ".wb-pic .wb-tools button{font-family:inherit;font-size:11px;padding:0 6px;height:20px;border-radius:3px;"
    f"border:1px solid {BORDER};background:none;color:inherit;cursor:pointer}}"
    ".wb-pic .wb-tools button[disabled]{opacity:.35;cursor:default}"
    ".wb-pic .wb-tools button:focus-visible{outline:2px solid #d55e00}"
    ".wb-answer{font-size:13px;line-height:1.5}"
    ".wb-text{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0}"
    f".wb-answer details{{margin:3px 0;border-left:3px solid {BORDER};padding-left:8px}}"
    ".wb-answer details.thought{border-color:#cc79a7}.wb-answer summary{cursor:pointer;font-size:12px;opacity:.85}"
    ".wb-answer summary:focus-visible{outline:2px solid #d55e00}"
    ".wb-answer details .wb-text{opacity:.85}"
    ".wb-call{margin:4px 0;border-left:3px solid #e69f00;padding:1px 0 1px 8px}"
    f".wb-call code{{font:12px/1.5 {MONO};background:none;color:inherit;padding:0;white-space:pre-wrap;"
    "overflow-wrap:anywhere}.wb-call .name{font-weight:600}.wb-call .arrow{opacity:.7}"
    ".wb-call small{opacity:.75;font-size:11px}"
    ".wb-fault{color:var(--jp-error-color1,#b00020);overflow-wrap:anywhere}"
    ".wb-cost{font-size:11px;opacity:.85;margin:3px 0 0;display:flex;flex-wrap:wrap;gap:2px 12px;align-items:center;"
    "font-variant-numeric:tabular-nums}"
    f".wb-share{{display:inline-block;width:72px;height:6px;border:1px solid {BORDER};vertical-align:middle}}"
    ".wb-share i{display:block;height:100%;background:#009e73}"
    ".wb-wait{opacity:.7}.wb-pic .wb-empty{opacity:.7;padding:10px 2px}"
    ".wb-about{display:flex;flex-wrap:wrap;gap:2px 22px;margin:2px 0 6px}.wb-about small{font-size:11px;opacity:.75;"
    "display:block}.wb-about span{font-size:13px;overflow-wrap:anywhere}"
    "@media print{.wb-pic .wb-talk{max-height:none}}"
)


def draw_chat(path: Sequence[Exchange], editing: int = 0, busy: bool = False) -> str:
    """Draw the exchanges of a branch; their buttons are disabled while the model is `busy`."""
    parts = [draw_exchange(each, editing, busy) for each in path]
    if not parts:
        parts = [svg.tag("div", "Write a message below. Enter sends it.", class_="wb-empty")]
    talk = svg.tag(
        "div", *parts, class_="wb-talk", role="log", aria_label="conversation", data_scroll="end", tabindex=0
    )
    return svg.tag("style", STYLE) + talk


def draw_exchange(exchange: Exchange, editing: int = 0, busy: bool = False) -> str:
    number = exchange.number
    mark = " (editing)" if editing == number else ""
    said = svg.tag("div", escape(exchange.question, quote=False), class_="wb-say")
    ask = svg.tag("div", said, _question_buttons(exchange, busy, mark), class_="wb-ask")
    answer = [*_answer_parts(exchange), *_ends(exchange), *_costs(exchange)]
    body = svg.tag("div", *(answer or [""]), class_="wb-answer", aria_label=f"answer {number}", role="group")
    return svg.tag("div", ask, body, class_="wb-exchange")


def region(exchange: Exchange, place: int) -> str:
    """Return the name of the region of markup to which the pieces of an answer's part are added as they stream."""
    return f"p{exchange.number}.{place}"


def draw_piece_of_text(text: str) -> str:
    return svg.tag("span", escape(text, quote=False))


def _question_buttons(exchange: Exchange, busy: bool, mark: str) -> str:
    place, count = exchange.branch
    number = exchange.number
    parts = []
    if count > 1:
        parts = [
            _button("‹", f"branch:{number}:{place - 1}", "the branch before", busy or place == 0),
            svg.tag("span", f"{place + 1}/{count}", aria_label=f"branch {place + 1} of {count}"),
            _button("›", f"branch:{number}:{place + 1}", "the next branch", busy or place == count - 1),
        ]
    parts += [
        _button("Edit", f"edit:{number}", f"edit message {number}", busy),
        _button("Again", f"again:{number}", f"answer message {number} again", busy),
    ]
    return svg.tag("div", *parts, *([svg.tag("span", mark)] if mark else []), class_="wb-tools")


def _button(words: str, key: str, label: str, disabled: bool) -> str:
    off = {"disabled": "disabled"} if disabled else {"data_key": key}
    return svg.tag("button", escape(words), type="button", aria_label=label, title=label, **off)


def _answer_parts(exchange: Exchange) -> Iterator[str]:
    for place, part in enumerate(exchange.parts):
        name = region(exchange, place)
        if part.kind == "thought":
            yield _thought(exchange, part, name)
        elif part.kind == "text":
            yield svg.tag("div", *(_pieces(part) or [""]), class_="wb-text", data_grows=name)
        else:
            yield _call(part, name, exchange.running)
    if exchange.running and not exchange.parts:
        tokens = f" of {exchange.prompt_tokens:,} tokens" if exchange.prompt_tokens else ""
        yield svg.tag("div", f"reading the prompt{tokens} …", class_="wb-wait", role="status")


def _pieces(part: ChatPart) -> list[str]:
    return [draw_piece_of_text(each) for each in part.pieces]


def _thought(exchange: Exchange, part: ChatPart, name: str) -> str:
    tokens = [each.thinking_tokens for each in exchange.rounds if each.round == part.round]
    words = "thinking …" if exchange.running and not part.is_complete else "thought"
    words += f" · {tokens[0]:,} tokens" if tokens and tokens[0] else ""
    inside = svg.tag("div", *(_pieces(part) or [""]), class_="wb-text", data_grows=name)
    return svg.tag("details", svg.tag("summary", words), inside, class_="thought", data_fold=name)


def _call(part: ChatPart, name: str, running: bool) -> str:
    if not part.is_complete:  # the JSON so far
        return svg.tag(
            "div", svg.tag("code", *(_pieces(part) or [""]), data_grows=name), class_="wb-call", aria_label="a call"
        )
    arguments = json.dumps(part.arguments, ensure_ascii=False)
    head = svg.tag("code", svg.tag("span", escape(part.name), class_="name"), f"({escape(_short(arguments))})")
    if part.result is None:
        after = svg.tag("small", " running …" if running else " not run", role="status")
        return svg.tag("div", head, after, class_="wb-call")
    took = svg.tag("small", f" {format_seconds(part.seconds)}") if part.seconds else ""
    if part.error:
        lines = part.error.strip().splitlines() or [""]
        shown = svg.tag("span", f" ✗ {escape(truncate_text(lines[-1], MAX_INLINE))}", class_="wb-fault")
    else:
        shown = svg.tag("span", " → ", class_="arrow") + svg.tag("code", escape(_short(part.result)) or "&quot;&quot;")
    texts = (("arguments", arguments), ("result", part.result), ("printed", part.printed))
    folds = [
        _fold(f"{name}.{label}", label, text) for label, text in texts if label == "printed" and text or _is_long(text)
    ]
    return svg.tag("div", head, shown, took, *folds, class_="wb-call")


def _is_long(text: str) -> bool:
    return len(text) > MAX_INLINE or "\n" in text.strip()


def _short(text: str) -> str:
    return truncate_text(text.strip().replace("\n", "⏎"), MAX_INLINE)


def _fold(name: str, label: str, text: str) -> str:
    words = f"{label}: {len(text):,} characters"
    inside = svg.tag("div", svg.tag("code", escape(truncate_text(text, MAX_RESULT))), class_="wb-text")
    return svg.tag("details", svg.tag("summary", words), inside, data_fold=name)


def _ends(exchange: Exchange) -> Iterator[str]:
    if exchange.error:
        yield svg.tag("div", f"✗ {escape(exchange.error)}", class_="wb-fault", role="alert")
    elif words := ENDS.get(exchange.stop_reason, exchange.stop_reason):
        yield svg.tag("div", f"■ {words}", class_="wb-wait")
    if not exchange.running and exchange.conversation is None:
        yield svg.tag("div", "not part of the conversation: the next message is asked without it", class_="wb-wait")


def _costs(exchange: Exchange) -> Iterator[str]:
    """Draw the cost of each round: cached and computed prompt tokens, TTFT, and output tokens."""
    several = len(exchange.rounds) > 1
    for each in exchange.rounds:
        share = 100 * each.cached_tokens / max(1, each.prompt_tokens)
        bar = svg.tag("span", svg.tag("i", "", style=f"width:{share:.1f}%"), class_="wb-share", data_tip=CACHED_TIP)
        words = [f"round {each.round + 1}"] if several else []
        words += [
            f"prompt {each.prompt_tokens:,} = {each.cached_tokens:,} cached + {each.computed_tokens:,} computed",
            f"TTFT {format_seconds(each.ttft)}",
            _output(each),
        ]
        yield svg.tag("div", bar, *(svg.tag("span", escape(word)) for word in words), class_="wb-cost")


def _output(each: RoundFinished) -> str:
    thought = f", {each.thinking_tokens:,} of them thought" if each.thinking_tokens else ""
    return f"{each.output_tokens:,} tokens generated{thought}"


def draw_about(rows: Sequence[tuple[str, str]]) -> str:
    """Draw a table of facts about the model, its tools and the context, given as (name, value)."""
    cells = (
        svg.tag("div", svg.tag("small", escape(name)), svg.tag("span", escape(truncate_text(value, 200))))
        for name, value in rows
    )
    return svg.tag("style", STYLE) + svg.tag("div", *cells, class_="wb-about")
