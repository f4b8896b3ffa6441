// Steps through a record from first to last: buttons, a slider, play, which ends at the last step, and where the record
// grows a box to follow it. The next step waits until the kernel has drawn the one before. Where the reader's system asks
// for reduced motion, nothing plays by itself.
function render({ model, el }) {
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  el.classList.add("wb-steps");
  el.dataset.lmSuppressShortcuts = "true";
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", "steps");
  const button = (text, label, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "jupyter-button lm-Widget";
    made.textContent = text;
    made.setAttribute("aria-label", label);
    made.title = label;
    made.addEventListener("click", act);
    el.append(made);
    return made;
  };
  let timer = null;
  const first = () => model.get("first");
  const last = () => model.get("last");
  const go = (step) => {
    model.set("step", Math.max(first(), Math.min(last(), step)));
    model.save_changes();
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    show();
  };
  const by = (count) => () => (stop(), go(model.get("step") + count));
  const begin = button("«", "first step", () => (stop(), go(first())));
  const back = button("‹", "step back", by(-1));
  const play = button("▶ play", "play", () => {
    if (timer) return stop();
    if (model.get("step") >= last()) go(first());
    timer = setInterval(() => {
      if (!el.isConnected) return stop();
      if (model.get("drawn") !== model.get("step")) return; // the picture is not there yet
      if (model.get("step") >= last()) return stop();
      go(model.get("step") + 1);
    }, model.get("interval"));
    show();
  });
  const next = button("›", "next step", by(1));
  const end = button("»", "last step", () => (stop(), go(last())));
  const slider = document.createElement("input");
  slider.type = "range";
  slider.step = 1;
  slider.setAttribute("aria-label", "step");
  slider.addEventListener("input", () => {
    const chosen = slider.valueAsNumber; // before `stop`, which shows the present step again
    stop();
    go(chosen);
  });
  slider.addEventListener("keydown", (event) => event.stopPropagation());
  const label = document.createElement("span");
  label.className = "wb-steps-label";
  const follow = document.createElement("label");
  const box = document.createElement("input");
  box.type = "checkbox";
  box.addEventListener("change", () => (model.set("follow", box.checked), model.save_changes()));
  follow.append(box, "follow");
  el.append(slider, follow, label);
  const show = () => {
    const step = model.get("step");
    slider.min = first();
    slider.max = last();
    slider.value = step;
    label.textContent = model.get("title") || `${model.get("name")} ${step} of ${last()}`;
    slider.setAttribute("aria-valuetext", label.textContent);
    follow.hidden = !model.get("grows");
    box.checked = model.get("follow");
    play.textContent = timer ? "⏸ pause" : "▶ play";
    play.setAttribute("aria-label", timer ? "pause" : "play");
    play.title = still.matches ? "your system asks for reduced motion: go step by step" : timer ? "pause" : "play";
    play.disabled = still.matches;
    begin.disabled = back.disabled = step === first();
    next.disabled = end.disabled = step === last();
  };
  const shown = "change:first change:last change:step change:name change:title change:grows change:follow";
  const calm = () => (still.matches && timer ? stop() : show());
  still.addEventListener("change", calm);
  model.on(shown, show);
  show();
  return () => {
    clearInterval(timer);
    still.removeEventListener("change", calm);
    model.off(shown, show);
  };
}
export default { render };
