// An extension of JupyterLab in the form that it loads prebuilt ones in (a module federation container), written by hand.
//
// A widget's output is a live view and, beside it, a picture of another MIME type. Where the view cannot be made, as its
// kernel was restarted or is gone, JupyterLab writes an error in its place. With this, it shows the picture.
const VIEW = "application/vnd.jupyter.widget-view+json";
const HINT = "saved picture: run the cell for the live view";
let shared; // the packages of JupyterLab, by name and version

// Show the picture beside a view in `renderer`, as long as that has no view in it.
function withPicture(renderer, registry) {
  const render = renderer.renderModel.bind(renderer);
  let shown = null;
  const clear = () => {
    shown?.dispose();
    shown = null;
  };
  renderer.renderModel = async (model) => {
    clear();
    await render(model);
    const lacks = !renderer.node.firstElementChild && !renderer.isDisposed; // nothing, or the words of an error
    const { [VIEW]: _, ...data } = model.data;
    const picture = { data, metadata: model.metadata, trusted: model.trusted, setData: () => {} };
    const kind = lacks && registry.preferredMimeType(data, model.trusted ? "any" : "ensure");
    if (!kind || kind === "text/plain") return;
    const made = registry.createRenderer(kind);
    await made.renderModel(picture);
    if (renderer.isDisposed || renderer.node.firstElementChild) return made.dispose(); // the view came meanwhile
    renderer.node.textContent = "";
    renderer.removeClass("jupyter-widgets");
    made.node.title = HINT;
    renderer.addWidget((shown = made));
  };
  return renderer;
}

async function activate() {
  const [version] = Object.values(shared["@jupyterlab/rendermime"]);
  const { RenderMimeRegistry } = (await version.get())();
  const create = RenderMimeRegistry.prototype.createRenderer;
  RenderMimeRegistry.prototype.createRenderer = function (kind) {
    const made = create.call(this, kind);
    return kind === VIEW ? withPicture(made, this) : made;
  };
}

const plugin = { id: "inference-workbench:pictures", description: HINT, autoStart: true, activate };
(globalThis._JUPYTERLAB ??= {})["inference-workbench"] = {
  init: (packages) => void (shared = packages),
  get: async () => () => ({ __esModule: true, default: plugin }),
};
