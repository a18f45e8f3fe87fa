"""Measures how fast and how steady the page is: `python -m bench.page`, in headless Chromium on this machine.

Its size, its first paint, the time from an event's bytes to the screen, frames while answers and trees grow, opening
long chats and typing in them, cut connections, the time from Stop to an idle engine, and Lighthouse's scores. Parts
that need known words run on the real server with a scripted checkpoint; parts that need citations or a search, on the
tests' scripted server.
"""
