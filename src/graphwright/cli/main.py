"""The commands: graphwright tune | accelerate | run | serve | generate | check | profile |
inspect | strategies | report | doctor.

Exit codes: 0 for success; 1 if check has found what blocks or breaks a capture, doctor something
that is there and does not work, or generate other tokens than the model's own; 2, with one
sentence, if the command, the target or the model is wrong, or results cannot be written, or if one
of the targets of `tune --ray` failed; 130 if interrupted, after what was known by then was written
and printed.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from .._version import __version__
from .interrupts import CTRL_C, EXIT_INTERRUPTED
from .output_files import (
    EXIT_BAD_INPUT,
    Unpadded,
    check_files,
    check_plots,
    check_sources,
    deliver,
    is_stdout,
    report_writers,
    save_winner,
    silently,
    write_text,
)

EXIT_FOUND = 1
# About when the command began: its budget is for what it imports, too.
_BEGAN = time.monotonic()
# Options of tune that say where results go, and those that do not matter to one strategy alone.
_FILES = ("json_file", "markdown_file", "svg_file", "html_file", "with_samples", "save_file")
_OF_A_SEARCH = ("strategies", "exclude", "budget", "exhaustive", "profiled", "fresh", "details")
_INPUTS = click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SHAPE:DTYPE",
    help="A random argument, such as 8x128:float32 or 8x128:int64:30522; repeat for each argument.",
)
_DEVICE = click.option(
    "--device", metavar="DEVICE", help="cpu, cuda or cuda:1; by default a GPU if there is one."
)
_ALLOW = click.option(
    "--allow", multiple=True, metavar="NAME", help="A lower precision to try: tf32, bf16, fp16."
)
_HERE = click.option(
    "--here", is_flag=True, help="Try strategies in this process, not in worker processes."
)
_FILE = click.Path(dir_okay=False)
_WITH_SAMPLES = click.option(
    "--with-samples", is_flag=True, help="With --html: have every single timing in the page, too."
)


class _Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        text = str(value)
        number, factor = text, 1.0
        for unit, seconds in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
            if text.endswith(unit):
                number, factor = text.removesuffix(unit), seconds
                break
        try:
            seconds = float(number) * factor
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            self.fail(f"{text!r} is no duration above zero: write 120s or 2m", param, ctx)
        return seconds


class _Command(click.Command):
    """Ends whatever happens: an error in one sentence and with 2, Ctrl-C with 130."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in ("stdout", "stderr"):
            if getattr(sys, stream) is None:  # It was closed before this began.
                setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for good
        # Only now: help needs none of it, and PyTorch takes seconds.
        from .. import _public  # noqa: F401  # all of it, before a Ctrl-C may leave it half-done
        from ..errors import GraphwrightError
        from ..report.terminal import Unheard

        stdout: Any = sys.stdout if sys.stdout.isatty() else Unpadded(sys.stdout)
        stderr: Any = Unheard(sys.stderr)
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                with CTRL_C.in_order():
                    return super().invoke(ctx)
            except GraphwrightError as error:
                click.echo(f"graphwright: {error}", err=True)
                ctx.exit(EXIT_BAD_INPUT)
            except (KeyboardInterrupt, click.Abort):
                CTRL_C.tell()
                ctx.exit(EXIT_INTERRUPTED)


class _Group(click.Group):
    command_class = _Command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="graphwright")
def main() -> None:
    """Make PyTorch models fast on the machine they run on, and prove them still right."""


