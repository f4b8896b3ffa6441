// The field in which a message is written. Enter sends it, Shift+Enter begins a line, Escape leaves an edit or stops
// the answer, and the arrow up in an empty field edits the last message. Its keys are its own: the notebook has none.
function render({ model, el }) {
  const make = (tag, className, label) => {
    const node = document.createElement(tag);
    node.className = className;
    if (tag === "button") node.type = "button";
    if (label) node.textContent = label;
    return node;
  };
  const box = make("div", "wb-composer");
  const notice = make("div", "wb-notice");
  const words = make("span", "");
  const cancel = make("button", "jupyter-button", "Cancel");
  const field = make("textarea", "wb-message");
  const send = make("button", "jupyter-button mod-primary", "Send");
  const stop = make("button", "jupyter-button", "Stop");
  notice.setAttribute("role", "status");
  field.setAttribute("aria-label", "message");
  field.rows = 1;
  notice.append(words, cancel);
  const row = make("div", "wb-write");
  row.append(field, send, stop);
  box.append(notice, row);
  el.append(box);

  const fit = () => {
    field.style.height = "auto";
    if (field.scrollHeight) field.style.height = `${Math.min(field.scrollHeight + 2, 200)}px`;
  };
  let own = ""; // what this field wrote last: a draft that comes back is not written over what was typed since
  const keepDraft = () => {
    own = field.value;
    model.set("draft", own);
    model.save_changes();
  };
  const submit = () => {
    if (model.get("running") || !field.value.trim()) return;
    model.send({ send: field.value });
    field.value = "";
    keepDraft(); // a draft that was typed just before may still wait to be sent, behind the message: it must be empty
    fit();
  };
  const changed = () => {
    const running = model.get("running");
    send.disabled = running;
    stop.disabled = !running;
    words.textContent = model.get("notice");
    notice.style.display = words.textContent ? "flex" : "none";
    field.placeholder = model.get("placeholder");
    send.textContent = words.textContent ? "Send as a branch" : "Send";
  };
  const drafted = () => {
    if (model.get("draft") === own) return;
    field.value = own = model.get("draft");
    fit();
  };
  const edited = () => {
    changed();
    if (!words.textContent) return;
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  };
  field.addEventListener("input", () => {
    fit();
    keepDraft();
  });
  field.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // Ctrl+S is the notebook's
    event.stopPropagation();
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape" && words.textContent) {
      event.preventDefault();
      model.send({ cancel: true });
    } else if (event.key === "Escape" && model.get("running")) {
      event.preventDefault();
      model.send({ stop: true });
    } else if (event.key === "ArrowUp" && !field.value) {
      event.preventDefault();
      model.send({ last: true });
    }
  });
  send.addEventListener("click", submit);
  stop.addEventListener("click", () => model.send({ stop: true }));
  cancel.addEventListener("click", () => model.send({ cancel: true }));
  model.on("change:running change:placeholder", changed);
  model.on("change:draft", drafted);
  model.on("change:notice", edited);
  drafted();
  changed();
  requestAnimationFrame(fit);
  return () => {
    model.off("change:running change:placeholder", changed);
    model.off("change:draft", drafted);
    model.off("change:notice", edited);
  };
}
export default { render };
