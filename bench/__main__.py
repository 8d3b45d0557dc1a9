"""Run the benchmarks, or make the pages of docs/results/ from their results.

scripts/bench tune [--out DIR] [CASE ...]             tune each model beside PyTorch's own ways
scripts/bench capture [--out DIR] [--only MODEL ...]  capture each model in a process of its own
scripts/bench buckets [--out DIR]                     a model over batch × length, by buckets
scripts/bench architectures [--out DIR]               which architectures take buckets, on the CPU
scripts/bench check [--out DIR]                       which models can be captured
scripts/bench engines [--out DIR] [--only MODEL ...]  other engines beside eager
scripts/bench answers [--out DIR] [--only MODEL ...]  first answers of new processes
scripts/bench fusion [--out DIR] [--only MODEL ...]   fuse() beside TorchScript and Inductor
scripts/bench operators [--out DIR]                   our operators: bandwidth, and beside Inductor
scripts/bench training [--out DIR] [--only MODEL ...] training steps beside PyTorch's own ways
scripts/bench composition [--out DIR]                 graph(fuse(m)) beside tune's fused+graph
scripts/bench refused [--out DIR] [--quick]           calls that graph() refuses, beside eager
scripts/bench objects [--out DIR] [--quick]           calls with caches and objects, beside eager
scripts/bench generate [--out DIR] [--quick] [--only M ...]  tokens, beside transformers' own ways
scripts/bench unseen [--out DIR] [--only LIBRARY ...] fused+graph on models chosen by a seed
scripts/bench calls [SRC] [--strategies NAME ...]     what a call costs beside what answers it
scripts/bench first-run [--only MODEL ...] [--limits] the first tune on a machine, and the second
scripts/bench first-run --masks                       text encoders under three masks
scripts/bench busy [--runs N] [--out DIR]             tune() beside a load: is what it says right?
scripts/bench host-arguments [--rounds N] [--quick]   a UNet's time steps on the host, on the GPU
scripts/bench feeding [--out DIR] [--quick]           prefetch() beside PyTorch's own ways to copy
scripts/bench streams [--out DIR] [--quick]           graphs on several streams beside one
scripts/bench profile [--out DIR] [--seconds S]       what profile() predicts, and what is gained
scripts/bench search [--large] [--seconds S]          default searches beside exhaustive ones
scripts/bench regional [--only MODEL ...] [--out DIR] Inductor by regions beside the whole
scripts/bench programs [--out DIR]                    programs accelerated in place, end to end
scripts/bench pipelines [--only NAME ...] [--out DIR] pipelines in place beside torch.compile
scripts/bench serving [--out DIR] [--only SERVER ...] MiniLM behind servers, under load
scripts/bench soak [--out DIR] [--seconds S]          a server under a long mixed load
scripts/bench replicas [--replicas N ...] [--out DIR] requests/s by replicas on Ray Serve
scripts/bench compare A.json B.json                   two results of tune, capture or training
scripts/bench tables                                  bench/results/*.json -> docs/results/
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .common.processes import figures_of, run_all
from .common.record import RESULTS, SCHEMA, commit, write

# Seconds after which a model of the capture benchmark is given up.
CAPTURE_LIMIT_S = 150
# The same for a model of the tune benchmark.
TUNE_LIMIT_S = 120
# The same for a model of the training benchmark, and for the memory of one way of it.
TRAINING_LIMIT_S, MEMORY_LIMIT_S = 150, 90
# Processes that measure memory at once: they do not time anything.
MEMORY_AT_ONCE = 12


def tune(
    models: list[str],
    out: Path,
    options: list[str],
    left_out: list[str],
    *,
    quick: bool,
) -> int:
    """bench/tune/run.py on each model, the file written after each; the number that failed.

    Models that the file has already, of the same commit, options and machine, are kept.
    """
    from .cases import MODELS
    from .tune.table import CHOSEN, latency, line, targets, to_text

    names = models or list(MODELS)
    without = [word for way in left_out for word in ("--leave-out", way)]
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": 2,
        "benchmark": "tune",
        "commit": commit(),
        "quick": quick,
        "options": options,
        "environment": {},
        "models": {},
    }
    where = out / "tune.json"
    if where.exists():
        earlier = json.loads(where.read_text(encoding="utf-8"))
        if all(earlier.get(key) == result[key] for key in ("commit", "quick", "options")):
            result["models"] = earlier["models"]
            result["environment"] = earlier["environment"]
    for name in names:
        words = ["--quick"] * quick + [*without, *options]
        found = figures_of("bench.tune.run", name, words, TUNE_LIMIT_S)
        result["environment"] = result["environment"] or found.get("environment", {})
        model = found.get("figures", {})
        if "failed" in found:
            model["failed"] = found["failed"]
        result["models"][name] = model
        result["targets"] = targets(result)
        write(where, result)
        print(line(name, model), flush=True)
    print(f"\n{to_text(result)}\nwrote {where}")
    return sum(latency(model, CHOSEN) is None for model in result["models"].values())


def capture(models: list[str], out: Path, options: list[str], *, quick: bool) -> int:
    """bench/capture/run.py on each model and on the batch sizes; the number that failed."""
    from .capture.batches import BATCHED
    from .capture.run import BATCHES
    from .capture.table import targets, to_text
    from .cases import MODELS

    names = models or list(MODELS)
    found = {name: _captured(name, options) for name in names}
    batches = _process(BATCHES, options) if BATCHED in names else None
    every = [*found.values(), *([batches] if batches else [])]
    if batches is not None:
        batches = batches.get("figures", {"model": BATCHED, **batches})
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "capture",
        "commit": commit(),
        "quick": quick,
        "environment": next((one["environment"] for one in every if "environment" in one), {}),
        "models": {name: one.get("figures", one) for name, one in found.items()},
        "batches": batches,
    }
    result["targets"] = targets(result)
    where = out / "capture.json"
    write(where, result)
    print(f"{to_text(result)}\nwrote {where}")
    return sum("failed" in one for one in every)


def architectures(out: Path) -> int:
    """Every architecture; the number that were accepted and are wrong."""
    from .architectures.run import failures, measure
    from .architectures.table import counts

    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "architectures",
        "commit": commit(),
        **measure(),
    }
    where = out / "architectures.json"
    write(where, result)
    wrong = list(failures(result))
    print("\n".join([*wrong, *counts(result), f"wrote {where}"]))
    return len(wrong)


def check(out: Path) -> int:
    """check() on every model; the number that could not be run."""
    from .check.run import counts, measure

    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "check",
        "commit": commit(),
        **measure(),
    }
    where = out / "check.json"
    write(where, result)
    print("\n".join([*counts(result), f"wrote {where}"]))
    return sum("failed" in row for row in result["rows"])


def breaks(out: Path, *, quick: bool) -> int:
    """graph() on calls with breaks; the number of targets that are missed."""
    from .breaks.run import measure, targets

    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "breaks",
        "commit": commit(),
        "quick": quick,
        **measure(quick=quick),
    }
    result["targets"] = targets(result)
    where = out / "breaks.json"
    write(where, result)
    missed = [target["target"] for target in result["targets"] if not target["met"]]
    print("\n".join([*(f"missed: {each}" for each in missed), f"wrote {where}"]))
    return len(missed)


def training(
    models: list[str], out: Path, *, quick: bool, compile_too: bool, memory_too: bool
) -> int:
    """bench/training/run.py on each model, the file written after each; the number that failed.

    The times come first, model by model; then the memory of every way, several at once. Models
    that the file has already, of the same commit, are kept.
    """
    from .training.cases import MODELS
    from .training.table import line, summary, targets, to_text
    from .training.ways import COMPILED

    words = ["--quick"] * quick
    without = () if compile_too else COMPILED
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "training",
        "commit": commit(),
        "quick": quick,
        "environment": {},
        "models": {},
    }
    where = out / "training.json"
    names = models or list(MODELS)
    if where.exists():
        earlier = json.loads(where.read_text(encoding="utf-8"))
        if all(earlier.get(key) == result[key] for key in ("commit", "quick")):
            result["models"] = earlier["models"]
            result["environment"] = earlier["environment"]
    for name in names:
        found = _trained(name, words, without)
        result["environment"] = result["environment"] or found.get("environment", {})
        model = found.get("figures", {})
        if "failed" in found:
            model["failed"] = found["failed"]
        result["models"][name] = model | summary(model)
        result["targets"] = targets(result)
        write(where, result)
        print(line(name, model), flush=True)
    if memory_too and "gpu" in result["environment"]:
        measured = {name: result["models"][name] for name in names}
        for name, way, row in _memories(measured, words):
            result["models"][name].setdefault("memory", {})[way] = row
            result["targets"] = targets(result)
            write(where, result)
    print(f"\n{to_text(result)}\nwrote {where}")
    return sum("failed" in model for model in result["models"].values())


def _trained(name: str, words: list[str], without: Sequence[str]) -> dict[str, Any]:
    """The figures of one model; a way that takes the process with it is a failed row of them."""
    from .training.ways import WAYS

    options = [*words, *(word for way in without for word in ("--leave-out", way))]
    found = figures_of("bench.training.run", name, options, TRAINING_LIMIT_S)
    failure = found.get("failed", "")
    fatal = [way for way in WAYS if failure.endswith(f", at {way}")]
    if not fatal:
        return found
    again = figures_of(
        "bench.training.run", name, [*options, "--leave-out", fatal[0]], TRAINING_LIMIT_S
    )
    if fatal[0] in again.get("figures", {}).get("ways", {}):
        again["figures"]["ways"][fatal[0]] = {"status": "failed", "reason": failure}
    return again


def _memories(
    models: dict[str, Any], words: list[str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The memory of every way that worked, with the model and the way, in the order of ending."""
    pairs = [
        (name, way)
        for name, model in models.items()
        for way, row in model.get("ways", {}).items()
        if row["status"] in ("ok", "wrong")  # Memory is taken whatever the numbers are.
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(pairs))]
        commands = [
            ["bench.training.run", name, str(file), "--memory", way, *words]
            for (name, way), file in zip(pairs, files, strict=True)
        ]
        for number, failure in run_all(commands, at_once=MEMORY_AT_ONCE, limit_s=MEMORY_LIMIT_S):
            row = {"status": "failed", "reason": failure}
            if failure is None:
                row = json.loads(files[number].read_text(encoding="utf-8"))["figures"]
            yield *pairs[number], row