@main.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@_INPUTS
@_DEVICE
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput", "memory", "cold_start"]),
    default="latency",
    show_default=True,
    help="What to optimize for.",
)
@_ALLOW
@click.option(
    "--strategies", metavar="A,B", help="Try only these, such as torchscript,inductor+graph."
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="NAME",
    help="Leave out every strategy that has these parts, such as inductor:freeze or xla.",
)
@click.option("--tolerance", type=float, help="Relative error to accept, in place of 3 × eager's.")
@click.option(
    "--budget",
    type=_Seconds(),
    help="Aim to take no longer than this: 120s or 2m; by default 50s to 90s on a GPU, 60s to "
    "120s on a CPU.",
)
@click.option(
    "--exhaustive", is_flag=True, help="Also try strategies that cannot win, with no time limit."
)
@click.option(
    "--profile",
    "profiled",
    is_flag=True,
    help="Profile the model first, and say what was predicted beside what was measured.",
)
@click.option(
    "--timeout",
    type=_Seconds(),
    default="10m",
    show_default=True,
    help="Give up on a strategy whose set-up or timing takes longer.",
)
@click.option(
    "--memory-limit",
    metavar="BYTES",
    help="Memory that one strategy may take in addition to the model: 2GiB.",
)
@_HERE
@click.option("--fresh", is_flag=True, help="Tune again, and replace the cached choice.")
@click.option("--details", is_flag=True, help="Print all columns and the reason for each row.")
@click.option(
    "--json", "json_file", type=_FILE, help="Save the report with every time, for `report`."
)
@click.option("--markdown", "markdown_file", type=_FILE, help="Save the report as Markdown.")
@click.option("--svg", "svg_file", type=_FILE, help="Save the report as a picture.")
@click.option(
    "--html", "html_file", type=_FILE, help="Save the report as a page with plots, for a browser."
)
@_WITH_SAMPLES
@click.option(
    "--save",
    "save_file",
    type=_FILE,
    help="Save the winner for `run`, or else the best strategy that can be saved.",
)
@click.option(
    "--ray", "on_ray", is_flag=True, help="Tune each TARGET in a task of Ray, side by side."
)
@click.option(
    "--ray-address",
    metavar="ADDRESS",
    envvar="RAY_ADDRESS",
    help="With --ray: the cluster, HOST:PORT or auto; by default one of its own, here.",
)
@click.option(
    "--accelerator",
    "accelerators",
    multiple=True,
    metavar="KIND",
    help="With --ray: tune on this kind of GPU, named as in Ray: H100; repeat for each kind.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="With --ray: save reports, winners and choices there.",
)
def tune(
    targets: Sequence[str],
    inputs: Sequence[str],
    device: str | None,
    objective: str,
    allow: Sequence[str],
    strategies: str | None,
    exclude: Sequence[str],
    tolerance: float | None,
    budget: float | None,
    exhaustive: bool,
    profiled: bool,
    timeout: float,
    memory_limit: str | None,
    here: bool,
    fresh: bool,
    details: bool,
    json_file: str | None,
    markdown_file: str | None,
    svg_file: str | None,
    html_file: str | None,
    with_samples: bool,
    save_file: str | None,
    on_ray: bool,
    ray_address: str | None,
    accelerators: Sequence[str],
    out: str | None,
) -> None:
    """Benchmark the strategies that usually pay off, verify each, and report the fastest.

    TARGET is path/to/file.py:function or package.module:function. The function takes no arguments
    and returns (model, args) or (model, args, kwargs). A module class also works, with --input.
    Several are tuned with --ray and --out.
    """
    from ..report.progress import progress_shown
    from ..report.terminal import show
    from ..tuning.tuner import Tuning
    from .next_steps import commands, in_python, load_options, repeater, words_of
    from .targets import load_target

    files = {
        "json": json_file,
        "markdown": markdown_file,
        "svg": svg_file,
        "html": html_file,
        "save": save_file,
    }
    if on_ray:
        _tune_on_ray(targets, files, ray_address, accelerators, out, device)
    if len(targets) > 1 or accelerators or out is not None:
        raise click.UsageError("Several TARGETs, --accelerator and --out are for --ray.")
    (target,) = targets
    check_files(files)
    check_plots(html_file)
    loaded = load_target(target, inputs, _device(device))
    check_sources(files, loaded.file)
    options = {
        "strategies": _strategies_in(strategies),
        "exclude": _split(exclude),
        "objective": objective,
        "tolerance": tolerance,
        "allow": _split(allow),
        "budget_s": budget,
        "exhaustive": exhaustive,
        "timeout_s": timeout,
        "memory_limit": memory_limit,
    }
    given = click.get_current_context()
    tuning = Tuning(
        loaded.model,
        loaded.args,
        loaded.kwargs,
        isolate=None if not here else False,
        fresh=fresh,
        name=loaded.name,
        profile=profiled,
        repeat=repeater(target, words_of(given, (*_FILES, *_OF_A_SEARCH))),
        began=_BEGAN,
        **options,
    )
    tuning.report.notes += loaded.notes
    tuned = None
    with (
        progress_shown(True, f"tune {loaded.name}") as listener,
        _warnings_on_stderr(),
        contextlib.suppress(KeyboardInterrupt),
    ):
        tuned = tuning.run(listener)
    result = tuning.report
    writers = report_writers(result, with_samples=with_samples)
    saved = None

    def save(name: str) -> str:
        nonlocal saved
        made, text = save_winner(tuned, name)
        saved = [name, *load_options(made.strategy, target, model=made.needs_model)]
        return text

    if tuned is not None:
        writers["save"] = save

    def print_next() -> None:
        if tuned is not None and not details:
            words = words_of(given, (*_FILES, "fresh"))
            click.echo(in_python(target, loaded, options, why_not=tuning.why_not_cached))
            click.echo(commands(target, words, saved, json_file))

    deliver(files, writers, lambda: show(result, details=details), print_next)
    if tuned is None:
        kept = "" if save_file is None else ": no winner was saved"
        CTRL_C.tell(kept)
        raise SystemExit(EXIT_INTERRUPTED)


