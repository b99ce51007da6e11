// The view of a Flipbook: one picture, its sentence, and a row of controls for each slider.
// All pages are here already; turning one is an assignment to `img.src`.

function element(tag, className, properties = {}) {
  const node = Object.assign(document.createElement(tag), properties);
  node.className = className;
  return node;
}

function longest(texts) {
  return Math.max(...texts.map((t) => t.length)) + "ch";
}

function render({ model, el }) {
  const axes = model.get("_axes");
  const [width, height] = model.get("_size");
  const source = (png) => "data:image/png;base64," + png;

  const picture = element("img", "amp-lab-picture", { width, height, decoding: "sync" });
  // Polite: a screen reader says the sentence when the learner pauses, not at every step.
  const sentence = element("p", "amp-lab-sentence");
  sentence.setAttribute("aria-live", "polite");
  const rows = axes.map((axis, which) => row(axis, which));
  el.classList.add("amp-lab-flipbook");
  el.style.maxWidth = width + "px";
  el.append(...rows.map((r) => r.node), picture, sentence);

  function row({ label, readouts }, which) {
    const last = readouts.length - 1;
    const node = element("div", "amp-lab-row");
    const name = element("label", "amp-lab-label");
    const range = element("input", "amp-lab-range", { type: "range", min: 0, max: last, step: 1 });
    // JupyterLab would take the arrow keys for itself, unless the input that has the focus asks.
    range.dataset.lmSuppressShortcuts = "true";
    const text = element("span", "", { textContent: label });
    name.append(text, range);
    const readout = element("output", "amp-lab-readout");
    // As wide as the longest, so that rows are aligned and nothing moves under the pointer.
    text.style.minWidth = longest(axes.map((a) => a.label));
    readout.style.minWidth = longest(axes.flatMap((a) => a.readouts));
    const move = (to) => turn(which, Math.min(last, Math.max(0, to)));
    const at = () => model.get("_position")[which];
    const button = (text, title, onclick) => {
      const made = element("button", "amp-lab-button", { type: "button", textContent: text, title, onclick });
      made.setAttribute("aria-label", title + ": " + label);
      return made;
    };
    let timer = null;
    const stop = () => {
      clearInterval(timer);
      timer = null;
      play.textContent = "▶";
    };
    const play = button("▶", "Play or pause", () => {
      if (timer) return stop();
      if (at() === last) move(0);
      play.textContent = "⏸";
      timer = setInterval(() => (at() < last && node.isConnected ? move(at() + 1) : stop()), 400);
    });
    range.addEventListener("input", () => {
      stop();
      move(Number(range.value));
    });
    node.append(
      button("‹", "Step back", () => move(at() - 1)),
      name,
      button("›", "Step forward", () => move(at() + 1)),
      readout,
      play,
    );
    return { node, range, readout, readouts, stop };
  }

  function turn(which, to) {
    const position = [...model.get("_position")];
    position[which] = to;
    model.set("_position", position);
    model.save_changes();
  }

  function show() {
    const position = model.get("_position");
    const page = position.length === 1 ? position[0] : position[0] * axes[1].readouts.length + position[1];
    const late = model.get("_late");
    const isLate = late && late.page === page;
    const png = isLate ? late.png : model.get("_pages")[page];
    const text = isLate ? late.sentence : model.get("_sentences")[page];
    rows.forEach((r, which) => {
      r.range.value = position[which];
      r.readout.value = r.readouts[position[which]];
      r.range.setAttribute("aria-valuetext", r.readouts[position[which]] + ". " + text);
    });
    if (!png) return; // drawn on demand and still on its way: the last page stays
    picture.src = source(png);
    picture.alt = text;
    sentence.textContent = text;
  }

  model.on("change:_position", show);
  model.on("change:_late", show);
  show();
  return () => {
    rows.forEach((r) => r.stop());
    model.off("change:_position", show);
    model.off("change:_late", show);
  };
}

export default { render };
