"""How the page of a trace looks: one style sheet, light or dark as the reader's system is."""

from __future__ import annotations

from typing import Final

__all__ = ["STYLE"]

STYLE: Final = """
:root {
  color-scheme: light dark;
  --paper: #f6f7f9; --card: #ffffff; --ink: #1c2430; --soft: #5d6b7e; --line: #dbe1e8; --faint: #eef1f5;
  --accent: #2457c5; --read: #2457c5; --write: #d9480f; --page-s: 62%; --page-l: 87%; --page-edge: 66%;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #11151b; --card: #191f28; --ink: #e4e9f0; --soft: #97a4b5; --line: #2e3846; --faint: #202834;
    --accent: #7da7ff; --read: #7da7ff; --write: #ff9150; --page-s: 32%; --page-l: 27%; --page-edge: 44%;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 15px; margin: 0 0 2px; }
h3 { font-size: 13px; margin: 14px 0 4px; font-weight: 600; }
p { margin: 0 0 10px; max-width: 110ch; }
.soft, .hint { color: var(--soft); }
.hint { font-size: 13px; }
code, .num, .cell, .tag, nav button { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
code { font-size: 13px; }
button { font: inherit; color: inherit; background: none; border: 0; cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }

header {
  position: sticky; top: 0; z-index: 2; background: var(--card); border-bottom: 1px solid var(--line);
  padding: 10px 20px; display: flex; flex-wrap: wrap; gap: 8px 24px; align-items: center;
}
header .spread { flex: 1 1 240px; }
.group { display: flex; gap: 4px; align-items: center; }
.group button {
  border: 1px solid var(--line); border-radius: 6px; min-width: 34px; padding: 3px 9px; background: var(--card);
}
.group button:hover { border-color: var(--accent); }
.group button[aria-pressed=true] { background: var(--accent); border-color: var(--accent); color: var(--card); }
.group button:disabled { opacity: .35; cursor: default; border-color: var(--line); }

main { display: grid; grid-template-columns: 232px minmax(0, 1fr); gap: 16px; padding: 16px 20px; max-width: 1500px; }
nav {
  position: sticky; top: 72px; align-self: start; max-height: calc(100vh - 88px); overflow: auto;
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 8px;
}
nav h3 { margin: 10px 8px 2px; font-size: 12px; color: var(--soft); font-weight: 500; }
nav button {
  display: flex; width: 100%; text-align: left; padding: 2px 8px; border-radius: 6px; font-size: 13px; gap: 4px;
}
nav button span:first-child { flex: 1; }
nav button:hover { background: var(--faint); }
nav button[aria-current=true] { background: var(--accent); color: var(--card); }
nav .r, nav .w { font-size: 11px; align-self: center; min-width: 26px; text-align: right; }
nav .r { color: var(--read); } nav .w { color: var(--write); }
nav button[aria-current=true] .r, nav button[aria-current=true] .w { color: inherit; }

#content { display: grid; gap: 16px; }
#content > section {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; min-width: 0;
}
#content > #stage { border-left: 4px solid var(--accent); }

table { border-collapse: collapse; font-size: 14px; }
.scroll { overflow-x: auto; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12px; }
th, td { padding: 4px 13px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td .word { color: var(--soft); white-space: pre; }
tr.away { opacity: .4; }
.tag {
  display: inline-block; min-width: 20px; padding: 0 5px; border-radius: 5px; text-align: center; font-weight: 600;
  font-size: 13px; border: 1px solid var(--soft);
}

dl { display: grid; grid-template-columns: minmax(150px, 320px) minmax(0, 1fr); gap: 3px 16px; margin: 8px 0 0; }
dt { color: var(--soft); font-size: 13px; padding-top: 1px; }
dd { margin: 0; overflow-wrap: anywhere; }
dd.none { color: var(--soft); }
dd div + div { margin-top: 2px; }
dd .store { display: inline-block; min-width: 118px; font-weight: 600; }
dd .owner { margin-right: 14px; }
dd.reads .store { color: var(--read); } dd.writes .store { color: var(--write); }

.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; align-items: center; font-size: 13px; color: var(--soft); }
.legend .cell { margin-right: 6px; vertical-align: middle; }

.cells { display: flex; flex-wrap: wrap; gap: 3px; }
.cell {
  --h: 0; position: relative; display: inline-flex; align-items: center; justify-content: center;
  min-width: 34px; height: 26px; padding: 0 3px; font-size: 12px; border-radius: 4px;
  background: hsl(var(--h) var(--page-s) var(--page-l)); border: 1px solid hsl(var(--h) var(--page-s) var(--page-edge));
}
.cell.empty { background: transparent; border: 1px dashed var(--line); color: var(--soft); }
.small .cell { min-width: 15px; width: 15px; height: 15px; padding: 0; font-size: 0; border-radius: 3px; }
.cell.r { box-shadow: inset 0 -4px 0 var(--read); }
.cell.w { outline: 3px solid var(--write); outline-offset: -1px; z-index: 1; font-weight: 700; }
.small .cell.w { outline-width: 2px; }
.small .cell.r { box-shadow: inset 0 0 0 2.5px var(--read); }
.focused .cell:not(.r, .w, .near, .key) { opacity: .38; }

.row { display: grid; grid-template-columns: 92px minmax(0, 1fr); gap: 10px; padding: 7px 0; align-items: start; }
.row + .row { border-top: 1px solid var(--line); }
.spot { display: inline-flex; flex-direction: column; align-items: center; gap: 1px; }
.spot small { font-size: 10px; color: var(--soft); line-height: 1.1; margin-top: 3px; }

.pages { display: flex; flex-wrap: wrap; gap: 10px; align-items: flex-start; }
.page { border: 1px solid var(--line); border-radius: 7px; padding: 4px 6px 6px; background: var(--faint); }
.page .head { font-size: 11px; color: var(--soft); margin-bottom: 3px; }
.page.new { border-color: var(--write); } .page.new .head { color: var(--write); }
.page.gone { border-style: dashed; }
.page .cells { max-width: 720px; }
.page .cells.wide16 { max-width: 286px; }
.page .cells.wide32 { max-width: 510px; } .wide32 .cell { min-width: 13px; width: 13px; height: 13px; }

.trip { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; padding: 6px 0; }
.trip + .trip { border-top: 1px solid var(--line); }
.trip .box { border: 1px solid var(--line); border-radius: 7px; padding: 2px 10px; background: var(--faint); }
.trip .box.r { border-color: var(--read); } .trip .box.w { border-color: var(--write); }
.trip .box small { display: block; color: var(--soft); font-size: 11px; }
.trip .word { white-space: pre; }
.arrow { color: var(--soft); font-size: 18px; }

@media (max-width: 900px) {
  main { grid-template-columns: minmax(0, 1fr); }
  nav { position: static; max-height: 260px; }
}
"""
"""Of the whole page."""
