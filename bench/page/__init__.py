"""Measures how fast and how steady the page is: `python -m bench.page`, in headless Chromium on this machine.

Its size, its first paint, the time from an event's bytes to the screen, frames while answers and trees grow, cut
connections, the time from Stop to an idle engine, and what Lighthouse says. What needs words that are known is
measured on the real server with a scripted checkpoint; what needs citations or a search, on the tests' scripted server.
"""
