// Saves what is shown: the kernel sends text as a file's content, or SVG, which becomes a PNG here.
const TYPES = { csv: "text/csv", json: "application/json" };
const SCALE = 2; // pixels of the file to one of the screen
function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
async function png(svg) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await picture.decode();
  const canvas = document.createElement("canvas");
  canvas.width = SCALE * picture.width;
  canvas.height = SCALE * picture.height;
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff"; // a picture outside of the page has the colours of a light one
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
function render({ model, el }) {
  const status = document.createElement("span");
  status.setAttribute("role", "status");
  status.style.marginLeft = "6px";
  const view = Math.random().toString(36); // every view of the model hears the answer, and the one that asked saves it
  for (const kind of model.get("kinds")) {
    const button = document.createElement("button");
    button.className = "jupyter-button lm-Widget";
    button.type = "button";
    button.style.marginRight = "6px";
    button.textContent = `Save as ${kind.toUpperCase()}`;
    button.addEventListener("click", () => {
      status.textContent = "";
      model.send({ kind, view });
    });
    el.append(button);
  }
  el.append(status);
  const sent = async ({ kind, name, content, problem, view: asked }) => {
    if (asked !== view) return;
    try {
      if (problem) throw new Error(problem);
      save(name, kind === "png" ? await png(content) : new Blob([content], { type: `${TYPES[kind]};charset=utf-8` }));
      status.textContent = `${name} was saved`;
    } catch (error) {
      status.textContent = `not saved: ${error.message}`;
    }
  };
  model.on("msg:custom", sent);
  return () => model.off("msg:custom", sent);
}
export default { render };
