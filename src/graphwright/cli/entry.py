"""Where the command starts."""

from .interrupts import CTRL_C


def run() -> None:
    """The command `graphwright`."""
    CTRL_C.take()
    from .main import main  # Only now, as it may be interrupted.

    main(prog_name="graphwright")
