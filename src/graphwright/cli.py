"""graphwright tune | run | check | strategies | report.

Exit codes: 0 done; 1 check has found what blocks or breaks a capture; 2 the command, the target or
the model is wrong, said in one sentence; 130 interrupted, after what was known by then was printed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

EXIT_FOUND = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_TIMEOUT_S = 600.0


class _Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        text = str(value)
        factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
        try:
            return float(text[:-1]) * factor if factor else float(text)
        except ValueError:
            self.fail(f"{text!r} is no duration: write 120s or 2m", param, ctx)


class _Group(click.Group):
    """Turns graphwright's errors into one sentence on stderr and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        from .errors import GraphwrightError

        try:
            return super().invoke(ctx)
        except GraphwrightError as error:
            click.echo(f"graphwright: {error}", err=True)
            ctx.exit(EXIT_BAD_INPUT)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="graphwright")
def main() -> None:
    """Make PyTorch models fast on the machine they run on, and prove them still right."""


_INPUTS = click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SHAPE:DTYPE",
    help="A random argument, such as 8x128:float32 or 8x128:int64:30522; once an argument.",
)


@main.command()
@click.argument("target")
@_INPUTS
@click.option("--device", help="cpu, cuda or cuda:1; by default a GPU if there is one.")
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput", "memory", "cold_start"]),
    default="latency",
    show_default=True,
)
@click.option(
    "--allow", multiple=True, metavar="NAME", help="A lossy rewrite to try: tf32, bf16, fp16."
)
@click.option(
    "--strategies", metavar="A,B", help="Try only these, such as torchscript,inductor+graph."
)
@click.option("--tolerance", type=float, help="Relative error to accept, in place of 3 × eager's.")
@click.option("--budget", type=_Seconds(), help="Take no longer than this: 120s or 2m.")
@click.option(
    "--timeout",
    type=_Seconds(),
    default=_TIMEOUT_S,
    show_default="10m",
    help="Give a strategy up whose set-up or timing takes longer.",
)
@click.option(
    "--memory-limit", metavar="BYTES", help="What one strategy may take beside the model: 2GiB."
)
@click.option("--here", is_flag=True, help="Try strategies in this process, not in ones of theirs.")
@click.option("--fresh", is_flag=True, help="Tune though a choice of an earlier run is remembered.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Save all samples here.")
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False), help="Save a table.")
@click.option("--svg", "svg_file", type=click.Path(dir_okay=False), help="Save a picture.")
@click.option(
    "--save", "save_file", type=click.Path(dir_okay=False), help="Save the winner, for `run`."
)
def tune(
    target: str,
    inputs: Sequence[str],
    device: str | None,
    objective: str,
    allow: Sequence[str],
    strategies: str | None,
    tolerance: float | None,
    budget: float | None,
    timeout: float,
    memory_limit: str | None,
    here: bool,
    fresh: bool,
    json_file: str | None,
    markdown_file: str | None,
    svg_file: str | None,
    save_file: str | None,
) -> None:
    """Try every way to run TARGET that this machine has, verify each, and name the best.

    TARGET is path/to/file.py:function or package.module:function. The function takes no arguments
    and returns (model, args) or (model, args, kwargs). A module class does too, with --input.
    """
    from .report.progress import shown
    from .targets import load_target
    from .tuner import Tuning

    files = {"json": json_file, "markdown": markdown_file, "svg": svg_file}
    _check_files(files | {"save": save_file})
    loaded = load_target(target, inputs, _device(device))
    tuning = Tuning(
        loaded.model,
        loaded.args,
        loaded.kwargs,
        strategies=strategies,
        objective=objective,
        tolerance=tolerance,
        allow=_split(allow),
        budget_s=budget,
        timeout_s=timeout,
        memory_limit=memory_limit,
        isolate=None if not here else False,
        fresh=fresh,
        name=loaded.name,
        repeat=_repeater(
            target,
            {"--input": inputs, "--allow": allow},
            {
                "--device": device,
                "--objective": None if objective == "latency" else objective,
                "--tolerance": tolerance,
                "--timeout": None if timeout == _TIMEOUT_S else f"{timeout:g}s",
                "--memory-limit": memory_limit,
            },
            ["--here"] * here,
        ),
    )
    tuning.report.notes += loaded.notes
    tuned = None
    with shown(True) as listener, contextlib.suppress(KeyboardInterrupt):
        tuned = tuning.run(listener)
    _deliver(tuning.report, files)
    if tuned is None:
        if save_file is not None:
            click.echo("graphwright: interrupted, so that nothing was saved.", err=True)
        raise SystemExit(EXIT_INTERRUPTED)
    if save_file is not None:
        from .artifacts.saving import needs_model, save
        from .report.table import memory

        save(tuned, save_file)
        size = memory(Path(save_file).stat().st_size)
        more = " It is built again from the model: run it with --model." * needs_model(tuned)
        click.echo(f"Saved as {save_file}, {size}.{more}")


@main.command()
@click.argument("artifact", type=click.Path(dir_okay=False))
@click.option("--model", "target", metavar="TARGET", help="The model that was tuned, as for tune.")
@click.option("--trust", is_flag=True, help="Execute code that the file may hold.")
@click.option("--device", help="cpu, cuda or cuda:1, for the model.")
@click.option(
    "--calls", type=click.IntRange(1), default=100, show_default=True, help="To time, of each call."
)
def run(artifact: str, target: str | None, trust: bool, device: str | None, calls: int) -> None:
    """Load ARTIFACT, which `tune --save` wrote, and time its answers to its own sample inputs."""
    from .running import show, tried
    from .targets import load_target

    place, model = None if device is None else _device(device), None
    if target is not None:
        place = place or _device(None)
        model = load_target(target, (), place, inputs_needed=False).model
    show(tried(Path(artifact), model, trust=trust, device=place, calls=calls))


