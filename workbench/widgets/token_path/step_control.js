// Steps through numbers 0 to last: buttons, a slider, and play, which ends at the last. The next step waits until the
// kernel has drawn the one before. Where the reader's system asks for reduced motion, nothing plays by itself.
const PAUSE_MS = 900;
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
  const last = () => model.get("last");
  const go = (step) => {
    model.set("step", Math.max(0, Math.min(last(), step)));
    model.save_changes();
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    show();
  };
  const by = (count) => () => (stop(), go(model.get("step") + count));
  const first = button("«", "first step", () => (stop(), go(0)));
  const back = button("‹", "step back", by(-1));
  const play = button("▶ play", "play", () => {
    if (timer) return stop();
    if (model.get("step") >= last()) go(0);
    timer = setInterval(() => {
      if (!el.isConnected) return stop();
      if (model.get("drawn") !== model.get("step")) return; // the picture is not there yet
      if (model.get("step") >= last()) return stop();
      go(model.get("step") + 1);
    }, PAUSE_MS);
    show();
  });
  const next = button("›", "next step", by(1));
  const end = button("»", "last step", () => (stop(), go(last())));
  const slider = document.createElement("input");
  slider.type = "range";
  slider.min = 0;
  slider.step = 1;
  slider.setAttribute("aria-label", "step");
  slider.addEventListener("input", () => (stop(), go(slider.valueAsNumber)));
  slider.addEventListener("keydown", (event) => event.stopPropagation());
  const label = document.createElement("span");
  label.className = "wb-steps-label";
  el.append(slider, label);
  const show = () => {
    const step = model.get("step");
    slider.max = last();
    slider.value = step;
    slider.setAttribute("aria-valuetext", model.get("title"));
    label.textContent = `${step + 1} of ${last() + 1}`;
    play.textContent = timer ? "⏸ pause" : "▶ play";
    play.setAttribute("aria-label", timer ? "pause" : "play");
    play.title = still.matches ? "your system asks for reduced motion: go step by step" : timer ? "pause" : "play";
    play.disabled = still.matches;
    first.disabled = back.disabled = step === 0;
    next.disabled = end.disabled = step === last();
  };
  const calm = () => (still.matches && timer ? stop() : show());
  still.addEventListener("change", calm);
  model.on("change:step change:last change:title", show);
  show();
  return () => {
    clearInterval(timer);
    still.removeEventListener("change", calm);
    model.off("change:step change:last change:title", show);
  };
}
export default { render };