def _captured(name: str, options: list[str]) -> dict[str, Any]:
    """The figures of one model: without its peers where these take the process with them."""
    import torch

    from .capture.run import PEERS

    found = _process(name, options)
    if "failed" not in found or "--no-peers" in options or not torch.cuda.is_available():
        return found
    again = _process(name, [*options, "--no-peers"])
    for way in PEERS if "figures" in again else ():
        reason = f"one of the peers ended the process: {found['failed']}"
        again["figures"]["ways"][way] |= {"status": "failed", "reason": reason}
    return again


def _process(what: str, options: list[str]) -> dict[str, Any]:
    """What bench/capture/run.py found in a process of its own, or why it "failed"."""
    print(f"== {' '.join([what, *options])}", flush=True)
    return figures_of("bench.capture.run", what, options, CAPTURE_LIMIT_S)


def tables() -> None:
    """docs/results/ from every result in bench/results/."""
    from .pages import write_pages

    write_pages()


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Before minutes of work, not after: are all names known, and tune()'s options?"""
    from .cases import MODELS
    from .tune.run import tune_options
    from .tune.table import PEERS

    for names, known in ((given.cases, MODELS), (given.leave_out, PEERS)):
        for name in names:
            if name not in known:
                parser.error(f"{name} is none of {', '.join(known)}")
    tune_options(given.options.split())


