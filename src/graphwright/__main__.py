"""`python -m graphwright` is the command line."""

from .cli.entry import run

run()
