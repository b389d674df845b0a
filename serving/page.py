"""``GET /``: one page that shows what the server is doing, from a stream of records; needs nothing but the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from .engine import EngineStatus

__all__ = ["PAGE", "live_record"]


def live_record(name: str, status: EngineStatus, requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Write what the page draws.

    Args:
        name: of the model.
        status: of the engine.
        requests: one record for every generation request that is being served.
    """
    return {
        "model": name,
        "running": status.running,
        "waiting": status.waiting,
        "silent": status.seconds_since_progress,
        "pools": {pool: list(pages) for pool, pages in status.pools.items()},
        "bytes": dict(status.pool_bytes),
        "counters": dict(status.counters),
        "requests": list(requests),
    }


PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>purestep</title>
<link rel="icon" href="data:,">
<style>
:root {
  color-scheme: light dark;
  --paper: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5d6b7e; --line: #dbe1e8; --accent: #2457c5; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #11151b; --card: #191f28; --ink: #e4e9f0; --soft: #97a4b5; --line: #2e3846; --accent: #7da7ff;
    --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 20px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
header { display: flex; gap: 12px; align-items: baseline; flex-wrap: wrap; }
h1 { font-size: 20px; margin: 0; }
h2 { font-size: 15px; margin: 0 0 8px; }
.soft { color: var(--soft); font-size: 13px; }
.bad { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px;
  margin-top: 16px; }
#tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px; }
#tiles b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: 90px; display: block; }
polyline { fill: none; stroke: var(--accent); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12px; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
meter { width: 100%; min-width: 90px; }
</style>
<header><h1>purestep</h1><span id="model"></span><span id="state" class="soft" role="status">connecting</span></header>
<section id="tiles" aria-label="Numbers"></section>
<section><h2>Tokens a second, sampled</h2><svg viewBox="0 0 240 100" preserveAspectRatio="none" role="img"
 aria-label="Tokens a second over the last two minutes"><polyline id="speed"/></svg>
 <div class="soft">last two minutes, at most <span id="most">0</span></div></section>
<section><h2>Requests</h2><table><thead><tr><th>id<th>endpoint<th>prompt<th>cached<th>said<th>seconds</tr></thead>
 <tbody id="requests"></tbody></table></section>
<section><h2>Pools</h2><table><thead><tr><th>pool<th>used<th>of<th></tr></thead>
 <tbody id="pools"></tbody></table></section>
<section><h2>Cache memory</h2><table><tbody id="bytes"></tbody></table></section>
<script>
"use strict";
const speeds = [];
let before = null;
const at = id => document.getElementById(id);
const number = found => found.toLocaleString("en", { maximumFractionDigits: 1 });

function rows(id, lines) {
  at(id).replaceChildren(...lines.map(cells => {
    const row = document.createElement("tr");
    row.append(...cells.map(cell => {
      const box = document.createElement("td");
      box.append(cell);
      return box;
    }));
    return row;
  }));
}

function tile(label, found) {
  const [box, strong, small] = ["div", "b", "span"].map(name => document.createElement(name));
  strong.textContent = number(found);
  small.textContent = label;
  small.className = "soft";
  box.append(strong, small);
  return box;
}

function rate(now, name) {
  if (!before || now.when === before.when) return 0;
  return Math.max(0, (now.counters[name] - before.counters[name]) / (now.when - before.when) * 1000);
}

function draw(now) {
  now.when = performance.now();
  const speed = rate(now, "generated_tokens");
  speeds.push(speed);
  if (speeds.length > 240) speeds.shift();
  const most = Math.max(1, ...speeds);
  at("speed").setAttribute("points", speeds.map((one, x) => `${x},${98 - 96 * one / most}`).join(" "));
  at("most").textContent = number(most);
  at("model").textContent = now.model;
  const stalled = now.silent !== null && now.silent > 10;
  at("state").textContent = stalled ? `no progress for ${number(now.silent)} s` : now.running ? "working" : "idle";
  at("state").className = stalled ? "bad" : "soft";
  at("tiles").replaceChildren(
    tile("running", now.running), tile("waiting", now.waiting), tile("tokens/s", speed),
    tile("steps/s", rate(now, "steps")), tile("tokens sampled", now.counters.generated_tokens),
    tile("prompt tokens reused", now.counters.cached_tokens), tile("retractions", now.counters.retractions),
    tile("aborts", now.counters.aborts));
  rows("requests", now.requests.map(one => [one.id, one.path, number(one.prompt_tokens), number(one.cached_tokens),
    number(one.completion_tokens), number(one.seconds)]));
  rows("pools", Object.entries(now.pools).map(([name, [used, total]]) => {
    const bar = document.createElement("meter");
    bar.max = total;
    bar.value = used;
    bar.setAttribute("aria-label", `${name}: ${used} of ${total}`);
    return [name, number(used), number(total), bar];
  }));
  rows("bytes", Object.entries(now.bytes).map(([name, size]) => [name, number(size)]));
  before = now;
}

async function listen() {
  const key = sessionStorage.getItem("key");
  const answer = await fetch("live", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
  if (answer.status === 401) {
    sessionStorage.setItem("key", prompt("API key of this server") || "");
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let heard = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard += value;
    const events = heard.split("\\n\\n");
    heard = events.pop();
    events.filter(one => one.startsWith("data: ")).forEach(one => draw(JSON.parse(one.slice(6))));
  }
}

async function follow() {
  for (;;) {
    try { await listen(); } catch { }
    at("state").textContent = "not connected";
    at("state").className = "bad";
    before = null;
    await new Promise(done => setTimeout(done, 1000));
  }
}

follow();
</script>
</html>
"""
"""The page; it draws ``live_record`` as it comes."""