@main.command()
@click.argument("target")
@_INPUTS
@click.option("--device", help="cpu, cuda or cuda:1; by default a GPU if there is one.")
@click.option("--runs", type=click.IntRange(2), default=2, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Save findings here.")
def check(
    target: str, inputs: Sequence[str], device: str | None, runs: int, json_file: str | None
) -> None:
    """Find what keeps TARGET from being captured as a CUDA graph: where, why, and the mend.

    Needs no GPU: a model on the CPU is judged as if it were on one. TARGET is as for tune. Exit
    code 1 where something blocks a capture or breaks it.
    """
    from .checker import Severity
    from .checker import check as checked
    from .checker.rendering import show, to_json
    from .targets import load_target

    _check_files({"json": json_file})
    loaded = load_target(target, inputs, _device(device))
    found = checked(loaded.model, loaded.args, loaded.kwargs, runs=runs)
    show(loaded.name, found)
    if json_file is not None:
        Path(json_file).write_text(to_json(loaded.name, found), encoding="utf-8")
    if any(finding.severity in (Severity.BLOCKS, Severity.BREAKS) for finding in found):
        raise SystemExit(EXIT_FOUND)


@main.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--markdown", is_flag=True, help="Print Markdown in place of a table.")
@click.option("--svg", "svg_file", type=click.Path(dir_okay=False), help="Save a picture as well.")
def report(file: str, markdown: bool, svg_file: str | None) -> None:
    """Print a report that `tune --json FILE` saved."""
    from .errors import TargetError
    from .report import Report
    from .report.markdown import to_markdown

    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"{file} cannot be read: {error}.") from error
    saved = Report.from_json(text)
    _check_files({"svg": svg_file})
    if markdown:
        click.echo(to_markdown(saved), nl=False)
        svg_only = {"svg": svg_file}
        _save(saved, svg_only)
    else:
        _deliver(saved, {"svg": svg_file})


@main.command()
@click.option("--device", help="cpu, cuda or cuda:1; by default a GPU if there is one.")
def strategies(device: str | None) -> None:
    """List the strategies, which of them run here, and what would change that."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from .strategies import COMPILERS, REWRITES, RUNNERS, probe

    place = _device(device)
    console = Console()
    table = Table("strategy", "here", "loads with", "why not, and what would change it")
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    kinds = (("rewrites", REWRITES), ("compilers", COMPILERS), ("runners", RUNNERS))
    waiting = Console(stderr=True)
    with waiting.status("running a tiny model through each") as status:
        for kind, parts in kinds:
            table.add_section()
            table.add_row(kind, style="bold")
            for part in parts:
                status.update(f"trying {part.name}")
                found = probe(part, place)
                told = [found.reason, found.remedy]
                if unsavable := getattr(part, "unsavable", ""):
                    told.append(f"Not to be saved: {unsavable}")
                text = " ".join(f"{t.rstrip('.')}." for t in told if t)
                answer, style = ("yes", None) if found.available else ("no", "dim")
                needs = _needs(part) if kind == "compilers" else ""
                table.add_row(f"  {part.name}", answer, needs, escape(text), style=style)
    console.print(table)
    console.print(f"device: {place}; combine parts as rewrite+compiler+runner.", style="dim")
    console.print(
        "What is saved loads with: nothing, as it was built; trust, as it is code; or the model, "
        "when it is the choice, and is built again.",
        style="dim",
    )


def _needs(compiler: Any) -> str:
    """What `load` needs beside what was saved of a compiler."""
    from .strategies.base import Loader

    if getattr(compiler, "unsavable", None) is not None:
        return "never"
    if isinstance(compiler, Loader):
        return "trust" if compiler.holds_code else "nothing"
    # Caches of compilers are code as well.
    return "model, trust" if hasattr(compiler, "warm") else "model"


def _device(text: str | None) -> Any:
    import torch

    from .errors import TargetError

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise TargetError(
            f"--device {text!r} cannot be used: {first}.", remedy="Write cpu, cuda or cuda:0."
        ) from error
    return device


def _repeater(
    target: str,
    several: dict[str, Sequence[str]],
    single: dict[str, object],
    flags: Sequence[str],
) -> Callable[[str], str]:
    """The command that tries one strategy again, as this run has tried it."""
    given = ["graphwright", "tune", target, *flags]
    for option, values in several.items():
        given += [word for value in values for word in (option, value)]
    for option, value in single.items():
        given += [] if value is None else [option, str(value)]
    return lambda strategy: shlex.join([*given, "--strategies", strategy, "--fresh"])


def _split(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for value in values for part in value.split(",") if part)


def _check_files(files: dict[str, str | None]) -> None:
    """Before minutes of work, not after: can the results be written where they are wanted?"""
    from .errors import TargetError

    for option, name in files.items():
        if name is None:
            continue
        path = Path(name).resolve()
        # What is saved replaces a file as a whole.
        place = path if path.exists() and option != "save" else path.parent
        if not place.exists() or not os.access(place, os.W_OK):
            raise TargetError(
                f"--{option} {name}: {place} does not exist or cannot be written to.",
                remedy="Make the folder first, or choose another.",
            )


def _save(result: Any, files: dict[str, str | None]) -> None:
    from .report.markdown import to_markdown
    from .report.terminal import to_svg

    writers = {"json": lambda r: r.to_json(), "markdown": to_markdown, "svg": to_svg}
    for option, name in files.items():
        if name is not None:
            Path(name).write_text(writers[option](result), encoding="utf-8")


def _deliver(result: Any, files: dict[str, str | None]) -> None:
    from .report.terminal import show

    show(result)
    _save(result, files)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
