"""How the page of a check looks: light and dark, wide and narrow."""

STYLE = """
:root { --ink:#1b1f24; --soft:#57606a; --ground:#fff; --panel:#f6f7f9; --edge:#d8dde3;
  --good:#12805c; --bad:#c62a1b; --open:#b97a00; --line:#2463a6; --warm:#b4561b; }
@media (prefers-color-scheme: dark) { :root { --ink:#e4e8ec; --soft:#9aa5b1; --ground:#14171b; --panel:#1d2127;
  --edge:#333a42; --good:#3fb68b; --bad:#ff6b5b; --open:#e5ab3c; --line:#6cb0f2; --warm:#f0985a; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--ground); color:var(--ink); font:16px/1.5 system-ui,sans-serif; }
main { max-width:72rem; margin:0 auto; padding:1.5rem 1rem 4rem; overflow-wrap:anywhere; }
h1 { font-size:1.5rem; line-height:1.35; margin:.2rem 0; }
h2 { font-size:1.2rem; margin:2.4rem 0 .4rem; border-bottom:1px solid var(--edge); padding-bottom:.2rem; }
h3 { font-size:1rem; margin:1.1rem 0 .3rem; }
p { margin:.4rem 0; max-width:60rem; }
code { font:.9em ui-monospace,monospace; }
.name, .facts, .legend, figcaption span, .up, .across { color:var(--soft); }
.name, .facts, .legend { font-size:.9rem; }
.mark { border-radius:.3rem; padding:.05rem .45rem; color:var(--ground); font-weight:600;
  font-size:.85em; justify-self:start; white-space:nowrap; }
.PASS { background:var(--good); } .FAIL { background:var(--bad); } .UNDECIDED { background:var(--open); }
table { border-collapse:collapse; width:100%; font-size:.9rem; margin:.6rem 0; }
th, td { text-align:left; vertical-align:top; padding:.35rem .6rem .35rem 0; border-bottom:1px solid var(--edge);
  unicode-bidi:isolate; }
th { color:var(--soft); font-weight:500; white-space:nowrap; }
td { font-variant-numeric:tabular-nums; }
td { max-width:24rem; overflow-wrap:break-word; }
td[data-label=why] { min-width:12rem; overflow-wrap:anywhere; }
td:is([data-label=card], [data-label=UUID], [data-label^=median], [data-label=p95], [data-label=peak],
  [data-label^=equal]) { white-space:nowrap; }
.wide, .stack { overflow-x:auto; } .wide td, .wide th { white-space:nowrap; }
article { background:var(--panel); border:1px solid var(--edge); border-left:.3rem solid var(--bad);
  border-radius:.3rem; padding:.2rem 1rem .6rem; margin:.8rem 0; }
article:has(.UNDECIDED) { border-left-color:var(--open); }
summary { margin:.9rem 0 .3rem; cursor:pointer; } summary span { color:var(--soft); font-size:.9rem; }
.strips > div { display:grid; grid-template-columns:7.5rem 1fr; align-items:center; gap:.5rem; margin:1px 0; }
.strips .across { padding-left:8rem; display:flex; }
.who { font-size:.8rem; overflow:hidden; text-overflow:ellipsis; white-space:nowrap; }
.strip { width:100%; height:14px; background:var(--panel); display:block; }
.good { fill:var(--good); } rect.bad { fill:var(--bad); } .open { fill:var(--open); }
.panels { display:grid; grid-template-columns:repeat(auto-fit,minmax(15rem,1fr)); gap:1rem 1.2rem; margin:.8rem 0; }
figure { margin:0; min-width:0; display:grid; grid-template-columns:4.2rem 1fr; gap:0 .4rem; }
figcaption { grid-column:1 / -1; font-size:.85rem; }
.up { display:flex; flex-direction:column; justify-content:space-between; text-align:right; font-size:.72rem; }
.across { grid-column:2; display:flex; justify-content:space-between; font-size:.72rem; }
.chart { width:100%; height:4.5rem; background:var(--panel); border:1px solid var(--edge); display:block; }
.track { fill:none; stroke:var(--line); stroke-width:1.5; vector-effect:non-scaling-stroke; }
.track.bad { stroke:var(--bad); } .track.warm { stroke:var(--warm); }
.usual { stroke:var(--soft); stroke-width:1; stroke-dasharray:4 3; vector-effect:non-scaling-stroke; }
dl { font-size:.9rem; } dl div { display:grid; grid-template-columns:11rem 1fr; border-bottom:1px solid var(--edge); }
dt { color:var(--soft); } dd { margin:0; overflow-wrap:anywhere; font-family:ui-monospace,monospace; }
@media (max-width:46rem) {
  .stack thead, .stack td:empty { display:none; }
  .stack tr { display:block; border-bottom:1px solid var(--edge); padding:.5rem 0; }
  .stack td:nth-child(n) { display:grid; grid-template-columns:7rem 1fr; border:0; padding:.1rem 0;
    white-space:normal; overflow-wrap:anywhere; }
  .stack td::before { content:attr(data-label); color:var(--soft); }
  summary { margin:.9rem 0 .3rem; cursor:pointer; } summary span { color:var(--soft); font-size:.9rem; }
.strips > div { grid-template-columns:4.5rem 1fr; } .strips .across { padding-left:5rem; }
  dl div { grid-template-columns:1fr; }
}
@media print { body { font-size:11px; } section { break-inside:avoid; } }
"""
