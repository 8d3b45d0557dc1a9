"""`python -m graphwright` is the command line."""

from .cli import main

main()
