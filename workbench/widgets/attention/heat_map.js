// A canvas that shows the part in sight of a large map of bytes, and asks the kernel for the tiles that it lacks.
const LEFT = 96, TOP = 84, HEIGHT = 500, MOST = 26; // pixels: room for names, the canvas, the largest cell
const NAMED = 8; // cells of so many pixels have their names beside them

function render({ model, el }) {
  const canvas = document.createElement("canvas");
  const bar = document.createElement("div");
  const caption = document.createElement("span");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  bar.className = "wb-bar";
  caption.className = "wb-caption";
  caption.setAttribute("role", "status");
  el.append(canvas, bar);

  const pen = canvas.getContext("2d");
  const tiles = new Map(); // "level/row/column" -> {stamp, image}
  const waiting = new Set();
  let place = null; // {x, y: the cell at the map's corner, scale: pixels a cell}
  let frame = -1, width = 0, pending = 0, drag = null;
  const get = (name) => model.get(name);
  const inner = () => [width - LEFT - 4, HEIGHT - TOP - 4];

  const button = (text, label, act) => {
    const made = document.createElement("button");
    made.textContent = text;
    made.title = label;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    bar.append(made);
  };
  button("+", "zoom in", () => zoom(2));
  button("−", "zoom out", () => zoom(0.5));
  button("whole", "show the whole map", () => { place = null; soon(); });
  bar.append(caption);

  const fit = () => {
    const [w, h] = inner();
    return Math.min(MOST, w / Math.max(1, get("columns")), h / Math.max(1, get("rows")));
  };
  const clamp = () => {
    const [w, h] = inner();
    place.scale = Math.min(Math.max(place.scale, fit()), Math.max(MOST, fit()));
    place.x = Math.max(0, Math.min(place.x, get("columns") - w / place.scale));
    place.y = Math.max(0, Math.min(place.y, get("rows") - h / place.scale));
  };
  const zoom = (by, px, py) => {
    const [w, h] = inner(), cell = get("pointed");
    if (!place) return;
    if (px === undefined) {
      const near = cell.length === 2;
      px = near ? (cell[1] + 0.5 - place.x) * place.scale : w / 2;
      py = near ? (cell[0] + 0.5 - place.y) * place.scale : h / 2;
    }
    const x = place.x + px / place.scale, y = place.y + py / place.scale;
    place = { x, y, scale: place.scale * by };
    place.scale = Math.min(Math.max(place.scale, fit()), Math.max(MOST, fit()));
    place.x = x - px / place.scale;
    place.y = y - py / place.scale;
    soon();
  };

  const paint = (content, bytes) => {
    const [rows, columns] = content.size;
    const image = document.createElement("canvas");
    image.width = Math.max(1, columns);
    image.height = Math.max(1, rows);
    const target = image.getContext("2d"), pixels = target.createImageData(image.width, image.height);
    const colours = get("colours");
    for (let n = 0; n < rows * columns; n++) {
      const value = bytes[n];
      if (!value) continue; // nobody looks there: left as the page is
      for (let part = 0; part < 3; part++) pixels.data[4 * n + part] = colours.getUint8(3 * value + part);
      pixels.data[4 * n + 3] = 255;
    }
    target.putImageData(pixels, 0, 0);
    return image;
  };

  const hatch = (colour) => {
    const small = document.createElement("canvas");
    small.width = small.height = 7;
    const line = small.getContext("2d");
    line.strokeStyle = colour;
    line.globalAlpha = 0.3;
    line.beginPath();
    line.moveTo(-1, 8);
    line.lineTo(8, -1);
    line.stroke();
    return pen.createPattern(small, "repeat");
  };

  const names = (ink) => {
    const [w, h] = inner(), { x, y, scale } = place;
    pen.fillStyle = ink;
    pen.font = `${Math.min(12, Math.max(9, scale - 1))}px ui-monospace, monospace`;
    pen.textBaseline = "middle";
    const named = scale >= NAMED, steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5];
    const step = named ? 1 : steps.find((n) => n * scale >= 40), numbers = get("row_numbers");
    pen.textAlign = "right";
    for (let n = Math.floor(y); n < Math.min(get("rows"), y + h / scale); n++) {
      const number = numbers[n] ?? n, at = (n + 0.5 - y) * scale;
      if (number % step || at < 0) continue;
      pen.fillText(named ? (get("row_names")[n] ?? "").slice(-13) : String(number), LEFT - 6, TOP + at);
    }
    pen.textAlign = "left";
    for (let n = Math.ceil(x / step) * step; n < Math.min(get("columns"), x + w / scale); n += step) {
      pen.save();
      pen.translate(LEFT + (n + 0.5 - x) * scale, TOP - 6);
      pen.rotate(-Math.PI / 2);
      pen.fillText(named ? (get("column_names")[n] ?? "").slice(0, 11) : String(n), 0, 0);
      pen.restore();
    }
    pen.font = "11px system-ui, sans-serif";
    pen.globalAlpha = 0.65;
    pen.fillText(`${get("row_title")} ↓  ${get("column_title")} →`, 2, 9);
    pen.globalAlpha = 1;
  };

  const draw = () => {
    pending = 0;
    if (!el.isConnected) return;
    if (frame !== get("frame")) {
      frame = get("frame");
      place = null;
      tiles.clear();
      waiting.clear();
    }
    const style = getComputedStyle(el), dense = window.devicePixelRatio || 1;
    width = Math.max(260, Math.min(760, el.clientWidth || 640));
    if (canvas.width !== Math.round(width * dense)) {
      canvas.width = Math.round(width * dense);
      canvas.height = Math.round(HEIGHT * dense);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${HEIGHT}px`;
    }
    if (!place) place = { x: 0, y: 0, scale: fit(), whole: true };
    if (place.whole) place.scale = fit(); // what grows stays in sight until somebody zooms
    clamp();
    const { x, y, scale } = place, [w, h] = inner(), side = get("side"), stamp = get("stamp");
    const ink = style.getPropertyValue("--jp-ui-font-color0").trim() || "#1b1b1b";
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    names(ink);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, Math.min(w, (get("columns") - x) * scale), Math.min(h, (get("rows") - y) * scale));
    pen.clip();
    pen.fillStyle = hatch(ink);
    pen.fillRect(LEFT, TOP, w, h);
    pen.imageSmoothingEnabled = false;
    const level = Math.min(get("top"), Math.max(0, Math.ceil(-Math.log2(scale))));
    const cells = side * 2 ** level, want = [];
    for (let row = Math.floor(y / cells); row * cells < Math.min(get("rows"), y + h / scale); row++)
      for (let column = Math.floor(x / cells); column * cells < Math.min(get("columns"), x + w / scale); column++) {
        const key = `${level}/${row}/${column}`, known = tiles.get(key);
        if (known?.stamp !== stamp && !waiting.has(`${stamp}/${key}`)) {
          waiting.add(`${stamp}/${key}`);
          want.push([level, row, column]);
        }
        if (!known) continue;
        const zoomed = scale * 2 ** level;
        pen.drawImage(known.image, LEFT + (column * cells - x) * scale, TOP + (row * cells - y) * scale,
          known.image.width * zoomed, known.image.height * zoomed);
      }
    if (want.length) model.send({ want, stamp });
    const at = ([a, b]) => [LEFT + (a - x) * scale, TOP + (b - y) * scale];
    for (const [dash, ...points] of get("marks")) {
      for (const [colour, wide] of [["#000", 3], ["#fff", 1.4]]) { // seen on dark and on light
        pen.setLineDash(dash);
        pen.strokeStyle = colour;
        pen.lineWidth = wide;
        pen.beginPath();
        points.forEach((point, n) => (n ? pen.lineTo(...at(point)) : pen.moveTo(...at(point))));
        pen.stroke();
      }
    }
    pen.setLineDash([]);
    const [row, column] = get("pointed");
    if (column !== undefined) {
      const [left, top] = at([column, row]), size = Math.max(scale, 3);
      pen.lineWidth = 1;
      pen.strokeStyle = "#d55e00";
      pen.strokeRect(left - 0.5, top - 0.5, size + 1, size + 1);
      pen.globalAlpha = 0.5;
      pen.strokeRect(LEFT - 2, top, w + 4, scale);
      pen.strokeRect(left, TOP - 2, scale, h + 4);
      pen.globalAlpha = 1;
    }
    pen.restore();
    caption.textContent = get("caption");
    canvas.setAttribute("aria-label", `${get("label")}. Arrow keys move the cursor, plus and minus zoom, 0 shows the whole. ${get("caption")}`);
    canvas.dataset.tiles = String(tiles.size);
    canvas.dataset.level = String(level);
  };
  const soon = () => { pending ||= requestAnimationFrame(draw); };

  const point = (row, column) => {
    const before = get("pointed");
    if (before[0] === row && before[1] === column) return;
    model.set("pointed", row === undefined ? [] : [row, column]);
    model.save_changes();
    soon();
  };
  const cellAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const px = event.clientX - box.left - LEFT, py = event.clientY - box.top - TOP;
    if (!place || px < 0 || py < 0) return [px, py];
    const row = Math.floor(place.y + py / place.scale), column = Math.floor(place.x + px / place.scale);
    return row < get("rows") && column < get("columns") ? [px, py, row, column] : [px, py];
  };
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      place = { whole: place.whole, scale: place.scale, x: drag.x - (event.clientX - drag.px) / place.scale, y: drag.y - (event.clientY - drag.py) / place.scale };
      return soon();
    }
    const [, , row, column] = cellAt(event);
    point(row, column);
  });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { px: event.clientX, py: event.clientY, x: place.x, y: place.y };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("dblclick", (event) => zoom(2, ...cellAt(event)));
  canvas.addEventListener("wheel", (event) => {
    if (!(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return; // the page scrolls
    event.preventDefault();
    zoom(2 ** (-event.deltaY / 240), ...cellAt(event).slice(0, 2));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const by = event.shiftKey ? 16 : 1, rows = get("rows"), columns = get("columns");
    const move = { ArrowUp: [-by, 0], ArrowDown: [by, 0], ArrowLeft: [0, -by], ArrowRight: [0, by],
      PageUp: [-64, 0], PageDown: [64, 0], Home: [0, -columns], End: [0, columns] }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (move) {
      const [row, column] = get("pointed").length ? get("pointed") : [0, 0];
      const to = [Math.max(0, Math.min(rows - 1, row + move[0])), Math.max(0, Math.min(columns - 1, column + move[1]))];
      const [w, h] = inner(), wide = w / place.scale, high = h / place.scale;
      let { x, y } = place; // the cursor stays in sight
      x = Math.min(Math.max(x, to[1] + 1 - wide), to[1]);
      y = Math.min(Math.max(y, to[0] + 1 - high), to[0]);
      if (!place.whole) place = { x, y, scale: place.scale };
      point(...to);
    } else if (event.key === "+" || event.key === "=") zoom(2);
    else if (event.key === "-") zoom(0.5);
    else if (event.key === "0") { place = null; soon(); }
    else return;
    event.preventDefault();
    event.stopPropagation(); // the notebook has keys of its own
  });

  const arrived = (content, buffers) => {
    if (!content.tile) return;
    const key = content.tile.join("/");
    waiting.delete(`${content.stamp}/${key}`);
    const known = tiles.get(key);
    if (known && known.stamp > content.stamp) return;
    const view = buffers[0], bytes = new Uint8Array(view.buffer ?? view, view.byteOffset ?? 0, view.byteLength);
    tiles.set(key, { stamp: content.stamp, image: paint(content, bytes) });
    if (tiles.size > 96) tiles.delete(tiles.keys().next().value);
    soon();
  };
  let seen = false;
  const changed = () => {
    seen ||= el.isConnected;
    if (seen && !el.isConnected) return leave(); // JupyterLab drops a view that it renders again, and does not say so
    soon();
  };
  const sized = new ResizeObserver(soon);
  const leave = () => {
    model.off("change", changed);
    model.off("msg:custom", arrived);
    sized.disconnect();
  };
  model.on("msg:custom", arrived);
  model.on("change", changed);
  sized.observe(el);
  soon();
  return leave;
}
export default { render };
