"""The drawings of the page of a trace: batch, stage, tables, pools, rings, relay.

They are functions of what ``trace_script.py`` knows to be chosen.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DRAWINGS"]

DRAWINGS: Final = r"""
const gridOf = (heads, rows) => el("div", "scroll", el("table", "",
  el("thead", "", el("tr", "", heads.map(head => el("th", "", head)))), el("tbody", "", rows)));

function batchPart() {
  const heads = ["", "table row", "fed", "position", "length L → L+1", "slot", "found as", "window slot", "closes",
    "sampled"];
  const body = trace().requests.map(r => {
    if (r.batch_row === null) {
      return el("tr", "away", el("td", "", tag(r.request_id)), el("td", "", r.row ? String(r.row) : "–"),
        Object.assign(el("td", "", "does not run in this step"), { colSpan: 8 }));
    }
    const closes = [r.out_c4_loc.length ? `C4 at ${ranges(r.out_c4_loc)}` : "",
      r.out_c128_loc.length ? `C128 at ${ranges(r.out_c128_loc)}` : ""].filter(Boolean).join(", ");
    const cells = [tag(r.request_id), String(r.row), r.input_ids.length > 3 ? `${r.input_ids.length} tokens`
      : el("span", "", r.input_ids.map(token)), ranges(r.positions), `${r.len_before} → ${r.len_after}`,
      ranges(r.out_full_loc), [...new Set(r.slot_rules)].slice(0, 3).join(", "), ranges(r.out_swa_loc), closes || "–",
      el("span", "", token(r.sampled), r.finished ? ` · ends: ${r.finished}` : "")];
    return el("tr", isMine(r.request_id) ? "" : "away", cells.map((one, i) => el("td", i ? "num" : "", one)));
  });
  return section("The batch", "Slots are given under the old length L; the token stands at position L, and kernels "
    + "see length L+1.", gridOf(heads, body));
}

function accessLines(what) {
  const lines = new Map();
  for (const a of accesses(what)) {
    if (!lines.has(a.store)) lines.set(a.store, new Map());
    const owners = lines.get(a.store);
    if (!owners.has(a.request_id)) owners.set(a.request_id, new Map());
    a.slots.forEach((slot, i) => owners.get(a.request_id).set(slot, a.values[i]));
  }
  const show = slots => slots.size > 3 || [...slots.values()].includes(undefined) ? ranges(slots.keys())
    : [...slots].map(([slot, value]) => `${slot} = ${value}`).join(", ");
  return [...lines].map(([store, owners]) => el("div", "", el("span", "store", STORES[store]),
    [...owners].map(([id, slots]) => el("span", "owner", tag(id), " ", el("code", "", show(slots))))));
}

function stagePart() {
  const one = stage(), list = el("dl"), t = trace();
  const ask = (question, answer, name) => list.append(el("dt", "", question), el("dd", name || "", answer));
  const touches = what => {
    const lines = accessLines(what);
    ask(what === "reads" ? "Which history is read?" : "Which state is written?", lines.length ? lines : "none",
      lines.length ? what : "none");
  };
  if (!one) {
    touches("reads");
    touches("writes");
    return section("All reads and writes of the step",
      "Choose a stage on the left to see its own, and its answers to the questions.", list);
  }
  const rows = one.request_ids.map((id, i) => ({ id, position: one.positions[i] }));
  const shown = rows.length > 12 ? rows.slice(0, 12) : rows;
  ask("How many tokens?", `${one.n_tokens}`);
  ask("Which shape?", one.shapes.flatMap((shape, i) => [i ? " → " : "",
    el("code", "", shape.token), ` ${shape.sizes.join("×")}`]));
  ask("Whose, and where?", shown.map(row => `${nameOf(row.id)} at position ${row.position}`).join(" · ")
    + (rows.length > shown.length ? ` · … ${rows.length} in all` : ""));
  touches("reads");
  touches("writes");
  const quiet = text => /^(unchanged|not here|no part)/.test(text) ? "none" : "";
  ask("Does a row change its owner?", one.ownership, quiet(one.ownership));
  ask("Does a tensor change its shards?", one.shards, quiet(one.shards));
  ask("Is the whole vocabulary here?", one.vocabulary, quiet(one.vocabulary));
  ask("How does the sample become the next input?", one.next_input, quiet(one.next_input));
  if (one.choices.length) {
    const experts = c => c.ids.map((id, i) => `expert ${id} (${c.weights[i].toFixed(2)})`).join(", ");
    const entries = c => `${ranges(c.ids) || "none"} of ${c.n_candidates}`;
    ask(one.choices[0].weights.length ? "Which experts?" : "Which entries?",
      one.choices.filter(c => isMine(c.request_id))
        .map(c => el("div", "", tag(c.request_id), ` ${c.weights.length ? experts(c) : entries(c)}`)));
  }
  if (one.experts.length) {
    ask("Which rows meet at which expert?", one.experts.map(e => el("div", "", `expert ${e.expert_id} ← `,
      e.rows.map(row => tag(one.request_ids[row])))));
  }
  const node = section(one.name, one.title, list);
  node.id = "stage";
  return node;
}

