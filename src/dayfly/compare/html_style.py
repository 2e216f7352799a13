"""How the page looks: light, dark, narrow and on paper. No font, picture or script comes from elsewhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fff; --ink: #1c2127; --soft: #59636e; --line: #d5dae0; --panel: #f5f7f9;
  --worse: #b3470a; --worse-back: #fbe3d3; --better: #0b62a3; --better-back: #d9ebfa; --even: #8a94a0;
  --bar: #c3dcf1; --hatch: #aab3bd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --ink: #e4e8ec; --soft: #a3adb8; --line: #343c45; --panel: #1c2229;
    --worse: #ff9a5c; --worse-back: #48280f; --better: #6db8f2; --better-back: #12334d; --even: #77818c;
    --bar: #1f4666; --hatch: #5a6570;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 68rem; padding: 1.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100%;
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p, ul { margin: .4rem 0 .8rem; }
p, li { max-width: 50rem; }
a { color: var(--better); }
code, .grid b, .grid i, .grid u { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
code { font-size: .82em; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .9rem; margin-top: 1.25rem; }
.soft, caption, figcaption, footer { color: var(--soft); font-size: .87rem; }
.headline {
  border-left: 5px solid var(--even); background: var(--panel); padding: .8rem 1rem; margin: 0 0 .75rem;
  border-radius: 0 6px 6px 0;
}
.headline p { margin: .15rem 0; max-width: none; }
.headline .big { font-size: 1.15rem; font-weight: 600; }
.headline.worse { border-color: var(--worse); }
.headline.better { border-color: var(--better); }
td.worse, em.worse, .headline.worse em { color: var(--worse); }
td.better, em.better, .headline.better em { color: var(--better); }
em { font-style: normal; }
.chips { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem; padding: 0; }
.chips li { border: 1px solid var(--line); border-radius: 1em; padding: 0 .65em; font-size: .87rem; }
.scroll { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; padding: .2rem 0; max-width: calc(100vw - 2rem); }
.figures td { white-space: nowrap; min-width: 0; }
.figures td.soft { white-space: normal; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; }
th, td { border-bottom: 1px solid var(--line); }
thead th { overflow-wrap: normal; vertical-align: bottom; color: var(--soft); font-weight: 600; }
tbody th { font-weight: 500; min-width: 7rem; }
td { min-width: 5.5rem; }
figure { margin: .75rem 0 1.5rem; }
figcaption { margin-bottom: .35rem; }
svg { display: block; width: 100%; overflow: visible; font: 13px system-ui, "Segoe UI", Roboto, "Noto Sans",
  "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
svg svg { display: inline; }
.defs { position: absolute; }
svg text { fill: var(--ink); paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
svg .soft { fill: var(--soft); font-size: 12px; }
svg .count { font-weight: 600; stroke-width: 4px; }
.rule { stroke: var(--line); }
.zero { stroke: var(--soft); stroke-width: 1.5; }
.margin { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 4 3; }
.bar { stroke-width: 3; stroke: var(--soft); }
.bar.worse { stroke: var(--worse); } .bar.better { stroke: var(--better); }
.point { fill: var(--ink); stroke: var(--page); stroke-width: 1.5; }
.point.worse { fill: var(--worse); } .point.better { fill: var(--better); }
.ribbon { fill: var(--even); opacity: .38; }
.ribbon.worse { fill: var(--worse); opacity: .75; } .ribbon.better { fill: var(--better); opacity: .7; }
.node { fill: var(--ink); }
.hatch-line { stroke: var(--hatch); stroke-width: 2; }
.hatch-edge { stroke: var(--hatch); }
.grid { table-layout: fixed; min-width: calc(13rem + var(--columns) * 8.5rem); }
.grid th:first-child { width: 38%; }
.grid thead th { overflow-wrap: anywhere; }
.grid tbody th { font-weight: 400; padding-left: .35rem; }
.grid td, .swatch { border: 1px solid var(--line); padding: .15rem .45rem .3rem; }
.grid td { background: linear-gradient(var(--bar), var(--bar)) 0 100% / var(--s, 0) 4px no-repeat; }
.grid .worse { background-color: var(--worse-back); color: inherit; }
.grid .better { background-color: var(--better-back); color: inherit; }
.grid em { display: inline-block; width: 1.2em; font-weight: 700; }
.grid .worse em { color: var(--worse); } .grid .better em { color: var(--better); }
.grid b, .grid i, .grid u {
  display: inline-block; min-width: 1.35em; text-align: center; font-size: .8rem; line-height: 1.35;
  font-style: normal; text-decoration: none; border-radius: 3px; margin: 1px; border: 1px solid; padding: 0 .15em;
}
.grid b { font-weight: 700; color: var(--page); background: var(--better); border-color: var(--better); }
.grid i { color: var(--worse); border-color: var(--worse); background: var(--page); }
.grid u { color: var(--ink); border-color: var(--hatch); }
.grid u, .grid td.missing, .swatch {
  background: repeating-linear-gradient(135deg, transparent 0 4px, var(--hatch) 4px 5px), var(--page);
}
.grid td.missing span { background: var(--page); padding: 0 .3em; box-decoration-break: clone; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1.2rem; font-size: .87rem; }
.legend table, .legend .grid { display: inline; min-width: 0; }
.swatch { display: inline-block; width: 2.2em; height: 1.15em; vertical-align: -.2em; }
summary { cursor: pointer; font-weight: 600; padding: .35rem 0; }
:focus-visible { outline: 2px solid var(--better); outline-offset: 2px; }
@media (max-width: 40rem) {
  body { padding: 1rem .8rem 3rem; font-size: 14px; }
  h1 { font-size: 1.35rem; }
  .grid { min-width: calc(9rem + var(--columns) * 7rem); }
}
@media print {
  :root {
    color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --panel: #f5f7f9; --worse: #9a3c06;
    --worse-back: #fbe3d3; --better: #0b5591; --better-back: #d9ebfa; --even: #888; --bar: #c3dcf1; --hatch: #888;
  }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  tr, figure, .headline { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""
