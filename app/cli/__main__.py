"""`python -m app.cli`: as `ponder`."""

from app.cli.main import main

main()
