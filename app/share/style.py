"""Style of a shared chat: the page's colours and measure, with the reader's own fonts."""

STYLE = """
:root{color-scheme:light dark;--paper:light-dark(#fafcfc,#14191c);--tint:light-dark(#e3efee,#222f33);
--line:light-dark(#dde3e4,#2c3438);--ink:light-dark(#1b2628,#e5eaeb);--muted:light-dark(#566568,#9fadb0);
--accent:light-dark(#11655f,#7fd0c6);--sunk:light-dark(#f2f6f6,#101416)}
*{box-sizing:border-box}
body{margin:0;padding:0 1rem;background:var(--paper);color:var(--ink);font:1rem/1.65 system-ui,sans-serif}
header,main,footer{max-width:44rem;margin-inline:auto}
header{padding:3rem 0 1rem;border-bottom:1px solid var(--line)}
h1{margin:0;font:400 2rem/1.15 ui-serif,Georgia,serif;overflow-wrap:anywhere;text-wrap:balance}
header p,footer,.remark{color:var(--muted);font-size:.875rem}
header p{margin:.5rem 0 0}
footer{padding:3rem 0 2rem}
article{margin:2rem 0}
article>h2{margin:0 0 .4rem;color:var(--muted);font-size:.8rem;font-weight:600}
.question{display:flex;flex-direction:column;align-items:flex-end}
.asked{max-width:min(85%,34rem);margin:0;padding:.65rem 1rem;border-radius:1.1rem 1.1rem .3rem 1.1rem;
background:var(--tint);white-space:pre-wrap;overflow-wrap:anywhere}
.prose{overflow-wrap:anywhere}
.prose>*{margin-block:.9rem}
.prose :is(h3,h4,h5,h6){line-height:1.3}
table{display:block;overflow-x:auto;border-collapse:collapse}
:is(th,td){padding:.4rem 1.25rem .4rem 0;border-bottom:1px solid var(--line);text-align:start;vertical-align:top}
pre{margin:.5rem 0;padding:.75rem .9rem;overflow-x:auto;border:1px solid var(--line);border-radius:.6rem;
background:var(--sunk);font:.85rem/1.55 ui-monospace,monospace;white-space:pre-wrap}
code{font:.88em ui-monospace,monospace}
pre code{font:inherit}
blockquote{margin:.3rem 0;padding-inline-start:1rem;border-inline-start:3px solid var(--line);color:var(--muted)}
a{color:var(--accent);text-underline-offset:.18em}
a:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
details{margin:.5rem 0;color:var(--muted);font-size:.9rem}
summary{cursor:pointer}
.thinking{white-space:pre-line;overflow-wrap:anywhere;
padding-inline-start:1rem;border-inline-start:2px solid var(--line)}
.cite{margin-inline-start:.25em;padding:0 .3em;border:1px solid var(--line);border-radius:.4em;background:var(--tint);
font-size:.72em;font-weight:600;text-decoration:none;vertical-align:.2em}
.cite.none{background:none;border-style:dotted;color:var(--muted);font-weight:400}
.sources{font-size:.9rem}
.sources h3{margin:1rem 0 .3rem;font-size:.9rem}
.sources ol{list-style:none;margin:0;padding:0}
.sources li{padding:.4rem 0;overflow-wrap:anywhere}
.sources li:target{background:var(--tint)}
@media print{details{display:none}}
"""
