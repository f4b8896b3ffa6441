// Puts a text that the kernel has sent into the clipboard.
function render({ model, el }) {
  const button = document.createElement("button");
  const said = document.createElement("span");
  button.className = "jupyter-button lm-Widget";
  button.type = "button";
  said.setAttribute("role", "status");
  said.style.marginLeft = "6px";
  el.append(button, said);
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
    said.textContent = (await copied(model.get("text"))) ? "copied" : "this page may not copy: take it from below";
  });
  const changed = () => {
    label();
    said.textContent = "";
  };
  model.on("change:label change:text", changed);
  label();
  return () => model.off("change:label change:text", changed);
}
export default { render };
