// Cursor, zoom and selection over the picture of the same widget, whose element with data-axis says where its axis of time is:
// "low high left right top bottom begin", times in seconds and places in the picture's own units. Cursor and selection are
// shown here at once; what was done goes to the kernel, one message at a time, the last of each kind.
const HINT = "Hover, click to keep it, or ←/→: cursor. Drag or Page ↑/↓: move. Shift+drag or Shift+←/→: select. Ctrl+wheel, or the wheel once "
  + "this line has the focus, or +/−: zoom. Double click or 0: all. End: newest. Delete: no selection.";
const DRAG_PIXELS = 4, HEARD_MS = 1000;

function render({ model, el }) {
  const make = (name, parent, tag = "div") => {
    const made = document.createElement(tag);
    made.className = name;
    parent.append(made);
    return made;
  };
  el.classList.add("wb-timeaxis");
  const reading = make("wb-reading", el);
  reading.tabIndex = 0;
  reading.setAttribute("role", "slider");
  reading.setAttribute("aria-label", "cursor on the axis of time");
  const hint = make("wb-hint", el);
  hint.textContent = HINT;
  hint.id = `wb-hint-${Math.random().toString(36).slice(2)}`;
  reading.setAttribute("aria-describedby", hint.id);
  const overlay = document.createElement("div");
  overlay.className = "wb-time-overlay";
  overlay.setAttribute("aria-hidden", "true");
  const selected = make("wb-time-selection", overlay);
  const handles = [make("wb-time-handle", overlay), make("wb-time-handle", overlay)];
  const line = make("wb-time-cursor", overlay);

  let picture = null, drag = null, swallow = false;
  // Where the cursor is once the pointer leaves the panels: where a click, a key or the kernel has put it.
  let kept = model.get("cursor"), hovering = false;
  let cursor = kept, selection = [...model.get("selection")];
  // Where the axis is on the page, or null before it is drawn.
  const axis = () => {
    const mark = picture?.querySelector("[data-axis]"), svg = mark?.closest("svg");
    if (!svg) return null;
    const [low, high, left, right, top, bottom, begin] = mark.dataset.axis.split(" ").map(Number);
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    return { low, high, begin, left: box.left + left * scale, right: box.left + right * scale,
      top: box.top + top * scale, bottom: box.top + bottom * scale };
  };
  const timeAt = (a, x) => a.low + (a.high - a.low) * (x - a.left) / (a.right - a.left);
  const placeOf = (a, time) => a.left + (a.right - a.left) * (time - a.low) / (a.high - a.low);
  const within = (a, event) => a && event.clientX >= a.left && event.clientX <= a.right && event.clientY >= a.top && event.clientY <= a.bottom;

  let waiting = {}, busy = null;
  const send = () => {
    const [kind] = Object.keys(waiting);
    if (kind === undefined || busy) return;
    const message = waiting[kind];
    delete waiting[kind];
    busy = setTimeout(heard, HEARD_MS);
    model.send(message);
  };
  const heard = () => {
    clearTimeout(busy);
    busy = null;
    send();
  };
  const say = (kind, message) => {
    const before = waiting[kind];
    if (before && typeof message[kind] === "number" && kind !== "cursor")
      message[kind] = kind === "zoom" ? message.zoom * before.zoom : message[kind] + before[kind];
    waiting[kind] = message;
    send();
  };

  const show = () => {
    const a = axis();
    overlay.style.display = a ? "block" : "none";
    if (!a) return;
    const box = picture.getBoundingClientRect();
    overlay.style.left = `${a.left - box.left + picture.scrollLeft}px`;
    overlay.style.top = `${a.top - box.top + picture.scrollTop}px`;
    overlay.style.width = `${a.right - a.left}px`;
    overlay.style.height = `${a.bottom - a.top}px`;
    const at = cursor === null ? null : placeOf(a, cursor) - a.left;
    line.style.display = at !== null && at >= 0 && at <= a.right - a.left ? "block" : "none";
    line.style.left = `${at}px`;
    const [from, to] = selection.map((time) => Math.min(Math.max(placeOf(a, time) - a.left, 0), a.right - a.left));
    selected.style.display = from === undefined ? "none" : "block";
    selected.style.left = `${Math.min(from, to)}px`;
    selected.style.width = `${Math.abs(to - from)}px`;
    handles.forEach((handle, n) => {
      const time = selection[n];
      handle.style.display = time === undefined || time < a.low || time > a.high ? "none" : "block";
      handle.style.left = `${n ? to : from}px`;
    });
    reading.setAttribute("aria-valuemin", a.begin);
    reading.setAttribute("aria-valuemax", Math.max(a.high, cursor ?? a.high));
    reading.setAttribute("aria-valuenow", cursor ?? a.high);
  };
  const read = () => {
    reading.textContent = model.get("reading");
    reading.setAttribute("aria-valuetext", model.get("reading"));
  };
  const point = (time) => {
    cursor = time;
    show();
    say("cursor", { cursor: time });
  };
  const keep = (time) => {
    kept = time;
    hovering = false;
    point(time);
  };
  const select = (from, to) => {
    selection = from === undefined ? [] : [from, to];
    show();
    say("select", { select: selection });
  };

  const leave = () => {
    if (hovering) keep(kept);
  };
  const onMove = (event) => {
    const a = axis();
    if (!a) return;
    if (!drag) {
      if (within(a, event)) {
        hovering = true;
        point(timeAt(a, event.clientX));
      } else leave();
      return;
    }
    drag.moved ||= Math.abs(event.clientX - drag.x) > DRAG_PIXELS;
    if (!drag.moved) return;
    const time = timeAt(a, Math.min(Math.max(event.clientX, a.left), a.right));
    if (drag.kind === "select") select(drag.from, time);
    else {
      const by = (drag.high - drag.low) * (event.clientX - drag.x) / (a.right - a.left);
      say("window", { window: [drag.low - by, drag.high - by] });
    }
  };
  const all = () => {
    keep(null);
    say("all", { all: true });
  };
  const onUp = () => {
    window.removeEventListener("pointermove", onMove);
    window.removeEventListener("pointerup", onUp);
    window.removeEventListener("pointercancel", onUp);
    swallow = Boolean(drag?.moved);
    setTimeout(() => { swallow = false; });
    drag = null;
    overlay.classList.remove("wb-dragged");
  };
  const begin = (event, kind, from) => {
    const a = axis();
    drag = { x: event.clientX, kind, from, low: a.low, high: a.high, moved: false };
    overlay.classList.add("wb-dragged");
    window.addEventListener("pointermove", onMove);
    window.addEventListener("pointerup", onUp);
    window.addEventListener("pointercancel", onUp);
  };
  const on = {
    pointermove: (event) => !drag && onMove(event),
    pointerleave: leave,
    pointerdown: (event) => {
      const a = axis();
      if (event.button !== 0 || !within(a, event)) return;
      const handle = handles.indexOf(event.target);
      const isSelection = event.shiftKey || handle >= 0;
      begin(event, isSelection ? "select" : "pan", handle >= 0 ? selection[1 - handle] : timeAt(a, event.clientX));
    },
    mousedown: (event) => {
      if (event.button !== 0 || !within(axis(), event)) return;
      event.preventDefault(); // no text is selected
      reading.focus({ preventScroll: true });
    },
    dblclick: (event) => within(axis(), event) && all(),
    wheel: (event) => {
      const a = axis();
      if (!within(a, event) || !(event.ctrlKey || event.metaKey || document.activeElement === reading)) return; // the page scrolls
      event.preventDefault();
      say("zoom", { zoom: 2 ** (event.deltaY / 240), at: timeAt(a, event.clientX) });
    },
  };
  const onClick = (event) => {
    const a = axis();
    if (!swallow && within(a, event)) keep(timeAt(a, event.clientX));
    if (!swallow) return;
    swallow = false;
    event.stopPropagation(); // the end of a drag picks nothing
  };
  reading.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (by && !event.shiftKey) [kept, hovering] = [cursor, false]; // it stays when the pointer leaves
    if (by) say(event.shiftKey ? "extend" : "move", { [event.shiftKey ? "extend" : "move"]: by });
    else if (event.key === "PageUp" || event.key === "PageDown") say("pan", { pan: event.key === "PageUp" ? -0.5 : 0.5 });
    else if (event.key === "+" || event.key === "=") say("zoom", { zoom: 0.5, at: cursor });
    else if (event.key === "-") say("zoom", { zoom: 2, at: cursor });
    else if (event.key === "0") all();
    else if (event.key === "Home") keep(axis()?.begin ?? null);
    else if (event.key === "End") keep(null);
    else if (event.key === "Delete" || event.key === "Backspace") select();
    else return;
    event.preventDefault();
    event.stopPropagation(); // the notebook has keys of its own
  });

  const drawn = new MutationObserver(show); // the picture was drawn again
  const sized = new ResizeObserver(show);
  let gone = false;
  const attach = () => {
    if (gone) return;
    picture = el.closest(".wb")?.querySelector(".wb-picture") ?? null;
    if (!picture) return requestAnimationFrame(attach);
    picture.append(overlay);
    for (const [name, act] of Object.entries(on)) picture.addEventListener(name, act, { passive: false });
    picture.addEventListener("click", onClick, true);
    drawn.observe(picture.firstElementChild, { childList: true });
    sized.observe(picture);
    show();
  };
  const asked = window.matchMedia("(prefers-reduced-motion: reduce)");
  const calm = () => {
    if (model.get("still") === asked.matches) return;
    model.set("still", asked.matches);
    model.save_changes();
  };
  asked.addEventListener("change", calm);
  const changes = {
    "change:cursor": () => {
      if (waiting.cursor) return;
      cursor = model.get("cursor");
      if (!hovering) kept = cursor;
      show();
    },
    "change:selection": () => { if (!drag && !waiting.select) { selection = [...model.get("selection")]; show(); } },
    "change:reading": read,
    "change:heard": heard,
  };
  for (const [name, act] of Object.entries(changes)) model.on(name, act);
  read();
  calm();
  attach();
  return () => {
    gone = true;
    onUp();
    drawn.disconnect();
    sized.disconnect();
    asked.removeEventListener("change", calm);
    for (const [name, act] of Object.entries(changes)) model.off(name, act);
    for (const [name, act] of Object.entries(on)) picture?.removeEventListener(name, act);
    picture?.removeEventListener("click", onClick, true);
    overlay.remove();
  };
}
export default { render };
