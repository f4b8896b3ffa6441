// Projector mode is a class of the page: every open notebook has it, and each switch shows what the page has.
const MODE = "wb-projector";
function render({ model, el }) {
  const style = document.getElementById(`${MODE}-style`) ?? document.head.appendChild(document.createElement("style"));
  style.id = `${MODE}-style`;
  style.textContent = model.get("rules");
  const button = document.createElement("button");
  button.type = "button";
  button.className = `jupyter-button ${MODE}-switch`;
  button.title = "larger letters and pictures, code dimmed, strong contrast";
  button.toggleAttribute("data-lm-suppress-shortcuts", true); // JupyterLab leaves its keys alone
  el.append(button);

  const isOn = () => document.body.classList.contains(MODE);
  const turn = (on) => {
    document.body.classList.toggle(MODE, on);
    window.dispatchEvent(new Event(MODE));
    window.dispatchEvent(new Event("resize")); // what measures its room measures it again
  };
  const show = () => {
    button.textContent = `Projector mode: ${isOn() ? "on" : "off"}`;
    button.setAttribute("aria-pressed", isOn());
    if (model.get("on") === null || model.get("on") === isOn()) return;
    model.set("on", isOn()); // another switch was used: a view that is made again leaves it so
    model.save_changes();
  };
  const asked = () => model.get("on") !== null && model.get("on") !== isOn() && turn(model.get("on"));
  button.addEventListener("click", () => {
    model.set("on", !isOn());
    model.save_changes();
  });
  window.addEventListener(MODE, show);
  model.on("change:on", asked);
  asked();
  show();
  return () => {
    window.removeEventListener(MODE, show);
    model.off("change:on", asked);
  };
}
export default { render };
