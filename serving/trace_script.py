"""What the page of a trace does: the reader chooses a step, a stage and a request, and it is drawn.

Every text reaches the page as ``textContent``, so nothing in it is ever markup.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SCRIPT"]

SCRIPT: Final = r"""
const data = JSON.parse(document.getElementById("data").textContent);
const STORES = {
  req_to_token: "req_to_token", full_to_swa: "full_to_swa", sidecar: "sidecar", relay: "relay",
  page_refs: "page refs", swa_refs: "window refs", c128_refs: "C128 refs",
  swa: "window", c4: "C4", index: "index keys", c128: "C128",
  c4_state: "C4 state", index_state: "index state", c128_state: "C128 state",
};
const LONGEST = 192;  // positions of a request that are drawn; of a longer one its end
const MOST = 8192;    // slots of a pool that are drawn
const ENTRIES = 16;   // C128 entries a page
const RING4 = 8, RING128 = 128;
const chosen = { step: 0, stage: -1, request: null };

// Elements.

function el(tag, name, ...children) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  for (const child of children.flat()) if (child !== null && child !== "") node.append(child);
  return node;
}
const button = (text, act, title) => {
  const node = el("button", "", text);
  node.type = "button";
  if (title) node.title = title;
  node.addEventListener("click", act);
  return node;
};
const nameOf = id => id < 26 ? String.fromCharCode(65 + id) : "#" + id;
const tag = id => el("span", "tag", nameOf(id));
const wordOf = id => data.texts[id] === undefined ? "" : JSON.stringify(data.texts[id]);
const token = id => el("span", "", String(id), " ", el("span", "word", wordOf(id)));
const section = (title, hint, ...children) => {
  const node = el("section", "", el("h2", "", title));
  if (hint) node.append(el("p", "hint", hint));
  node.append(...children.flat());
  return node;
};

function ranges(numbers) {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b), parts = [];
  for (let i = 0; i < sorted.length; i++) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === sorted[j] + 1) j++;
    parts.push(i === j ? `${sorted[i]}` : `${sorted[i]}–${sorted[j]}`);
    i = j;
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")}, … (${sorted.length})` : parts.join(", ");
}

// What is chosen.

const trace = () => data.traces[chosen.step];
const stage = () => trace().stages[chosen.stage];
const isMine = id => chosen.request === null || chosen.request === id;
const accesses = what => (stage() ? [stage()] : trace().stages)
  .flatMap(one => one[what]).filter(a => isMine(a.request_id));

/** Sets of "store:slot" (tables of rows: "store:request:column") that the chosen stages touch. */
function touched(what) {
  const found = new Set();
  for (const a of accesses(what)) {
    const owner = a.store === "req_to_token" || a.store === "sidecar" ? `${a.request_id}:` : "";
    for (const slot of a.slots) found.add(`${a.store}:${owner}${slot}`);
  }
  return found;
}

/** "request:position" of every token that the caches of the chosen stage hold a row or an entry for. */
function concerned() {
  const found = new Set(), spans = { c4: 4, index: 4, c128: RING128 };
  for (const a of stage() ? [...accesses("reads"), ...accesses("writes")] : []) {
    for (const end of a.layer === null ? [] : a.positions) {
      for (let back = 0; back < (spans[a.store] || 1); back++) found.add(`${a.request_id}:${end - back}`);
    }
  }
  return found;
}

function mark(node, marks, ...keys) {
  if (keys.some(key => marks.reads.has(key))) node.classList.add("r");
  if (keys.some(key => marks.writes.has(key))) node.classList.add("w");
  return node;
}

/** A cell in the colour of a page; page numbers next to each other get hues far apart. */
function cell(text, page, title) {
  const node = el("span", page === null ? "cell empty" : "cell", text);
  if (page !== null) node.style.setProperty("--h", Math.round(page * 137.508) % 360);
  if (title) node.title = title;
  return node;
}

const places = request => request.slots_after
  .map((slot, position) => ({ position, slot, window: request.windows_after[position] }));
const drawn = request => places(request).slice(-LONGEST);
const holders = () => trace().requests.filter(request => request.len_after > 0);
const pageOf = slot => Math.floor(slot / trace().page_size);

// The frame: steps, requests, stages.

