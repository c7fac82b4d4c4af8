"""The style of a report: light and dark, wide and narrow, on a screen and on paper."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c1f24;--soft:#5c6570;--rule:#e1e3e6;
--code:#f3f4f5;--good:#1a7f4b;--bad:#c0392b;--wait:#9a6a00;--accent:#2457b2;
--c0:#2563c9;--c1:#d2601a;--c2:#1b8a5a;--c3:#8a44b3;--c4:#a8800f;--c5:#c2315f;--c6:#31788c;--c7:#666d76}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--card:#1d2126;--ink:#e6e8ea;--soft:#9aa4ae;
--rule:#323840;--code:#262b31;--good:#57c78a;--bad:#f0806f;--wait:#e0b354;--accent:#86b0f7;
--c0:#6ea3f5;--c1:#f0935a;--c2:#52c492;--c3:#c08be6;--c4:#d9b64a;--c5:#f0789d;--c6:#68b7cc;--c7:#a7aeb6}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,header{max-width:1180px;margin:0 auto;padding:0 24px}
header{padding-top:36px}
h1{font-size:30px;line-height:1.2;margin:0;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{font-size:20px;margin:48px 0 4px;padding-top:12px;border-top:1px solid var(--rule)}
h3{font-size:15px;margin:24px 0 8px}
p{margin:4px 0 12px}
.sub{color:var(--soft);margin:6px 0 0;overflow-wrap:anywhere}
.lead,.note{color:var(--soft);max-width:76ch}
.note{font-size:13px}.sub.note{max-width:none}
.badge{display:inline-block;font-size:13px;font-weight:600;border:1.5px solid;border-radius:99px;
padding:1px 11px;vertical-align:5px;margin-left:10px;letter-spacing:0}
.done{color:var(--good)}.failed,.killed{color:var(--bad)}.running,.interrupted{color:var(--wait)}
.cause{border-left:4px solid var(--bad);background:var(--card);padding:10px 16px;margin:20px 0 0;
overflow-wrap:anywhere;white-space:pre-wrap}
.cause.soft{border-color:var(--wait)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(204px,1fr));
gap:12px;margin:24px 0 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:21px;line-height:1.3;font-weight:600;
font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
nav{margin:22px 0 0;font-size:14px;display:flex;flex-wrap:wrap;gap:4px 18px}
a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}
.charts{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,370px),1fr));
margin:16px 0}
.chart{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;
padding:12px 12px 6px;break-inside:avoid;min-width:0;max-width:580px;display:flex;
flex-direction:column}
.chart svg{margin-top:auto}
.chart .note{margin:0 4px 8px}
figcaption{padding:0 4px 8px;line-height:1.4;overflow-wrap:anywhere}
.unit{color:var(--soft);font-size:13px}.unit::before{content:"in "}
.last{float:right;color:var(--soft);font-size:13px;font-variant-numeric:tabular-nums}
.keys{display:flex;flex-wrap:wrap;gap:1px 14px;font-size:13px;color:var(--soft)}
.key em{font-style:normal;color:var(--ink);font-variant-numeric:tabular-nums}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px;
vertical-align:-1px;print-color-adjust:exact;-webkit-print-color-adjust:exact}
svg{display:block;width:100%;height:auto}
.tick{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.line,.raw{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.raw{stroke-width:1;opacity:.42}.band{opacity:.16}
.hit{fill:transparent}.hit:hover{fill:currentColor;opacity:.08}
.spark{width:100px;height:20px}.spark .c0{fill:none;stroke-width:1.4}
.scroll{overflow-x:auto;margin:8px 0 16px}
table{border-collapse:collapse;font-size:14px;min-width:100%;background:var(--card)}
th,td{text-align:left;padding:5px 12px;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;color:var(--soft);font-size:13px;white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.w{overflow-wrap:anywhere;min-width:160px}
code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;
font-size:12.5px;overflow-wrap:anywhere}
details{margin:10px 0 16px}summary{cursor:pointer;color:var(--accent)}
.pair{background:var(--card);border:1px solid var(--rule);border-radius:8px;margin:14px 0;
padding:14px 16px}
.pair>h3{margin:0 0 2px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:20px}
.two>div{min-width:0}
.ep{display:flex;flex-wrap:wrap;gap:2px 14px;
align-items:baseline;border-bottom:1px solid var(--rule);padding:6px 0;margin-bottom:6px;
font-size:13px;color:var(--soft)}
.ep b{color:var(--ink);font-size:15px;font-variant-numeric:tabular-nums}
.msg{margin:0 0 6px;display:grid;grid-template-columns:74px minmax(0,1fr);gap:8px}
.msg span{font-size:12px;color:var(--soft);text-align:right;padding-top:4px;overflow-wrap:anywhere}
.msg pre{margin:0;padding:4px 10px;background:var(--code);border-radius:6px;white-space:pre-wrap;
overflow-wrap:anywhere;overflow:hidden;max-height:none;font-size:12.5px;line-height:1.45;
font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
.msg.own pre{border-left:3px solid var(--c0)}
.up{color:var(--good)}.down{color:var(--bad)}
footer{color:var(--soft);font-size:13px;margin:48px 0 32px;border-top:1px solid var(--rule);
padding-top:12px}
@media(max-width:560px){main,header{padding-left:14px;padding-right:14px}h1{font-size:24px}
.msg{grid-template-columns:minmax(0,1fr);gap:1px}.msg span{text-align:left}
.tiles{grid-template-columns:1fr 1fr}th,td{padding:5px 8px}.tick{font-size:15px}}
@media print{:root{color-scheme:light;--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc}
nav{display:none}body{font-size:11px}main,header{max-width:none;padding:0}
.chart,.pair,.tile{break-inside:avoid}.charts{grid-template-columns:1fr 1fr}
details::details-content{content-visibility:visible;height:auto}}
"""


def colours() -> str:
    """One class for each colour of a curve, an area and a key."""
    return "".join(
        f".c{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}.k{n}{{background:var(--c{n})}}"
        for n in range(8)
    )