def _tune_on_ray(
    targets: Sequence[str],
    files: Mapping[str, str | None],
    address: str | None,
    accelerators: Sequence[str],
    out: str | None,
    device: str | None,
) -> NoReturn:
    if out is None or any(files.values()):
        raise click.UsageError("--ray saves all there is in --out FOLDER, and nothing elsewhere.")
    from .next_steps import words_of
    from .ray_tasks import jobs_of, tune_all

    words = words_of(click.get_current_context(), ("on_ray", "ray_address", "accelerators", "out"))
    jobs = jobs_of(targets, accelerators)
    raise SystemExit(tune_all(jobs, words, Path(out), address, cpu=device == "cpu"))


@main.command()
@click.argument("target")
@click.option(
    "--modules",
    multiple=True,
    metavar="NAME",
    help="Change only these, such as unet or vae.decode; repeat for each.",
)
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput"]),
    default="latency",
    show_default=True,
    help="What to optimize for.",
)
@_ALLOW
@click.option("--strategies", metavar="A,B", help="Try only these, as for tune.")
@click.option("--exclude", multiple=True, metavar="NAME", help="Leave these out, as for tune.")
@click.option("--tolerance", type=float, help="Relative error to accept of each part.")
@click.option("--budget", type=_Seconds(), help="Aim to tune no longer than this; by default 90s.")
@click.option(
    "--no-buckets", is_flag=True, help="Tune for the sizes of the calls, and none between them."
)
@_HERE
@click.option("--fresh", is_flag=True, help="Tune again, and replace what is remembered.")
@click.option("--json", "json_file", type=_FILE, help="Save what became of each part.")
@click.option("--save", "save_file", type=_FILE, help="Save what was found, for gw.load.")
def accelerate(
    target: str,
    modules: Sequence[str],
    objective: str,
    allow: Sequence[str],
    strategies: str | None,
    exclude: Sequence[str],
    tolerance: float | None,
    budget: float | None,
    no_buckets: bool,
    here: bool,
    fresh: bool,
    json_file: str | None,
    save_file: str | None,
) -> None:
    """Tune the modules inside of a program, verify and time the whole, and keep what pays.

    TARGET is path/to/file.py:function or package.module:function. The function takes no arguments
    and returns (program, calls) or (program, calls, run): an object with modules inside or a
    function, a list of sample calls, and what calls it, run(program, call).
    """
    from ..programs.acceleration import accelerate as accelerated
    from ..programs.saved_program import save
    from ..report.progress import SHORT_S, progress_shown
    from .next_steps import program_in_python
    from .targets import load_program

    files = {"json": json_file, "save": save_file}
    check_files(files)
    with progress_shown(None, f"loading {target}", after_s=SHORT_S):
        loaded = load_program(target)
    check_sources(files, loaded.file)
    options: dict[str, Any] = {
        "modules": list(modules) or None,
        "buckets": None if no_buckets else "auto",
        "strategies": _strategies_in(strategies),
        "exclude": _split(exclude),
        "objective": objective,
        "tolerance": tolerance,
        "allow": _split(allow),
        "budget_s": budget,
        "isolate": False if here else None,
    }
    with _warnings_on_stderr():
        found = accelerated(loaded.program, loaded.calls, run=loaded.run, fresh=fresh, **options)
    saved: str | None = None

    def write(name: str) -> str:
        nonlocal saved
        chosen = save(found, name)
        saved = name
        return f"Saved {chosen} as {name}."

    def print_next() -> None:
        if any(part.kept for part in found.parts):
            with_run = loaded.run is not None
            click.echo(program_in_python(target, with_run=with_run, options=options, saved=saved))

    writers = {"json": lambda name: write_text(name, found.to_json()), "save": write}
    deliver(files, writers, lambda: click.echo(found.explain()), print_next)


