// Shows the markup that the kernel has drawn. An element with data-tip shows it to pointer and keyboard; an element with data-key
// can be picked by click or Enter, and the arrow keys go from one to the next; where some have data-row, each the first
// of its row, up and down go from row to row. A `details` with data-fold stays open or closed when it is drawn again, and
// a place with data-scroll="end" stays at its end.
function render({ model, el }) {
  const view = document.createElement("div");
  const tip = document.createElement("div");
  tip.setAttribute("role", "status");
  tip.className = "wb-tip";
  el.classList.add("wb-picture");
  el.append(view);
  document.body.append(tip); // outputs cut off what stands out of them

  const showTip = (target, x, y) => {
    const text = target?.dataset?.tip;
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.max(0, Math.min(x + 12, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 14 + tip.offsetHeight > window.innerHeight ? y - tip.offsetHeight - 8 : y + 14}px`;
  };
  const near = (event) => event.target.closest?.("[data-tip]");
  const pick = (target) => {
    const key = target?.closest?.("[data-key]")?.dataset.key;
    if (key === undefined) return;
    model.set("picked", key);
    model.save_changes();
  };

  // How wide it may be drawn, once it is known and when it has been another for a moment.
  let waiting;
  const sizes = new ResizeObserver(([{ contentRect }]) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      const room = Math.round(contentRect.width);
      if (!room || Math.abs(room - model.get("room")) < 8) return; // a scrollbar comes and goes
      model.set("room", room);
      model.save_changes();
    }, 150);
  });
  sizes.observe(el);

  const leave = () => {
    sizes.disconnect();
    model.off("change:content", draw);
    model.off("msg:custom", grow);
    tip.remove();
  };
  // Ids are one space for all of a page, with what other notebooks show in it: here they get the view's number.
  const number = (globalThis.workbenchViews = (globalThis.workbenchViews ?? 0) + 1);
  const renamed = (markup) => markup.replace(/(\bid="|url\(#)(wb-[a-z0-9-]+)/g, `$1$2-v${number}`);
  const own = (content) => content.replace(/<style>[^]*?<\/style>|<[^>]*>/g, renamed); // text between tags is a reader's
  let seen = false;
  // By the widget's own key or name, where it has one: JupyterLab makes views anew, and folds stay as they were.
  const kept = (globalThis.workbenchFolds ??= new Map());
  const owner = model.get("folds") || model.get("name");
  const folds = kept.get(owner) ?? new Map();
  if (owner) kept.set(owner, folds);
  view.addEventListener("toggle", ({ target }) => "fold" in target.dataset && folds.set(target.dataset.fold, target.open), true);
  const atEnd = (each) => each.scrollTop + each.clientHeight >= each.scrollHeight - 8;
  const draw = () => {
    seen ||= el.isConnected;
    if (seen && !el.isConnected) return leave(); // JupyterLab drops a view that it renders again, and does not say so
    const focused = view.contains(document.activeElement) ? placeOf(document.activeElement, view) : null;
    const scrolled = [...view.querySelectorAll("[data-scroll]")].map((each) => [each.scrollLeft, each.scrollTop, atEnd(each)]);
    view.innerHTML = own(model.get("content"));
    view.querySelectorAll("details[data-fold]").forEach((each) => {
      each.open = folds.get(each.dataset.fold) ?? each.open;
    });
    [...view.querySelectorAll("[data-scroll]")].forEach((each, n) => {
      if (scrolled[n]) [each.scrollLeft, each.scrollTop] = scrolled[n];
      if (each.dataset.scroll === "end" && (scrolled[n]?.[2] ?? true)) each.scrollTop = each.scrollHeight;
    });
    if (focused) stopAt(focused, view)?.focus({ preventScroll: true });
    if (!view.querySelector("[data-tip]:hover, [data-tip]:focus")) showTip(null);
  };

  view.addEventListener("pointermove", (event) => showTip(near(event), event.clientX, event.clientY));
  view.addEventListener("pointerleave", () => showTip(null));
  view.addEventListener("focusin", (event) => {
    const place = event.target.getBoundingClientRect();
    showTip(near(event), place.right, place.bottom);
  });
  view.addEventListener("focusout", () => showTip(null));
  view.addEventListener("click", (event) => pick(event.target));
  view.addEventListener("keydown", (event) => {
    if (event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return; // the notebook's own
    if (event.key === "Enter" || event.key === " ") pick(event.target);
    if (event.target.tagName === "SUMMARY") event.stopPropagation(); // it opens and closes by itself
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key !== "Enter" && event.key !== " " && !step) return;
    if (event.target.dataset?.key === undefined) return;
    event.preventDefault();
    event.stopPropagation(); // the notebook would move between cells
    const all = [...view.querySelectorAll("[data-key]")];
    let at = all.indexOf(event.target) + (step ?? 0);
    const across = ["ArrowUp", "ArrowDown"].includes(event.key) && all.some((each) => "row" in each.dataset);
    while (across && all[at] && !("row" in all[at].dataset)) at += step;
    all[at]?.focus();
  });
  // A place in the picture that only gets longer gets the new part: pieces of one element each, from place `at` on.
  const grow = ({ into, at, pieces }) => {
    const place = view.querySelector(`[data-grows="${CSS.escape(into)}"]`);
    if (!place || place.childElementCount < at) return model.send("all"); // something was missed
    const around = place.closest("[data-scroll]");
    const low = around && atEnd(around);
    place.insertAdjacentHTML("beforeend", own(pieces.slice(place.childElementCount - at).join("")));
    if (low) around.scrollTop = around.scrollHeight; // who reads the end sees the end
  };
  model.on("msg:custom", grow);
  model.on("change:content", draw);
  draw();
  requestAnimationFrame(() => keepFocus(model, el.closest(".wb")));
  return leave;
}
// The keys pressed in a widget are the widget's: JupyterLab would move between cells with the arrows, and make or delete
// cells with letters. It looks for this mark from the pressed element upwards, before any element hears of the key.
// Chords (Ctrl+S, Shift+Enter) and Escape stay the notebook's.
function guardKeys(event) {
  const chord = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter");
  press(event);
  if (event.target.closest?.(".wb")) event.target.toggleAttribute("data-lm-suppress-shortcuts", !chord && event.key !== "Escape");
}
// Where a stop of the keyboard is in a root, by its name and its number among those of the same name.
const STOPS = "button, input, textarea, select, summary, [tabindex], [data-key]";
const nameOf = (stop) => [stop.localName, stop.dataset.key ?? stop.getAttribute("aria-label")
  ?? stop.closest("summary")?.parentElement.dataset.fold ?? stop.textContent].join(" ");
const named = (name, root) => [...root.querySelectorAll(STOPS)].filter((each) => nameOf(each) === name);
const placeOf = (stop, root) => [nameOf(stop), named(nameOf(stop), root).indexOf(stop)];
const stopAt = ([name, number], root) => named(name, root)[number];
// What is drawn or made anew while it is pressed hears of the click all the same; the browser tells it neither to what
// was there nor to what is. (A finger's click goes to what is there at its end; what has a key acts when Space goes down.)
let pressed = null;
function press(event) {
  const stop = event.target.closest?.(STOPS), root = stop?.closest(".wb");
  if (event.type === "keydown" ? event.key !== " " || event.repeat || stop?.dataset.key !== undefined : event.button) return;
  pressed = root && event.pointerType !== "touch" ? { stop, root, place: placeOf(stop, root), x: event.clientX, y: event.clientY } : null;
}
function release(event) {
  if (!pressed || (event.type === "keyup" && event.key !== " ")) return;
  const { stop, root, place, x, y } = pressed, { clientX, clientY } = event;
  pressed = null;
  if (stop.isConnected || Math.hypot(clientX - x, clientY - y) > 8) return; // it hears of it itself, or it was a drag
  const now = root.isConnected ? root : document.querySelector(`.wb[data-view="${root.dataset.view}"]`);
  if (now) stopAt(place, now)?.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, clientX, clientY }));
}
const heard = { keydown: guardKeys, keyup: release, pointerdown: press, pointerup: release };
globalThis.workbenchKeys ??= (Object.entries(heard).forEach(([name, act]) => window.addEventListener(name, act, true)), true);
// JupyterLab makes a view anew when what a notebook keeps of it is brought up to date. The keyboard stays where it was,
// and the kernel knows while it is in a field, whose text would be lost.
const focused = (globalThis.workbenchFocused ??= new Map());
function keepFocus(model, root) {
  const name = model.get("name");
  if (!root || !name) return;
  root.dataset.view = name;
  const stops = () => [...root.querySelectorAll(STOPS)];
  const reportTyping = (typing) => {
    if (model.get("typing") === typing) return;
    model.set("typing", typing);
    model.save_changes();
  };
  const before = focused.get(name);
  if (before !== undefined && document.activeElement === document.body) stops()[before]?.focus({ preventScroll: true });
  root.addEventListener("focusin", (event) => {
    focused.set(name, stops().indexOf(event.target));
    reportTyping(event.target.closest("input, textarea, select, [role=slider]") !== null);
  });
  root.addEventListener("focusout", (event) => {
    if (root.contains(event.relatedTarget)) return;
    setTimeout(() => root.isConnected && !root.contains(document.activeElement) && (focused.delete(name), reportTyping(false)));
  });
}
export default { render };