function tablePart(marks) {
  const near = concerned();
  const rows = holders().map(r => {
    const spots = drawn(r).map(({ position, slot, window }) => {
      const page = pageOf(slot);
      const where = `full slot ${slot}, page ${page}, ${window ? `window slot ${window}` : "window given back"}`;
      const node = cell(String(slot), page, `${nameOf(r.request_id)}, position ${position}: ${where}`);
      mark(node, marks, `req_to_token:${r.request_id}:${position}`);
      if (near.has(`${r.request_id}:${position}`)) node.classList.add("near");
      return el("span", "spot", node, el("small", "", String(position)));
    });
    const hidden = r.len_after - spots.length;
    return el("div", "row", el("div", "", tag(r.request_id), el("div", "hint", `row ${r.row}`)),
      el("div", "cells", hidden ? el("span", "hint", `… ${hidden} before`) : "", spots));
  });
  return section("req_to_token", "Full slot of every position; below it the position. A colour is a page of "
    + `${trace().page_size} positions and stays with them in all drawings.`
    + (near.size ? " Positions whose entries the chosen stage touches keep their colour." : ""), rows);
}

/** What lies where after the step: place -> {name, page, position}; later positions take places over. */
function contents(placeOf) {
  const found = new Map();
  for (const r of holders()) {
    for (const one of places(r)) {
      const place = placeOf(one, r);
      if (place === null) continue;
      const sharers = found.has(place) && found.get(place).slot === one.slot ? found.get(place).names : [];
      found.set(place, { ...one, names: [...sharers, nameOf(r.request_id)], page: pageOf(one.slot) });
    }
  }
  return found;
}

const slotsOf = (kinds, stores) => trace().stages.flatMap(one => kinds.flatMap(kind => one[kind]))
  .filter(a => stores.includes(a.store)).flatMap(a => a.slots);

/** Draw the pages of a pool that somebody names or the step touches; of very many, the last and the written ones. */
function pages(held, width, marks, stores, options) {
  const page = slot => Math.floor(slot / width);
  const distinct = numbers => [...new Set(numbers)].sort((a, b) => a - b);
  const written = slotsOf(["writes"], stores).map(page);
  const read = slotsOf(["reads"], stores).map(page);
  const named = distinct([...[...held.keys()].map(page), ...read, ...written, ...(options.given || [])]);
  const room = Math.ceil(MOST / width);
  const numbers = named.length > room ? distinct([...named.slice(-room), ...written]) : named;
  const more = named.length - numbers.length;
  const note = more ? el("div", "hint", `${more} more pages are not drawn`) : "";
  return el("div", width > 16 ? "pages small" : "pages", note, numbers.map(number => {
    const taken = (options.taken || []).includes(number), given = (options.given || []).includes(number);
    const slots = given && !taken ? 0 : width;  // nothing is left to see on a page that was given back
    const cells = Array.from({ length: slots }, (_, offset) => {
      const slot = number * width + offset, one = held.get(slot);
      const node = cell(one ? one.names.join("") + options.label(one) : "·", one ? one.page : null,
        one ? `slot ${slot}: ${one.names.join(", ")}, position ${one.position}` : `slot ${slot}: nothing`);
      return mark(node, marks, ...stores.map(store => `${store}:${slot}`));
    });
    const state = taken ? " · taken in this step" : given ? " · given back in this step" : "";
    const wide = width >= 128 ? "wide32" : width > 16 ? "wide16" : "";
    return el("div", `page ${taken ? "new" : ""} ${given ? "gone" : ""}`,
      el("div", "head", `${options.word} ${number}${state}`), el("div", `cells ${wide}`, cells));
  }));
}

function poolParts(marks) {
  const kinds = trace().compress_ratios, parts = [windowPart(marks)];
  if (kinds.includes(4)) parts.push(...c4Parts(marks));
  if (kinds.includes(128)) parts.push(...c128Parts(marks));
  return parts;
}

const poolNamed = name => trace().pools.find(one => one.name === name);
const byPosition = one => `${one.position}`;

function windowPart(marks) {
  const { taken, given } = poolNamed("window"), layer = stage() ? stage().layer : null;
  return section("Window pool (SWA)", "Keys and values of the last tokens, in pages of their own that full_to_swa "
    + `names; slots are the same in all layers.${layer === null ? "" : ` Marked: layer ${layer}.`}`,
    pages(contents(one => one.window || null), trace().page_size, marks, ["swa"],
      { word: "page", label: byPosition, taken, given }));
}