@main.command()
@click.argument("artifact", type=_FILE)
@click.option(
    "--model",
    "target",
    metavar="TARGET",
    help="The model that was tuned, as for tune; needed where `strategies` says: loads with model.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Execute code that the file holds; needed where `strategies` says: loads with trust.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda or cuda:1; by default where it was saved, or with --model a GPU if there is "
    "one.",
)
@click.option(
    "--calls",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="How many calls to time, of each sample input.",
)
@click.option(
    "--html", "html_file", type=_FILE, help="Save the times as a page with a plot, for a browser."
)
def run(
    artifact: str,
    target: str | None,
    trust: bool,
    device: str | None,
    calls: int,
    html_file: str | None,
) -> None:
    """Load ARTIFACT, which `tune --save` wrote, and time its answers to its own sample inputs."""
    from .next_steps import serving, words_of
    from .run import run_artifact, show, to_page
    from .targets import load_target

    files = {"html": html_file}
    check_files(files)
    check_sources(files, Path(artifact))
    check_plots(html_file)
    place, model = None if device is None else _device(device), None
    if target is not None:
        place = place or _device(None)
        model = load_target(target, (), place, inputs_needed=False).model
    trial = run_artifact(Path(artifact), model, trust=trust, device=place, calls=calls)
    writers = {"html": lambda name: write_text(name, to_page(trial))}
    words = words_of(click.get_current_context(), ("calls", "html_file"))
    deliver(files, writers, lambda: show(trial), lambda: click.echo(serving([artifact, *words])))


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="[NAME=]TARGET|FILE.gw...")
@_INPUTS
@_DEVICE
@click.option(
    "--model",
    "target",
    metavar="TARGET",
    help="The model of a FILE.gw, as for run; with one FILE alone.",
)
@click.option("--trust", is_flag=True, help="Execute code that the files hold, as for run.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option("--no-http", is_flag=True, help="Do not listen for HTTP.")
@click.option("--no-grpc", is_flag=True, help="Do not listen for gRPC.")
@click.option(
    "--max-queue",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="How many requests may wait for each model; more are refused.",
)
@click.option(
    "--timeout", type=_Seconds(), help="Drop a request that is older and has no deadline: 500ms."
)
@click.option(
    "--drain",
    type=_Seconds(),
    default="30s",
    show_default=True,
    help="How long to go on answering after SIGTERM.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    help="Ask clients for the token in this file: Authorization: Bearer TOKEN.",
)
@click.option(
    "--tls",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False),
    metavar="CERTIFICATE KEY",
    help="PEM files of the certificate chain and its key.",
)
def serve(
    models: Sequence[str],
    inputs: Sequence[str],
    device: str | None,
    target: str | None,
    trust: bool,
    host: str,
    http_port: int,
    grpc_port: int,
    no_http: bool,
    no_grpc: bool,
    max_queue: int,
    timeout: float | None,
    drain: float,
    token_file: str | None,
    tls: tuple[str, str] | None,
) -> None:
    """Serve models by the Open Inference Protocol (KServe, Triton), over HTTP and gRPC.

    A TARGET is as for tune, or a function that returns a graphwright.ModelConfig; a FILE.gw is what
    `tune --save` wrote. A model is called as its function or file, unless NAME= says otherwise.
    Requests for a model are joined into batches. SIGTERM and Ctrl-C end the server once it has
    answered what was asked, a second Ctrl-C at once.
    """
    from ..serving.launch import check_installed
    from ..serving.options import options_of
    from .serve import run_server, sources_of

    check_installed()
    place = None if device is None else _device(device)
    sources = sources_of(models, inputs, place, target, trust=trust)
    token = None if token_file is None else Path(token_file).read_text(encoding="utf-8").strip()
    options = options_of(
        {
            "host": host,
            "http_port": None if no_http else http_port,
            "grpc_port": None if no_grpc else grpc_port,
            "max_queue": max_queue,
            "timeout_s": timeout,
            "drain_s": drain,
            "token": token,
            "tls": tls or None,
        }
    )
    run_server(sources, options)


