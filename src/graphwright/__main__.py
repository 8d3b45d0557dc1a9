"""`python -m graphwright` is the command line."""

from .cli.main import main

main()
