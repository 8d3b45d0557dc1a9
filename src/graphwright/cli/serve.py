"""The command `serve`: from words to models, and the server until it is told to end."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import torch

from ..artifacts.loading import load
from ..errors import OptionError, TargetError
from ..serving.model_config import ModelConfig
from ..serving.options import ServerOptions, Source
from .interrupts import CTRL_C
from .targets import load_served, load_target

_SUFFIX = ".gw"


def sources_of(
    models: Sequence[str],
    inputs: Sequence[str],
    device: torch.device | None,
    target: str | None,
    *,
    trust: bool,
) -> dict[str, Source]:
    """What makes each model, by its name.

    Args:
        models: `[NAME=]TARGET` or `[NAME=]FILE.gw`.
        inputs: of --input.
        device: where models run; None for a GPU if there is one, and for files where they were
            saved.
        target: the model of the file.
        trust: whether code in files may be executed.

    Raises:
        OptionError: the options do not fit together, or two models have one name.
    """
    found: dict[str, Source] = {}
    for text in models:
        name, what = _parted(text)
        if name in found:
            raise OptionError(
                f"Two models are called {name}.", remedy=f"Give one another name: NAME={what}."
            )
        if _is_saved(what):
            if target is not None and len(models) > 1:
                raise OptionError("--model is of one FILE, and there are several models.")
            found[name] = functools.partial(_from_file, Path(what), target, device, trust)
        else:
            place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
            found[name] = functools.partial(load_served, what, inputs, place)
    return found


def _parted(text: str) -> tuple[str, str]:
    """The name of a model, and what it is made of."""
    name, given, what = text.partition("=")
    if given:
        if not name or not what:
            raise OptionError(f"{text!r} is no model.", remedy="Write NAME=TARGET.")
        return name, what
    if _is_saved(text):
        return Path(text).stem, text
    return text.rpartition(":")[2] or text, text


def _is_saved(text: str) -> bool:
    """Whether a text names a file that `tune --save` wrote or is to have written."""
    return text.endswith(_SUFFIX) or zipfile.is_zipfile(text)


def _from_file(
    file: Path, target: str | None, device: torch.device | None, trust: bool
) -> ModelConfig:
    if not file.is_file():
        raise TargetError(f"There is no file {file}.", remedy="`tune --save FILE` writes one.")
    model = None
    if target is not None:
        place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_target(target, (), place, inputs_needed=False).model
    return ModelConfig(load(file, model, trust=trust))


def run_server(sources: Mapping[str, Source], options: ServerOptions) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        GraphwrightError: a model cannot be served, or a port is taken.
    """
    from ..serving import interpreter
    from ..serving.server import check_ports, serve_until_told

    check_ports(options)
    click.echo(f"graphwright: preparing {', '.join(sources)} …", err=True)
    if not interpreter.run(
        serve_until_told(dict(sources), options, click.echo, CTRL_C.end_at_once)
    ):
        interpreter.end_process()