@main.command()
@click.argument("target")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="What to go on from; repeat for a batch. TARGET must return (model, tokenizer).",
)
@click.option(
    "--ids",
    multiple=True,
    metavar="5,17,3",
    help="A prompt as tokens, for a model without a tokenizer; repeat for a batch.",
)
@_DEVICE
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="The most tokens to make for each prompt.",
)
@click.option("--sample", is_flag=True, help="Draw tokens, in place of taking the likeliest.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, min_open=True),
    help="With --sample: below 1 likely tokens become likelier.",
)
@click.option("--top-k", type=click.IntRange(1), help="With --sample: draw from so many tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --sample: draw from the likeliest tokens that together have this probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="What random numbers begin with.",
)
@click.option("--eager", is_flag=True, help="Let the model's own generate() make the tokens.")
@click.option(
    "--compare", is_flag=True, help="Time the model's own generate() too, and compare the tokens."
)
@click.option(
    "--tune", "tuned", is_flag=True, help="Try other ways to run a step, and take the best."
)
@click.option("--json", "json_file", type=_FILE, help="Save the figures and the tokens.")
def generate(
    target: str,
    prompts: Sequence[str],
    ids: Sequence[str],
    device: str | None,
    max_new_tokens: int,
    sample: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    eager: bool,
    compare: bool,
    tuned: bool,
    json_file: str | None,
) -> None:
    """Generate tokens from TARGET by CUDA graphs, print them as they come, and say how fast.

    TARGET is path/to/file.py:function or package.module:function. The function takes no arguments
    and returns a model of transformers, alone or with its tokenizer: (model, tokenizer). What it
    returns for tune, (model, args) or (model, args, kwargs), works too: the inputs are the prompt.

    A first run captures the graphs, and the second is shown and timed. Exit code 1 where --compare
    finds other tokens than the model's own; drawn tokens may differ.
    """
    from ..report.progress import SHORT_S, progress_shown
    from .generate import EAGER, GRAPHS, Prompted, same, show, to_json
    from .targets import load_generative

    files = {"json": json_file}
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    for refused, why in (
        (drawn and not sample, "--temperature, --top-k and --top-p are for --sample."),
        (eager and tuned, "--tune tries ways to run the graphs' steps: drop --eager."),
        (eager and compare, "--compare runs the model's own generate() anyway: drop --eager."),
        (prompts and ids, "Give --prompt or --ids, and not both."),
    ):
        if refused:
            raise click.UsageError(why)
    tokens = [_tokens(text) for text in ids]
    check_files(files)
    with progress_shown(None, f"loading {target}", after_s=SHORT_S):
        loaded = load_generative(target, _device(device))
    check_sources(files, loaded.file)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
    options |= drawn
    prompted = Prompted(loaded, prompts, tokens, options, seed)
    shown = not is_stdout(json_file)
    tried = prompted.tune() if tuned else None
    made = [prompted.run(EAGER if eager else GRAPHS, shown=shown)]
    if compare:
        made.append(prompted.run(EAGER, shown=False))
    writers = {"json": lambda name: write_text(name, to_json(loaded.name, made, tried))}
    deliver(files, writers, lambda: show(made, tried))
    if not sample and not same(made):
        raise SystemExit(EXIT_FOUND)


