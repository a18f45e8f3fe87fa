"""`python -m bench.serve`, as `ponder bench serve`."""

import typer

from bench.serve.command import serve

typer.run(serve)
