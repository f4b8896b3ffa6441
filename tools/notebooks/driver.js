// What the harness says to JupyterLab: by its own application object, not by menus. Injected before every page.
window.bench = {
  panel: null,
  ran: null,
  calledBack: [],

  async open(path) {
    const panel = await window.jupyterapp.commands.execute("docmanager:open", { path });
    await panel.context.ready;
    if (!panel.sessionContext || !panel.content.widgets) throw new Error(`${path} does not open as a notebook`);
    this.panel = panel;
    this.ran = null;
    this.calledBack = [];
    panel.sessionContext.iopubMessage.connect((_, message) => {
      // An error in a widget's callback belongs to no cell: JupyterLab hides it in a log.
      if (message.header.msg_type === "error" && message.parent_header.msg_type !== "execute_request") {
        this.calledBack.push([message.content.ename, message.content.evalue]);
      }
    });
    await panel.revealed;
  },

  kernel() {
    return this.panel.sessionContext.session?.kernel;
  },

  runAll() {
    return this.run("notebook:run-all-cells");
  },

  runCell(index) {
    this.panel.content.activeCellIndex = index;
    return this.run("notebook:run-cell");
  },

  // JupyterLab gives the keyboard to the active cell some time after a run has begun, if the notebook had it: a key that
  // is pressed before may come to neither. Resolves then; `ran` says when the cells have ended.
  run(command) {
    this.ran = null;
    window.jupyterapp.shell.activateById(this.panel.id);
    const notebook = this.panel.content;
    const takes = notebook.mode === "edit" || notebook.node.contains(document.activeElement);
    const taken = new Promise((resolve) => {
      notebook.activate = () => {
        delete notebook.activate;
        notebook.activate();
        resolve();
      };
    });
    window.jupyterapp.commands.execute(command).then(
      () => (this.ran = "done"),
      (error) => (this.ran = String(error)),
    );
    return takes ? taken : null;
  },

  running() {
    const cells = this.panel.content.widgets;
    return cells.findIndex((cell) => cell.model.type === "code" && cell.model.executionState === "running");
  },

  async ask(expression) {
    const future = this.kernel().requestExecute({
      code: "",
      silent: false,
      store_history: false,
      user_expressions: { answer: expression },
    });
    return (await future.done).content.user_expressions.answer;
  },

  // Every output that holds a widget: which cell's (counted from 1), its name, and whether it was drawn.
  views() {
    const type = "application/vnd.jupyter.widget-view+json";
    const cells = this.panel.content.widgets.filter((cell) => cell.model.type === "code");
    return cells.flatMap((cell, index) =>
      cell.model.outputs.toJSON().flatMap((output, place) => {
        if (!output.data?.[type]) return [];
        const child = cell.node.querySelectorAll(".jp-Cell-outputArea > .jp-OutputArea-child")[place];
        const node = child?.querySelector(".jp-OutputArea-output");
        const classes = [...(node?.querySelectorAll('[class*="wb-"]') ?? [])].flatMap((inner) => [...inner.classList]);
        const plain = Boolean(node?.querySelector(".jupyter-widgets"));
        return {
          cell: index + 1,
          line: cell.model.sharedModel.getSource().trim().split("\n")[0],
          name: classes.find((name) => name.startsWith("wb-")) ?? "widget",
          drawn: plain || Boolean(node?.firstElementChild?.childElementCount), // anywidget fills its element itself
          text: plain ? "" : (node?.innerText ?? "").trim().slice(0, 200),
        };
      }),
    );
  },

  save() {
    return this.panel.context.save();
  },

  document() {
    return JSON.parse(JSON.stringify(this.panel.content.model.toJSON())); // what is undefined is not saved
  },

  theme(name) {
    return window.jupyterapp.commands.execute("apputils:change-theme", { theme: name });
  },

  // What the kernel was sent before now is answered, what its widgets had marked by then is drawn, and the page has
  // heard of it: the kernel takes messages in order, and its pictures come by the channel that says it is idle again.
  answered(limit) {
    const late = new Promise((resolve) => setTimeout(resolve, limit));
    const drawn = "getattr(__import__('sys').modules.get('workbench.widgets.throttle'), 'flush_all', int)()";
    return Promise.race([this.ask(drawn).then(() => null), late]);
  },

  // Resolves when nothing in the notebook has changed for `quiet` milliseconds, or after `limit`.
  settled(quiet, limit) {
    return new Promise((resolve) => {
      let timer;
      const end = (still) => {
        clearTimeout(timer);
        clearTimeout(last);
        observer.disconnect();
        resolve(still);
      };
      const again = () => {
        clearTimeout(timer);
        timer = setTimeout(() => end(true), quiet);
      };
      const observer = new MutationObserver(again);
      const last = setTimeout(() => end(false), limit);
      observer.observe(this.panel.node, { subtree: true, childList: true, attributes: true, characterData: true });
      again();
    });
  },

  // Whether an output of an exported page shows a picture that has something in it; a repr as plain text is none.
  shown([id, place]) {
    const output = document.getElementById(`cell-id=${id}`)?.querySelectorAll(".jp-OutputArea-child")[place];
    const seen = (node) => {
      const box = node.getBoundingClientRect();
      return box.width > 0 && box.height > 0;
    };
    const drawn = {
      IMG: (node) => node.complete && node.naturalWidth > 0,
      svg: (node) => [...node.querySelectorAll("path,rect,circle,line,polyline,polygon,text,image")].some(seen),
      DIV: (node) => [...node.querySelectorAll(":not(style, script)")].some((each) => each.innerText?.trim()),
    };
    const pictures = [...(output?.querySelectorAll("svg, img, .jp-RenderedHTML") ?? [])];
    return pictures.some((node) => seen(node) && drawn[node.tagName](node));
  },

  async reopen(path) {
    const closed = new Promise((resolve) => this.panel.disposed.connect(resolve));
    this.panel.context.model.dirty = false;
    this.panel.close();
    await closed;
    await this.open(path);
  },

  async close() {
    const panel = this.panel;
    if (!panel) return;
    this.panel = null;
    panel.context.model.dirty = false;
    await panel.sessionContext.shutdown();
    panel.close();
  },
};

// anywidget gives up on a widget that is not there after two seconds, and the tests' machine may be busy for longer:
// eight, within which `settle` looks at the console.
{
  const timeout = AbortSignal.timeout;
  AbortSignal.timeout = (milliseconds) => timeout.call(AbortSignal, 4 * milliseconds);
}