@main.command()
@click.argument("target")
@_INPUTS
@_DEVICE
@click.option(
    "--runs",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    help="How many calls to observe: what differs between them cannot be captured.",
)
@click.option("--json", "json_file", type=_FILE, help="Save the findings.")
@click.option("--html", "html_file", type=_FILE, help="Save them as a page, for a browser.")
def check(
    target: str,
    inputs: Sequence[str],
    device: str | None,
    runs: int,
    json_file: str | None,
    html_file: str | None,
) -> None:
    """Find what keeps TARGET from being captured as a CUDA graph: file, line and suggested fix.

    Needs no GPU: a model on the CPU is judged as if it were on one. TARGET is as for tune. Exit
    code 1 where something blocks a capture or breaks it.
    """
    from ..checker.checker import check as checked
    from ..checker.finding import Severity
    from ..checker.page import to_page
    from ..checker.rendering import show, to_json
    from .targets import load_target

    files = {"json": json_file, "html": html_file}
    check_files(files)
    loaded = load_target(target, inputs, _device(device))
    check_sources(files, loaded.file)
    found = checked(loaded.model, loaded.args, loaded.kwargs, runs=runs)
    writers = {
        "json": lambda name: write_text(name, to_json(loaded.name, found)),
        "html": lambda name: write_text(name, to_page(loaded.name, found)),
    }
    deliver(files, writers, lambda: show(loaded.name, found))
    if any(finding.severity in (Severity.BLOCKS, Severity.BREAKS) for finding in found):
        raise SystemExit(EXIT_FOUND)


@main.command()
@click.argument("target")
@_INPUTS
@_DEVICE
@click.option("--timed", is_flag=True, help="Replay it once and say when each node ran.")
@click.option("--json", "json_file", type=_FILE, help="Save the nodes.")
@click.option("--dot", "dot_file", type=_FILE, help="Save the graph in graphviz' language.")
@click.option("--svg", "svg_file", type=_FILE, help="Save it as a picture; needs graphviz.")
def inspect(
    target: str,
    inputs: Sequence[str],
    device: str | None,
    timed: bool,
    json_file: str | None,
    dot_file: str | None,
    svg_file: str | None,
) -> None:
    """Capture TARGET as a graph, and list its nodes: kernels, copies, their edges and origins.

    TARGET is as for tune. On the CPU the nodes are operations.
    """
    from ..graphs.captured_call import CapturedCall
    from .targets import load_target

    files = {"json": json_file, "dot": dot_file, "svg": svg_file}
    check_files(files)
    loaded = load_target(target, inputs, _device(device))
    check_sources(files, loaded.file)
    graph = CapturedCall(loaded.model, loaded.args, loaded.kwargs, breaks="auto")
    with graph:
        graph.warm()
        graph.record()
        nodes = graph.nodes(timed=timed)
    writers = {
        "json": lambda name: write_text(name, nodes.to_json()),
        "dot": lambda name: write_text(name, nodes.to_dot()),
        "svg": lambda name: write_text(name, nodes.to_svg()),
    }
    deliver(files, writers, lambda: click.echo(str(nodes)))