function c4Parts(marks) {
  const size = trace().page_size, { taken } = poolNamed("full");
  const entries = contents(one => one.position % 4 === 3 ? Math.floor(one.slot / 4) : null);
  const ring = contents(one => one.window ? Math.floor(one.window / size) * RING4 + one.window % RING4 : null);
  return [
    section("C4 entries and index keys", "One entry per 4 tokens at full slot ÷ 4: it lives and dies with its full "
      + "page. Shown as request · group.",
      pages(entries, size / 4, marks, ["c4", "index"],
        { word: "page", label: one => `·${Math.floor(one.position / 4)}`, taken })),
    section("C4 pooling state", "A ring of 8 rows per window page: what tokens leave for the group that they are in.",
      pages(ring, RING4, marks, ["c4_state", "index_state"], { word: "ring of page", label: byPosition })),
  ];
}

function c128Parts(marks) {
  const entries = new Map(), ring = new Map();
  for (const r of holders()) {
    for (let group = 0; group < Math.floor(r.len_after / RING128); group++) {
      const page = r.sidecar_after[Math.floor(group / ENTRIES)], slot = page * ENTRIES + group % ENTRIES;
      const names = entries.has(slot) ? entries.get(slot).names : [];
      entries.set(slot, { names: [...names, nameOf(r.request_id)], page, position: group * RING128 + RING128 - 1 });
    }
    for (const one of places(r).slice(-RING128)) {
      const row = r.row * RING128 + one.position % RING128;
      ring.set(row, { ...one, names: [nameOf(r.request_id)], page: pageOf(one.slot) });
    }
  }
  const sidecar = holders().map(r => el("div", "row", el("div", "", tag(r.request_id)), el("div", "cells",
    r.sidecar_after.map((page, column) => mark(
      cell(`page ${page}`, page, `groups ${column * ENTRIES} to ${column * ENTRIES + ENTRIES - 1}`),
      marks, `sidecar:${r.request_id}:${column}`)),
    r.sidecar_after.length ? "" : el("span", "hint", `no page: ${r.len_after} tokens close no group of 128`))));
  const { taken } = poolNamed("c128");
  return [
    section("C128 entries and the sidecar", "One entry per 128 tokens, in pages of 16 that a request's row of the "
      + "sidecar names.", sidecar,
      pages(entries, ENTRIES, marks, ["c128"],
        { word: "page", label: one => `·${Math.floor(one.position / RING128)}`, taken })),
    section("C128 pooling state", "A ring of 128 rows per table row.",
      pages(ring, RING128, marks, ["c128_state"], { word: "ring of row", label: byPosition })),
  ];
}

function freePart() {
  const rows = trace().pools.map(one => {
    const next = one.next_after.join(", ") + (one.n_free_after > one.next_after.length ? ", …" : "");
    const free = `${one.n_free_before} → ${one.n_free_after}`;
    const cells = [free, ranges(one.taken) || "–", ranges(one.given) || "–", next];
    return el("tr", "", el("td", "", one.name), cells.map(text => el("td", "num", text)));
  });
  return section("Free pages", "Taken from the head in batch order; what comes back goes to the front.",
    gridOf(["pool", "free pages", "taken", "given back", "next to be taken"], rows));
}

function relayPart(marks) {
  const trips = trace().requests.filter(r => r.batch_row !== null && isMine(r.request_id)).map(r => {
    const box = (small, ...inside) => el("div", "box", el("small", "", small), inside);
    const arrow = () => el("span", "arrow", "→");
    const last = r.input_ids.length - 1;
    return el("div", "trip", tag(r.request_id),
      box(`fed at position ${r.positions[last]}`, token(r.input_ids[last])), arrow(),
      box("layers and head", "hidden row, scores"), arrow(),
      box("sampled", token(r.sampled)), arrow(),
      mark(box(`relay[${r.row}]`, String(r.sampled)), marks, `relay:${r.row}`), arrow(),
      r.finished ? box("ends", r.finished) : box("next input", `position ${r.len_after}`));
  });
  return section("From sample to next input",
    "A sampled token is only an id: its keys and values come into being when the next step feeds it.", trips);
}

function legend() {
  const key = (name, text) => {
    const node = cell("12", 3);
    node.classList.add("key", ...(name ? [name] : []));
    return el("span", "", node, text);
  };
  const empty = cell("·", null);
  empty.classList.add("key");
  return el("section", "legend", key("r", "read"), key("w", "written"), key("", "held; colour = page"),
    el("span", "", empty, "nothing there"), el("span", "", "Keys: ← → steps, ↑ ↓ stages, Esc the whole step"));
}
"""
"""One function per part of the page."""
