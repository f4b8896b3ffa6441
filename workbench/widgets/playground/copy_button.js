// Puts a text that the kernel has sent into the clipboard.
function render({ model, el }) {
  const button = document.createElement("button");
  const status = document.createElement("span");
  button.className = "jupyter-button lm-Widget";
  button.type = "button";
  status.setAttribute("role", "status");
  status.style.marginLeft = "6px";
  el.append(button, status);
  const label = () => {
    button.textContent = model.get("label");
    button.disabled = !model.get("text");
  };
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea"); // pages that are not served securely have no clipboard
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  button.addEventListener("click", async () => {
    status.textContent = (await copied(model.get("text"))) ? "copied" : "this page may not copy: take it from below";
  });
  const changed = () => {
    label();
    status.textContent = "";
  };
  model.on("change:label change:text", changed);
  label();
  return () => model.off("change:label change:text", changed);
}
export default { render };
