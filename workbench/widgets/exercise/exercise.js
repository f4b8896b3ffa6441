// A question as a form: Enter checks, the arrow keys go from choice to choice, and what comes of it is read out.
function render({ model, el }) {
  const make = (tag, attributes = {}, text = "") => {
    const node = document.createElement(tag);
    Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
    node.textContent = text;
    return node;
  };
  const id = `wb-exercise-${crypto.randomUUID?.() ?? Math.random().toString(36).slice(2)}`;
  const form = make("form", { class: "wb-exercise-form", "data-lm-suppress-shortcuts": "true", novalidate: "" });
  const set = make("fieldset");
  const choices = model.get("choices");
  const word = model.get("prediction") ? "Your prediction" : "Your answer";
  const title = model.get("question") || (choices.length ? word : ""); // a number's field has the word beside it
  if (title) set.append(make("legend", {}, title));
  const unit = model.get("unit");
  const fields = choices.map((choice, n) => {
    const label = make("label", { class: "wb-exercise-choice" });
    const field = make("input", { type: "radio", name: id, value: choice, id: `${id}-${n}` });
    label.append(field, document.createTextNode(` ${choice}`));
    set.append(label);
    return field;
  });
  if (!fields.length) {
    const label = make("label", { class: "wb-exercise-number" }, word);
    const field = make("input", { type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false" });
    field.setAttribute("aria-label", unit ? `${word}, in ${unit}` : word);
    label.append(field, make("span", { "aria-hidden": "true" }, unit));
    set.append(label);
    fields.push(field);
  }
  const button = (text, press) => {
    const node = make("button", { type: press ? "button" : "submit", class: "jupyter-button" }, text);
    if (press) node.addEventListener("click", () => model.send({ press }));
    return node;
  };
  const [check, hint, solution, again] = [button("Check"), button("Hint", "hint"), button("Show the solution", "solution"), button("Try again", "again")];
  check.classList.add("mod-primary");
  const row = make("div", { class: "wb-exercise-buttons" });
  row.append(check, hint, solution, again);
  set.append(row);
  const status = make("div", { class: "wb-exercise-feedback", role: "status", "aria-live": "polite" });
  form.append(set, status);
  el.append(form);

  const given = () => (choices.length ? (fields.find((field) => field.checked)?.value ?? "") : fields[0].value);
  form.addEventListener("input", () => {
    model.set("draft", given());
    model.save_changes();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (model.get("closed")) return;
    status.textContent = "Checking, as soon as the kernel is free …";
    model.send({ check: given() });
  });
  form.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter")) return; // the notebook's
    if (event.key !== "Escape") event.stopPropagation();
    if (event.key === "Enter" && event.target.type === "radio") {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  const drafted = () => {
    const draft = model.get("draft");
    if (!choices.length && fields[0].value !== draft) fields[0].value = draft;
    if (choices.length) fields.forEach((field) => (field.checked = field.value === draft));
  };
  const announce = () => (status.innerHTML = model.get("feedback"));
  const closed = () => {
    const done = model.get("closed");
    const had = form.contains(document.activeElement) && document.activeElement.tagName === "BUTTON";
    fields.forEach((field) => (field.disabled = done));
    [check, solution].forEach((node) => (node.hidden = done));
    hint.hidden = done || !model.get("has_hint");
    again.hidden = !done;
    if (done && had) again.focus({ preventScroll: true }); // the button that had the keyboard is gone
  };
  const wired = { "change:draft": drafted, "change:feedback": announce, "change:closed": closed };
  Object.entries(wired).forEach(([name, act]) => (act(), model.on(name, act)));
  // The same words twice change no trait: the kernel answers every press.
  model.on("msg:custom", announce);
  return () => {
    Object.entries(wired).forEach(([name, act]) => model.off(name, act));
    model.off("msg:custom", announce);
  };
}
export default { render };