@main.command()
@click.argument("target")
@_INPUTS
@_DEVICE
@click.option("--training", is_flag=True, help="Profile a forward and a backward pass.")
@click.option("--json", "json_file", type=_FILE, help="Save all figures.")
@click.option(
    "--html", "html_file", type=_FILE, help="Save the profile as a page with plots, for a browser."
)
@click.option("--trace", "trace_file", type=_FILE, help="Save a trace for ui.perfetto.dev.")
@click.option("--roofline", "roofline_file", type=_FILE, help="Save a roofline plot as SVG.")
@click.option("--timeline", "timeline_file", type=_FILE, help="Save a timeline as SVG.")
def profile(
    target: str,
    inputs: Sequence[str],
    device: str | None,
    training: bool,
    json_file: str | None,
    html_file: str | None,
    trace_file: str | None,
    roofline_file: str | None,
    timeline_file: str | None,
) -> None:
    """Find what bounds TARGET, and the most that each remedy can give, before any tuning.

    TARGET is as for tune. Nothing is captured or compiled.
    """
    from ..profiler.profiler import profile as profiled
    from .targets import load_target

    files = {
        "json": json_file,
        "html": html_file,
        "trace": trace_file,
        "roofline": roofline_file,
        "timeline": timeline_file,
    }
    check_files(files)
    check_plots(html_file, roofline_file, timeline_file)
    loaded = load_target(target, inputs, _device(device))
    check_sources(files, loaded.file)
    if training and hasattr(loaded.model, "train"):
        loaded.model.train()
    found = profiled(loaded.model, loaded.args, loaded.kwargs, training=training)
    writers = {
        "json": lambda name: write_text(name, found.to_json()),
        "html": lambda name: write_text(name, found.to_html()),
        "trace": silently(found.save_trace),
        "roofline": silently(found.save_roofline),
        "timeline": silently(found.save_timeline),
    }
    deliver(files, writers, lambda: click.echo(str(found)))


@main.command()
@click.argument("file", type=_FILE)
@click.option("--details", is_flag=True, help="Print all columns and the reason for each row.")
@click.option("--markdown", is_flag=True, help="Print Markdown in place of a table.")
@click.option("--svg", "svg_file", type=_FILE, help="Save a picture as well.")
@click.option("--html", "html_file", type=_FILE, help="Save a page with plots, for a browser.")
@_WITH_SAMPLES
def report(
    file: str,
    details: bool,
    markdown: bool,
    svg_file: str | None,
    html_file: str | None,
    with_samples: bool,
) -> None:
    """Print a report that `tune --json FILE` saved, or make a page of it.

    With --html, FILE may also be a result of scripts/bench that holds models with times.
    """
    from ..errors import GraphwrightError, TargetError
    from ..report.benchmark_page import benchmark_to_page, is_benchmark
    from ..report.markdown import to_markdown
    from ..report.report import Report
    from ..report.terminal import show

    files = {"svg": svg_file, "html": html_file}
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"{file} cannot be read: {error}.") from error
    try:
        if is_benchmark(text):
            if html_file is None or svg_file is not None or markdown:
                raise GraphwrightError(
                    "it is the result of a benchmark, which is shown as a page.",
                    remedy="Give --html PAGE, and no other form.",
                )
            check_files(files)
            check_sources(files, Path(file))
            check_plots(html_file)
            made = benchmark_to_page(text, with_samples=with_samples)
            page_writer = {"html": lambda name: write_text(name, made)}
            deliver({"html": html_file}, page_writer, lambda: None)
            return
        saved = Report.from_json(text)
    except GraphwrightError as error:
        raise TargetError(
            f"{file} cannot be shown: {error.what}",
            remedy=error.remedy or "Reports are written by `graphwright tune --json FILE`.",
        ) from error
    check_files(files)
    check_sources(files, Path(file))
    check_plots(html_file)
    deliver(
        files,
        report_writers(saved, with_samples=with_samples),
        (lambda: click.echo(to_markdown(saved), nl=False))
        if markdown
        else lambda: show(saved, details=details),
    )