function header() {
  const steps = data.traces.map((_, i) => {
    const node = button(String(i + 1), () => choose({ step: i }), `step ${i + 1}`);
    node.setAttribute("aria-pressed", i === chosen.step);
    return node;
  });
  const back = button("◀", () => choose({ step: chosen.step - 1 }), "step before");
  const next = button("▶", () => choose({ step: chosen.step + 1 }), "next step");
  back.disabled = chosen.step === 0;
  next.disabled = chosen.step === data.traces.length - 1;
  const owners = [null, ...trace().requests.map(r => r.request_id)].map(id => {
    const node = button(id === null ? "all" : nameOf(id), () => choose({ request: id }));
    node.setAttribute("aria-pressed", id === chosen.request);
    return node;
  });
  document.getElementById("steps").replaceChildren(el("span", "soft", "step"), back, ...steps, next);
  document.getElementById("requests").replaceChildren(el("span", "soft", "request"), ...owners);
}

function stages() {
  const nav = document.getElementById("stages"), items = [];
  const kinds = { 0: "window", 4: "window, C4", 128: "window, C128" };
  const entry = (index, text, one) => {
    const node = button("", () => choose({ stage: index }));
    const count = what => one ? one[what].reduce((sum, a) => sum + a.slots.length, 0) : 0;
    node.append(el("span", "", text), el("span", "r", count("reads") ? `r${count("reads")}` : ""),
      el("span", "w", count("writes") ? `w${count("writes")}` : ""));
    if (index === chosen.stage) node.setAttribute("aria-current", "true");
    items.push(node);
  };
  entry(-1, "the whole step", null);
  let group;
  trace().stages.forEach((one, index) => {
    if (one.layer !== group) {
      const after = index > 3 ? "after the layers" : "before the layers";
      const kind = kinds[trace().compress_ratios[one.layer]];
      items.push(el("h3", "", one.layer === null ? after : `layer ${one.layer}: ${kind}`));
      group = one.layer;
    }
    entry(index, one.layer === null ? one.name : one.name.slice(one.name.indexOf(".") + 1), one);
  });
  const top = nav.scrollTop;
  nav.replaceChildren(...items);
  nav.scrollTop = top;
  const at = nav.querySelector("[aria-current]").offsetTop;
  if (at < top || at > top + nav.clientHeight - 30) nav.scrollTop = at - 120;
}

function choose(change) {
  Object.assign(chosen, change);
  chosen.step = Math.max(0, Math.min(data.traces.length - 1, chosen.step));
  chosen.stage = Math.max(-1, Math.min(trace().stages.length - 1, chosen.stage));
  if (!trace().requests.some(r => r.request_id === chosen.request)) chosen.request = null;
  const parts = [`step=${chosen.step + 1}`, ...(stage() ? [`stage=${stage().name}`] : []),
    ...(chosen.request === null ? [] : [`request=${chosen.request}`])];
  history.replaceState(null, "", "#" + parts.join("&"));
  draw();
}

function draw() {
  const marks = { reads: touched("reads"), writes: touched("writes") };
  const content = document.getElementById("content");
  content.classList.toggle("focused", Boolean(stage()));
  const drawings = [batchPart(), legend(), tablePart(marks), ...poolParts(marks), freePart()];
  const ends = stage() ? [stagePart(), relayPart(marks)] : [relayPart(marks), stagePart()];
  content.replaceChildren(ends[0], ...drawings, ends[1]);
  header();
  stages();
}

document.addEventListener("keydown", event => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const moves = {
    ArrowLeft: { step: chosen.step - 1 }, ArrowRight: { step: chosen.step + 1 },
    ArrowUp: { stage: chosen.stage - 1 }, ArrowDown: { stage: chosen.stage + 1 },
    Escape: { stage: -1, request: null },
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  choose(moves[event.key]);
});

const asked = new URLSearchParams(location.hash.slice(1));
chosen.step = Math.max(0, Math.min(data.traces.length, Number(asked.get("step") || 1)) - 1);
choose({ stage: trace().stages.findIndex(one => one.name === asked.get("stage")),
  request: asked.has("request") ? Number(asked.get("request")) : null });
"""
"""The reader's choices, and small pieces that the drawings are made of."""