def _check_models(parser: argparse.ArgumentParser, names: list[str]) -> None:
    """Are all names those of models that the training benchmark knows?"""
    from .training.cases import MODELS

    for name in names:
        if name not in MODELS:
            parser.error(f"{name} is none of {', '.join(MODELS)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], prog="scripts/bench"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tuning = commands.add_parser("tune", help="tune each model in a process of its own")
    tuning.add_argument("cases", nargs="*", metavar="CASE")
    tuning.add_argument("--out", type=Path, default=RESULTS)
    tuning.add_argument("--quick", action="store_true", help="try the script: no result")
    tuning.add_argument(
        "--leave-out", action="append", default=[], metavar="WAY", help="a peer to leave out"
    )
    tuning.add_argument("--options", default="", help="options of graphwright tune, in one text")
    capturing = commands.add_parser("capture", help="capture each model in a process of its own")
    capturing.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    capturing.add_argument("--out", type=Path, default=RESULTS)
    capturing.add_argument("--no-peers", action="store_true", help="leave PyTorch's own ways out")
    capturing.add_argument("--quick", action="store_true", help="try the script: no result")
    bucketing = commands.add_parser("buckets", help="a model over batch × length, by buckets")
    bucketing.add_argument("--out", type=Path, default=RESULTS)
    bucketing.add_argument("--quick", action="store_true", help="try the script: no result")
    taking = commands.add_parser("architectures", help="which architectures take buckets")
    taking.add_argument("--out", type=Path, default=RESULTS)
    checking = commands.add_parser("check", help="which models can be captured, and whether so")
    checking.add_argument("--out", type=Path, default=RESULTS)
    operating = commands.add_parser("operators", help="our operators beside a copy and Inductor")
    operating.add_argument("--out", type=Path, default=RESULTS)
    operating.add_argument("--quick", action="store_true", help="try the script: no result")
    composed = commands.add_parser("composition", help="graph(fuse(m)) beside tune's fused+graph")
    composed.add_argument("--out", type=Path, default=RESULTS)
    refused = commands.add_parser("refused", help="calls that graph() refuses, beside eager")
    refused.add_argument("--changing", action="store_true", help="calls that find another state")
    refused.add_argument("--out", type=Path, default=RESULTS)
    refused.add_argument("--quick", action="store_true", help="try the script: no result")
    generate = commands.add_parser("generate", help="tokens, beside transformers' own ways")
    generate.add_argument("--out", type=Path, default=RESULTS)
    generate.add_argument("--quick", action="store_true", help="tiny models")
    generate.add_argument("--only", nargs="+", default=(), help="models, by name")
    objects = commands.add_parser("objects", help="calls with caches and objects, beside eager")
    objects.add_argument("--out", type=Path, default=RESULTS)
    objects.add_argument("--quick", action="store_true", help="few models")
    unseen = commands.add_parser("unseen", help="fused+graph on models chosen by a seed")
    unseen.add_argument("--only", nargs="+", default=[], metavar="LIBRARY")
    unseen.add_argument("--out", type=Path, default=RESULTS)
    unseen.add_argument("--share", type=float, default=1.0, help="of the models: to try the script")
    unseen.add_argument("--plain", action="store_true", help="do not time passes")
    calling = commands.add_parser("calls", help="what a call costs beside what answers it")
    calling.add_argument("src", type=Path, nargs="?", help="the src folder of another checkout")
    calling.add_argument("--rounds", type=int, default=10)
    calling.add_argument(
        "--limit-s", type=float, default=float("inf"), help="begin no round after so long"
    )
    calling.add_argument("--strategies", nargs="+", default=[], metavar="NAME")
    calling.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    calling.add_argument("--out", type=Path, default=RESULTS)
    first = commands.add_parser("first-run", help="the first tune on a machine, and the second")
    first.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    first.add_argument("--limits", action="store_true", help="and one without a limit in time")
    first.add_argument("--masks", action="store_true", help="text encoders under three masks alone")
    first.add_argument("--out", type=Path, default=RESULTS)
    others = commands.add_parser("engines", help="other engines beside eager")
    others.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    others.add_argument("--out", type=Path, default=RESULTS)
    others.add_argument("--quick", action="store_true", help="try the script: no result")
    answering = commands.add_parser("answers", help="first answers of what is saved")
    answering.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    answering.add_argument("--out", type=Path, default=RESULTS)
    answering.add_argument("--quick", action="store_true", help="try the script: no result")
    fusing = commands.add_parser("fusion", help="fuse() beside TorchScript and Inductor")
    fusing.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    fusing.add_argument("--out", type=Path, default=RESULTS)
    fusing.add_argument("--quick", action="store_true", help="try the script: no result")
    breaking = commands.add_parser("breaks", help="calls that a plain capture does not take")
    breaking.add_argument("--out", type=Path, default=RESULTS)
    breaking.add_argument("--quick", action="store_true", help="try the script: no result")
    training_ = commands.add_parser("training", help="training steps of each model")
    training_.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    training_.add_argument("--out", type=Path, default=RESULTS)
    training_.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    training_.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    training_.add_argument("--quick", action="store_true", help="tiny sizes: no result")
    busy = commands.add_parser("busy", help="tune() beside a load: is what it says right?")
    busy.add_argument("--runs", type=int, default=10, help="runs beside the load")
    busy.add_argument("--processes", type=int, default=2, help="busy processes beside them")
    busy.add_argument("--out", type=Path, default=RESULTS)
    profiling = commands.add_parser(
        "profile", help="what profile() predicts beside what is measured"
    )
    profiling.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    profiling.add_argument("--out", type=Path, default=RESULTS)
    profiling.add_argument("--seconds", type=float, default=540.0, help="begin no model later")
    profiling.add_argument("--quick", action="store_true", help="try the script: tiny models")
    feeding = commands.add_parser("feeding", help="prefetch() beside PyTorch's own ways to copy")
    feeding.add_argument("--out", type=Path, default=RESULTS)
    feeding.add_argument("--quick", action="store_true", help="try the script: no result")
    on_host = commands.add_parser("host-arguments", help="a UNet's time steps on host and GPU")
    on_host.add_argument("--out", type=Path, default=RESULTS)
    on_host.add_argument("--rounds", type=int, default=20, help="samples of each way")
    on_host.add_argument("--quick", action="store_true", help="try the script: no result")
    streams = commands.add_parser("streams", help="graphs on several streams beside one")
    streams.add_argument("--out", type=Path, default=RESULTS)
    streams.add_argument("--quick", action="store_true", help="try the script: no result")
    programs = commands.add_parser("programs", help="programs accelerated in place, end to end")
    programs.add_argument("--out", type=Path, default=RESULTS)
    pipelines = commands.add_parser("pipelines", help="pipelines in place beside torch.compile")
    pipelines.add_argument("--only", nargs="+", default=[], metavar="NAME", help="a part of names")
    pipelines.add_argument("--out", type=Path, default=RESULTS)
    regional = commands.add_parser("regional", help="Inductor by regions beside the whole")
    regional.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    regional.add_argument(
        "--seconds", type=float, default=3600.0, help="begin no model after so long"
    )
    regional.add_argument("--out", type=Path, default=RESULTS)
    searching = commands.add_parser("search", help="default searches beside exhaustive ones")
    searching.add_argument("--out", type=Path, default=RESULTS)
    searching.add_argument("--only", nargs="+", default=[], metavar="MODEL or LIBRARY")
    searching.add_argument(
        "--again", nargs="+", default=[], metavar="MODEL", help="measure what the file has anew"
    )
    searching.add_argument(
        "--seconds", type=float, default=560.0, help="begin nothing that ends later"
    )
    searching.add_argument("--large", action="store_true", help="models of over 500 modules alone")
    serving = commands.add_parser("serving", help="MiniLM behind servers, under load")
    serving.add_argument("--out", type=Path, default=RESULTS)
    serving.add_argument("--only", nargs="+", default=[], metavar="SERVER")
    serving.add_argument(
        "--modes",
        nargs="+",
        choices=["eager", "tuned"],
        default=["eager"],
        help="serve the model as it is, or as tune() makes it",
    )
    serving.add_argument("--seconds", type=float, default=10.0, help="of each load")
    serving.add_argument("--threads", type=int, default=1, help="of PyTorch in each server")
    soaking = commands.add_parser("soak", help="a server under a long mixed load")
    soaking.add_argument("--out", type=Path, default=RESULTS)
    soaking.add_argument("--seconds", type=float, default=300.0)
    soaking.add_argument("--clients", type=int, default=24)
    replicas = commands.add_parser("replicas", help="requests/s by replicas on Ray Serve")
    replicas.add_argument("--out", type=Path, default=RESULTS)
    replicas.add_argument("--replicas", nargs="+", type=int, default=[1, 2], metavar="N")
    replicas.add_argument("--batch-ms", type=float, default=40.0, help="that a batch takes")
    replicas.add_argument("--seconds", type=float, default=10.0, help="of each load")
    replicas.add_argument("--quick", action="store_true", help="tiny sizes: no result")
    comparing = commands.add_parser("compare", help="two results of tune, capture or training")
    comparing.add_argument("before", type=Path, metavar="A.json")
    comparing.add_argument("after", type=Path, metavar="B.json")
    commands.add_parser("tables", help="make the tables of docs/reference/")
    given = parser.parse_args()
    # As on Ctrl-C, no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if given.command == "tune":
        _check(tuning, given)
        words, left_out = given.options.split(), given.leave_out
        sys.exit(tune(given.cases, given.out, words, left_out, quick=given.quick))
    elif given.command == "capture":
        options = ["--quick"] * given.quick + ["--no-peers"] * given.no_peers
        sys.exit(capture(given.only, given.out, options, quick=given.quick))
    elif given.command == "buckets":
        from .buckets.run import benchmark

        sys.exit(not benchmark(given.out, commit(), quick=given.quick))
    elif given.command == "busy":
        from .busy.run import benchmark as beside_load

        failed = beside_load(given.out, runs=given.runs, processes=given.processes)
        sys.exit(bool(failed))
    elif given.command == "programs":
        from .programs.run import benchmark as programs_in_place

        sys.exit(bool(programs_in_place(given.out)))
    elif given.command == "pipelines":
        from .programs.pipelines import benchmark as pipelines_in_place

        sys.exit(bool(pipelines_in_place(given.out, given.only)))
    elif given.command == "regional":
        from .regional.run import benchmark as by_regions

        sys.exit(bool(by_regions(given.out, given.only, given.seconds)))
    elif given.command == "search":
        if given.large:
            from .search.large import benchmark as large

            sys.exit(bool(large(given.out, given.seconds)))
        from .search.run import benchmark as search

        sys.exit(bool(search(given.out, given.only, given.seconds, given.again)))
    elif given.command == "profile":
        from .profile.run import benchmark as predict

        missed = predict(given.out, only=given.only, seconds=given.seconds, quick=given.quick)
        sys.exit(missed > 0)
    elif given.command == "feeding":
        from .feeding.run import benchmark as feed

        sys.exit(bool(feed(given.out, quick=given.quick)))
    elif given.command == "host-arguments":
        from .host_arguments.run import benchmark as on_host

        sys.exit(bool(on_host(given.out, rounds=given.rounds, quick=given.quick)))
    elif given.command == "streams":
        from .streams.run import benchmark as side_by_side

        sys.exit(bool(side_by_side(given.out, quick=given.quick)))
    elif given.command == "serving":
        from .serving.run import benchmark as serve

        flags = {"seconds": given.seconds, "threads": given.threads, "modes": given.modes}
        sys.exit(bool(serve(given.out, given.only, **flags)))
    elif given.command == "soak":
        from .serving.soak import benchmark as soak

        sys.exit(bool(soak(given.out, given.seconds, given.clients)))
    elif given.command == "replicas":
        from .serving.replicas import benchmark as replicate

        flags = {"batch_s": given.batch_ms / 1e3, "seconds": given.seconds, "quick": given.quick}
        sys.exit(bool(replicate(given.out, given.replicas, **flags)))
    elif given.command == "compare":
        from .compare import main as compare

        sys.exit(compare(given.before, given.after))
    elif given.command == "architectures":
        sys.exit(architectures(given.out))
    elif given.command == "check":
        sys.exit(check(given.out))
    elif given.command == "operators":
        from .operators.run import benchmark as operators

        sys.exit(operators(given.out, quick=given.quick))
    elif given.command == "composition":
        from .composition.run import benchmark as compose

        sys.exit(compose(given.out))
    elif given.command == "refused":
        from .refused.run import benchmark as refuse

        sys.exit(refuse(given.out, quick=given.quick, changing_only=given.changing))
    elif given.command == "generate":
        from .generate.run import benchmark as generate_tokens

        sys.exit(generate_tokens(given.out, quick=given.quick, only=given.only))
    elif given.command == "objects":
        from .objects.run import benchmark as objects

        sys.exit(objects(given.out, quick=given.quick))
    elif given.command == "unseen":
        from .unseen.run import benchmark as compare_unseen

        sys.exit(compare_unseen(given.out, given.only, given.share, timed=not given.plain))
    elif given.command == "calls":
        from .calls.run import benchmark as call

        options = given.strategies, given.only, given.limit_s
        sys.exit(bool(call(given.out, given.src, given.rounds, *options)))
    elif given.command == "first-run":
        from .first_run.masks import benchmark as masks
        from .first_run.run import benchmark as first_run

        if given.masks:
            sys.exit(bool(masks(given.out)))
        sys.exit(bool(first_run(given.out, given.only, limits=given.limits)))
    elif given.command == "engines":
        from .engines.run import benchmark as engines

        sys.exit(engines(given.out, given.only, quick=given.quick, commit=commit()))
    elif given.command == "answers":
        from .cold_start.run import benchmark as answers

        sys.exit(answers(given.out, given.only, quick=given.quick, commit=commit()))
    elif given.command == "fusion":
        from .fusion.run import benchmark as fusion

        sys.exit(fusion(given.out, given.only, quick=given.quick))
    elif given.command == "breaks":
        sys.exit(breaks(given.out, quick=given.quick))
    elif given.command == "training":
        _check_models(training_, given.only)
        flags = {"compile_too": not given.no_compile, "memory_too": not given.no_memory}
        sys.exit(training(given.only, given.out, quick=given.quick, **flags))
    else:
        tables()


if __name__ == "__main__":
    main()