@main.command()
@_DEVICE
def strategies(device: str | None) -> None:
    """List the strategies, which of them run here, and what would change that."""
    from torch import nn

    from ..report.progress import SHORT_S, progress_shown
    from ..report.terminal import printing, show_strategies
    from ..strategies.base import Candidate, probe
    from ..strategies.registry import (
        COMPILERS,
        LOSSY,
        REWRITES,
        RUNNERS,
        default_candidates,
        savable_form,
    )
    from .next_steps import needs

    place = _device(device)
    # Convolutions are what rewrites look for.
    tried, allowed = (
        {
            part
            for candidate in default_candidates(nn.Conv2d(1, 1, 1), place, allow)
            for part in (candidate.rewrite, candidate.compiler, candidate.runner)
        }
        for allow in ((), LOSSY)
    )
    listed: dict[str, list[tuple[tuple[str, str, str, str], str]]] = {}
    kinds: dict[str, Sequence[Any]] = {
        "rewrites": REWRITES,
        "compilers": COMPILERS,
        "runners": RUNNERS,
    }
    with progress_shown(None, "running a tiny model through each", after_s=SHORT_S) as progress:
        for kind, parts in kinds.items():
            listed[kind] = []
            for part in parts:
                progress.doing(part.name)
                found = probe(part, place)
                remarks = [found.reason, found.remedy]
                if unsavable := getattr(part, "unsavable", ""):
                    remarks.append(f"Not to be saved: {unsavable}")
                    if form := savable_form(Candidate(part)):
                        remarks.append(f"{form.name} is saved in its place where it is as fast")
                only = "" if part in tried else "allowed" if part in allowed else "named"
                loads_with = needs(part) if kind == "compilers" else ""
                cells = (part.name, "yes" if found.available else "no", loads_with, only)
                listed[kind].append((cells, " ".join(f"{t.rstrip('.')}." for t in remarks if t)))
    closing = (
        f"device: {place}; combine parts as rewrite+compiler+runner.",
        "loads with, once it is saved: nothing, as it was built; trust, as it is code; or the "
        "model, when it is the choice, and is built again.",
        "only if: not tried by default, but allowed with --allow NAME, or named with --strategies "
        "NAME.",
    )
    with printing():
        show_strategies(listed, closing)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
@click.option(
    "--build", is_flag=True, help="Build first what is built once for a machine: the checks in C++."
)
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, build: bool) -> None:
    """Say what this machine has, what is missing for what, and how to get it.

    Ends with 1 if something is there and does not work.
    """
    import json

    from ..report.terminal import printing
    from .doctor import State, examined, show, title

    items = examined(build=build)
    with printing():
        if as_json:
            found = {"title": title(), "items": [item.to_dict() for item in items]}
            click.echo(json.dumps(found, indent=2))
        else:
            show(items)
    if any(item.state is State.BROKEN for item in items):
        ctx.exit(EXIT_FOUND)


def _device(text: str | None) -> Any:
    import torch

    from ..calls.options import devices
    from ..errors import TargetError

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise TargetError(
            f"--device {text!r} cannot be used: {first}.", remedy=f"Write {devices()}."
        ) from error
    return device


def _tokens(text: str) -> list[int]:
    """The tokens of --ids."""
    try:
        tokens = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        tokens = []
    if not tokens or min(tokens) < 0:
        raise click.BadParameter(f"{text!r} is no list of tokens", param_hint="--ids")
    return tokens


def _strategies_in(text: str | None) -> list[str] | None:
    """The names given by --strategies; None without it."""
    if text is None:
        return None
    if not (names := _split([text])):
        raise click.BadParameter(
            "it is empty; `graphwright strategies` lists what there is", param_hint="--strategies"
        )
    return [*names]


def _split(values: Sequence[str]) -> tuple[str, ...]:
    parts = (part.strip() for value in values for part in value.split(","))
    return tuple(filter(None, parts))


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Warnings of graphwright's name its caller's line, which is click's here: say them plainly."""
    usual = warnings.showwarning

    def tell(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename != click.core.__file__:
            usual(message, category, filename, lineno, file, line)
            return
        remedy = ""
        if "cannot be cached" in str(message):
            remedy = "\nSet GRAPHWRIGHT_CACHE_DIR to a folder that can be written to."
        click.echo(f"graphwright: {message}.{remedy}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = tell
        yield
