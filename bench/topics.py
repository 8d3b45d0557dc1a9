"""The topics of docs/results/: what was measured, what came of it, and what its plot shows.

What came of it is computed from the files, so that no sentence outlives its figures.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphwright.calls.plurals import counted

from .architectures.table import WAYS as DIMENSIONS
from .architectures.table import to_markdown as architectures_to_markdown
from .breaks.run import to_markdown as breaks_to_markdown
from .buckets.run import to_markdown as buckets_to_markdown
from .busy.run import LIMIT, furthest
from .busy.run import to_markdown as busy_to_markdown
from .calls.run import added
from .calls.run import to_markdown as calls_to_markdown
from .capture.table import to_markdown as capture_to_markdown
from .check.run import confusion, stop
from .check.run import to_markdown as check_to_markdown
from .cold_start.run import to_markdown as answers_to_markdown
from .composition.run import to_markdown as composition_to_markdown
from .engines.run import share_of_eager
from .engines.run import to_markdown as engines_to_markdown
from .feeding.run import SHOWN
from .feeding.run import to_markdown as feeding_to_markdown
from .first_run.masks import to_markdown as masks_to_markdown
from .first_run.run import to_markdown as first_run_to_markdown
from .fusion.run import over_inductor, ratio
from .fusion.run import to_markdown as fusion_to_markdown
from .generate.run import EAGER as GENERATED_EAGERLY
from .generate.run import OURS as GENERATED
from .generate.run import WAYS as WAYS_TO_GENERATE
from .generate.run import to_markdown as generation_to_markdown
from .host_arguments.run import to_markdown as host_arguments_to_markdown
from .objects.run import to_markdown as objects_to_markdown
from .operators.run import to_markdown as operators_to_markdown
from .plots import Bars, Curve
from .profile.run import GRAPH as PLAIN_GRAPH
from .profile.run import NEAR, RANGES, beside
from .profile.run import to_markdown as profile_to_markdown
from .programs.run import speedup
from .programs.run import to_markdown as programs_to_markdown
from .refused.run import to_markdown as refused_to_markdown
from .regional.run import to_markdown as regional_to_markdown
from .search.large import to_markdown as large_to_markdown
from .search.table import DEFAULT, figure
from .search.table import to_markdown as search_to_markdown
from .serving.replicas import to_markdown as replicas_to_markdown
from .serving.run import to_markdown as servers_to_markdown
from .serving.soak_table import to_markdown as soak_to_markdown
from .streams.run import to_markdown as streams_to_markdown
from .training import table as training
from .training.table import to_markdown as training_to_markdown
from .tune.table import CHOSEN, best_peer, latency
from .tune.table import to_markdown as tune_to_markdown
from .unseen.run import to_markdown as unseen_to_markdown

Result = dict[str, Any]
Results = Mapping[str, Result]  # by their files' names without the ending
Row = tuple[str, Sequence[float | None]]


def times(value: float) -> str:
    """How many times as fast something is."""
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


@dataclass(frozen=True)
class Outcome:
    """What came of a benchmark: a phrase with its figures, and its plot."""

    says: str
    plot: Bars | Curve


@dataclass(frozen=True)
class Topic:
    """A page.

    Attributes:
        name: of its file.
        title: of the page.
        says: what was measured, and how; figures come from `outcome`.
        commands: of scripts/bench, that measure it again.
        files: patterns of the results, each with what makes Markdown of one.
        outcome: what came of it.
    """

    name: str
    title: str
    says: str
    commands: Sequence[str]
    files: Mapping[str, Callable[[Result, str], str]]
    outcome: Callable[[Results], Outcome]


def mean(values: Iterable[float | None]) -> float:
    """The geometric mean of those that there are."""
    return statistics.geometric_mean([value for value in values if value is not None])


def over(slow: float | None, quick: float | None) -> float | None:
    """How many times as fast one is as the other; None where one is missing."""
    return None if slow is None or not quick else slow / quick


def span(values: Iterable[float], form: Callable[[float], str] = times) -> str:
    """The least and the most; once, where they are the same."""
    found = list(values)
    least, most = form(min(found)), form(max(found))
    return least if least == most else f"{least} to {most}"


def firsts(rows: Iterable[Row]) -> list[float]:
    """The first figures of rows."""
    return [value for _, (value, *_) in rows if value is not None]


def gains(what: str, series: Sequence[str], rows: Sequence[Row], base: str = "eager") -> Bars:
    """Bars of how many times as fast as something each is."""
    return Bars(
        f"How many times as fast as {base}: {what}",
        f"times as fast as {base}",
        series,
        rows,
        times,
        (1.0, base),
    )


# ------------------------------------------------------------ tune, search


def _tune(results: Results) -> Outcome:
    rows: list[Row] = []
    first = 0
    models = results["tune-h200"]["models"]
    for name, model in models.items():
        mine, eager = latency(model, CHOSEN), latency(model, "eager")
        peers = [over(eager, latency(model, way)) for way in ("torch.compile", "reduce-overhead")]
        rows.append((name, [over(eager, mine), *peers[::-1]]))
        peer = best_peer(model)
        first += mine is not None and (peer is None or mine <= peer[1])
    reduced = mean(over(mine, peer) for _, (mine, peer, _) in rows)
    return Outcome(
        f"what `tune` chose is {mean(firsts(rows)):.1f}× as fast as eager and {reduced:.1f}× as "
        f"fast as `reduce-overhead` (geometric means), and the fastest on {first} of "
        f"{len(models)} models",
        gains(
            "what tune chose on ten models, and torch.compile",
            ["chosen by tune", "reduce-overhead", "torch.compile"],
            rows,
        ),
    )


def _search(results: Results) -> Outcome:
    data = results["search-h100-h200"]
    rows: list[Row] = []
    for name, model in data["models"].items():
        eager = figure(model, "eager")
        peers = ("reduce-overhead", "torch.compile")
        ways = [over(eager, figure(model, way)) for way in (DEFAULT, *peers)]
        rows.append((name.rpartition("/")[2], ways))
    met = sum(target["met"] is True for target in data["targets"])
    return Outcome(
        f"the winner is {mean(firsts(rows)):.1f}× as fast as eager (geometric mean of "
        f"{len(rows)} models); {met} of {len(data['targets'])} targets met",
        gains(
            "what the default search chose, and torch.compile",
            ["chosen by tune", "reduce-overhead", "torch.compile"],
            rows,
        ),
    )


def _programs(results: Results) -> Outcome:
    first = results["programs-cpu"]["runs"]["first"]
    rows: list[Row] = [
        (f"batch {n}", [first["eager_s"][str(n)] / first["fast_s"][str(n)]])
        for n in (1, 2, 4, 8, 16, 32)
    ]
    return Outcome(
        f"SentenceTransformer.encode is {speedup(first):.2f} times as fast as before, in "
        f"{first['accelerated_s']:.0f} s of tuning",
        Bars("How many times as fast encode() is, by the number of texts", "×", [], rows),
    )


def _generation(results: Results) -> Outcome:
    ways: dict[str, dict[str, float]] = {
        key: {name: each["ms_a_token"] for name, each in row["ways"].items() if "error" not in each}
        for key, row in results["generate-h200"]["rows"].items()
    }
    faster = [found[GENERATED_EAGERLY] / found[GENERATED] for found in ways.values()]
    return Outcome(
        f"with eager's step in a graph, which gives eager's tokens exactly, graph_generate() takes "
        f"{span([1 / each for each in faster], '{:.0%}'.format)} of eager's time a token",
        Bars(
            "Milliseconds a token, by the way to generate",
            "ms",
            WAYS_TO_GENERATE,
            [(key, [found.get(name) for name in WAYS_TO_GENERATE]) for key, found in ways.items()],
        ),
    )


def _busy(results: Results) -> Outcome:
    result = results["busy-cpu"]
    quiet, busy = result["quiet"], result["busy"]
    marked = sum(bool(run["unsteady"]) for run in busy)
    rows: list[Row] = [
        (f"run {number}", [furthest(quiet, run)[1]]) for number, run in enumerate(busy, 1)
    ]
    return Outcome(
        f"in {len(busy)} runs no ratio is off by more than a factor of {max(firsts(rows)):.2f}, "
        f"and rows are marked as unsteady in {marked} of them",
        Bars(
            "By which factor the ratio that is furthest off differs from the quiet one's, by run",
            "factor",
            ["tune()"],
            rows,
            "{:.2f}".format,
            (LIMIT, "limit"),
        ),
    )


# ------------------------------------------------------------ graphs


def _capture(results: Results) -> Outcome:
    rows: list[Row] = []
    shares = []
    for name, model in results["capture-h200"]["models"].items():
        eager, mine = latency(model, "eager"), latency(model, "graphwright.graph")
        hand, peer = latency(model, "hand"), latency(model, "make_graphed_callables")
        rows.append((name, [over(eager, mine), over(eager, peer), over(eager, hand)]))
        shares += [share for share in [over(mine, hand)] if share is not None]
    return Outcome(
        f"a call takes {span(shares, '{:.2f}'.format)} of the time of a CUDA graph captured by "
        f"hand, and is {mean(firsts(rows)):.1f}× as fast as eager (geometric mean of {len(rows)} "
        "models)",
        gains(
            "graph(), make_graphed_callables, and a graph captured by hand",
            ["graph()", "make_graphed_callables", "captured by hand"],
            rows,
        ),
    )


def _calls(results: Results) -> Outcome:
    turns = results["calls-h200"]["rounds"]["now"]
    tuned_too = [name for name, us in turns[0].items() if "tune" in us]
    both = {name: added(turns, name) for name in tuned_too}
    rows: list[Row] = list(both.items())
    tuned, graphed = zip(*both.values(), strict=True)
    targets = results["calls-h200"]["targets"]
    met = sum(target["met"] for target in targets)
    form = "{:.1f}".format
    return Outcome(
        f"on an H200 a call of `tune`'s result takes {span(tuned, form)} µs longer than what it "
        f"chose, and a call of `graph()` {span(graphed, form)} µs longer than a bare replay; "
        f"{met} of {len(targets)} targets met there",
        Bars(
            "Microseconds that graphwright's checks add to a call, by model",
            "µs added to a call",
            ["tune()", "graph()"],
            rows,
            form,
        ),
    )


def _buckets(results: Results) -> Outcome:
    figures = results["buckets-h200"]["figures"]
    took, captures = figures["latency"], figures["captures"]
    rows: list[Row] = [
        ("median", [took["graph_s"] * 1e3, took["eager_s"] * 1e3]),
        ("99th percentile", [took["graph_p99_s"] * 1e3, took["eager_p99_s"] * 1e3]),
    ]
    return Outcome(
        f"{captures['prepared']} graphs answer all {figures['hits']:,} calls, "
        f"{took['ratio']:.1f}× as fast as eager (median), with "
        f"{counted(captures['after'], 'capture')} after `prepare`",
        Bars(
            "Milliseconds of a call of MiniLM at random sizes, with buckets and in eager",
            "ms a call",
            ["buckets", "eager"],
            rows,
            "{:.2f}".format,
        ),
    )


def _breaks(results: Results) -> Outcome:
    rows: list[Row] = []
    equal = total = 0
    for row in results["breaks-h200"]["rows"]:
        eager = row["eager"]["median"]
        rows.append((row["model"], [over(eager, row[w]["median"]) for w in ("graph", "floor")]))
        equal, total = equal + row["equal"], total + row["inputs"]
    return Outcome(
        f"{mean(firsts(rows)):.1f}× as fast as eager (geometric mean of {len(rows)} models), "
        f"{equal} of {total} results equal to eager's",
        gains(
            "graph() on models that no single capture can hold, and the floor",
            ["graph()", "bare replays (the floor)"],
            rows,
        ),
    )


def _objects(results: Results) -> Outcome:
    data = results["objects-h100"]
    rows: list[Row] = []
    for name, row in data["vision"].items():
        rows.append((name, [_gain(row)]))
    answered = [
        gain
        for row in data["language"].values()
        if row["hits"] and (gain := _gain(row)) is not None
    ]
    of = f"{len(answered)} language models"
    rows.insert(0, (of, [mean(answered)]))
    return Outcome(
        f"graphs answer {len(answered)} of {len(data['language'])} tiny language models with "
        f"their caches, {mean(answered):.1f}× as fast as eager (geometric mean); models for vision "
        f"are {span(firsts(rows[1:]))} as fast",
        gains("graph() on models that take and return objects", ["graph()"], rows),
    )


def _gain(row: Result) -> float | None:
    """How many times as fast as eager graph() is, where both were timed."""
    found = row.get("times", {})
    eager, graph = (found.get(way, {}).get("median") for way in ("eager", "graph"))
    return over(eager, graph)


# ------------------------------------------------------------ what can be captured, and padded


def _capturable(results: Results) -> Outcome:
    found = results["check-h200"]["rows"]
    kinds = Counter(
        "nothing: captured" if (first := stop(row["cpu"])) is None else first["kind"]
        for row in found
        if "failed" not in row
    )
    right = confusion(found, "cpu")
    predicted = len(right["captured as predicted"]) + len(right["stopped as predicted"])
    rows: list[Row] = [(kind, [float(count)]) for kind, count in kinds.most_common()]
    return Outcome(
        f"{kinds['nothing: captured']} of {sum(kinds.values())} models have nothing that stops a "
        f"plain capture; of {sum(map(len, right.values()))} captures `check()`, run on the CPU, "
        f"predicted {predicted} correctly",
        Bars(
            "Number of models by what first stops a plain capture",
            "models, by what first stops a plain capture",
            ["models"],
            rows,
            "{:.0f}".format,
        ),
    )


def _architectures(results: Results) -> Outcome:
    found = results["architectures-cpu"]["rows"]
    verdicts = {way: Counter(row[way]["verdict"] for row in found) for way in DIMENSIONS}
    taken = {way: each["accepted"] for way, each in verdicts.items()}
    exact = {way: each["exact-only"] for way, each in verdicts.items()}
    rows: list[Row] = [(way, [float(taken[way]), float(exact[way])]) for way in DIMENSIONS]
    every = [row[way] for row in found for way in DIMENSIONS]
    accepted = [each for each in every if each["verdict"] == "accepted"]
    calls = sum(each["padded_calls"] for each in accepted)
    wrong = sum(len(each["wrong"]) for each in accepted)
    return Outcome(
        f"{taken['batch']} of {len(found)} take buckets of batches, and of those with a sequence "
        f"{taken['length']} of {taken['length'] + exact['length']} buckets of lengths; of "
        f"{calls:,} padded calls {wrong} gave other results than eager",
        Bars(
            "Number of architectures that take buckets, by the dimension that is padded",
            "architectures",
            ["take buckets", "answer exact sizes only"],
            rows,
            "{:.0f}".format,
        ),
    )


# ------------------------------------------------------------ training


def _training(results: Results) -> Outcome:
    rows: list[Row] = []
    beside, waited, off = [], [], []
    for name, model in results["training-h200"]["models"].items():
        eager, ours = training.seconds(model, training.EAGER), training.best(model, training.OURS)
        others = [training.seconds(model, w) for w in ("reduce-overhead", training.CALLABLES)]
        best = None if ours is None else ours[1]
        rows.append((name, [over(eager, each) for each in (best, *others)]))
        beside += [gain for gain in [training.gain(model)] if gain is not None]
        single = [
            [training.seconds(model, way, "latency_s") or math.inf for way in ways]
            for ways in (training.OTHERS, training.OURS)
        ]
        waited.append(min(single[0]) / min(single[1]))
        off.append(model["ways"][training.PLAIN]["loss_relative_difference"])
    equal = f"differs from eager's by at most {max(off):.1e}" if any(off) else "equals eager's"
    return Outcome(
        f"back to back, steps are {span(firsts(rows))} as fast as eager's and {span(beside)} as "
        f"fast as the best of PyTorch's own methods ({span(waited)} if each step is waited for); "
        f"after 20 steps the loss of `graph_step()` {equal}",
        gains(
            "the best of graph_step() on training steps, and PyTorch's own methods",
            ["best of graph_step()", "reduce-overhead", "make_graphed_callables"],
            rows,
        ),
    )


# ------------------------------------------------------------ fusion, operators, engines


def _fusion(results: Results) -> Outcome:
    rows: list[Row] = []
    shares: dict[str, list[float]] = {}
    for file in ("fusion-h200", "fusion-cpu"):
        for row in results[file]["models"]:
            share = over_inductor(row)
            shares.setdefault(file, []).extend([] if share is None else [share])
            if file == "fusion-h200":
                gain = 1 / ratio(row, "eager")
                rows.append((row["model"], [gain, None if share is None else gain * share]))
    gpu, cpu = (span(found, "{:.2f}".format) for found in shares.values())
    return Outcome(
        f"`fuse()` takes {gpu} of the time of the better of Inductor's two layouts on an H200 "
        f"under CUDA graphs, and {cpu} on a CPU",
        gains(
            "fuse() and Inductor, each as a CUDA graph",
            ["fuse()", "Inductor"],
            rows,
            "a graph of eager",
        ),
    )


def _unseen(results: Results) -> Outcome:
    data = results["unseen-h100"]
    rows: list[Row] = []
    for name, sizes in data["models"].items():
        one = sizes["1"]["ways"]
        gain = over(one["graph"]["median"], one["fused+graph"]["median"])
        rows.append((name.partition("/")[2], [gain]))
    rows.sort(key=lambda row: -(row[1][0] or 0.0))
    found = firsts(rows)
    wrong = sum(not size["right"] for sizes in data["models"].values() for size in sizes.values())
    return Outcome(
        f"{mean(found):.2f}× as fast as a graph of the model alone (geometric mean of {len(found)} "
        f"models at batch 1, {span(found)}), {wrong} with wrong results; "
        f"{len(data['passed_over'])} models were skipped, each with its reason",
        gains("a graph of what fuse() made", ["fuse() and graph()"], rows, "a graph alone"),
    )


def _operators(results: Results) -> Outcome:
    data = results["operators-channels-h200"]
    half = [row for row in data["bandwidth"] if row["case"].endswith(" float16")]
    rows: list[Row] = [(row["case"].removesuffix(" float16"), [row["copy_share"]]) for row in half]
    shares = [row["copy_share"] for row in data["bandwidth"]]
    ratios = [row["ratio"] for row in data["models"]]
    return Outcome(
        f"the median of {len(shares)} operators reaches {statistics.median(shares):.0%} of a "
        f"copy's bandwidth; as models call them, they take {mean(ratios):.2f} of the time of "
        f"Inductor's fusion (geometric mean of {len(ratios)} cases, "
        f"{span(ratios, '{:.2f}'.format)})",
        Bars(
            "Bandwidth of our operators on large float16 inputs, as a share of a plain copy's",
            "share of a copy's bandwidth",
            ["operator"],
            sorted(rows, key=lambda row: -(row[1][0] or 0.0)),
            "{:.2f}".format,
            (1.0, "a copy"),
        ),
    )


def _engines(results: Results) -> Outcome:
    from graphwright.report.report import Report

    chosen: dict[str, list[str]] = {}
    rows: list[Row] = []
    for file in ("engines-cpu", "engines-h200"):
        for name, model in results[file]["models"].items():
            report = Report.from_json(json.dumps(model["report"]))
            chosen.setdefault(file, []).append(report.chosen or "")
            if file == "engines-cpu":
                ways = ("fused", "onnxruntime", "xla")
                rows.append((name, [over(1.0, share_of_eager(report.row(way))) for way in ways]))
    onnx = [sum("onnx" in each for each in found) for found in chosen.values()]
    cpu, gpu = (len(found) for found in chosen.values())
    return Outcome(
        f"`tune` chose ONNX Runtime for {onnx[0]} of {cpu} models on a CPU, and for {onnx[1]} of "
        f"{gpu} on an H200",
        gains("fuse(), ONNX Runtime and XLA on a CPU", ["fuse()", "ONNX Runtime", "XLA"], rows),
    )


# ------------------------------------------------------------ first answers, feeding, streams


def _answers(results: Results) -> Outcome:
    rows: list[Row] = []
    ways = ("saved", "eager", "inductor, warm", "inductor, cold")
    for name, model in results["answers-h200"]["models"].items():
        rows.append((name, [statistics.median(model["seconds"][way]) for way in ways]))
    said = ", ".join(f"{saved:.1f} s for {name}" for name, (saved, *_) in rows)
    compiled = span([values[2] or 0.0 for _, values in rows], "{:.1f}".format)
    return Outcome(
        f"from a saved file {said}; with `torch.compile` and filled caches {compiled} s",
        Bars(
            "Seconds from the start of a process to its first correct answer",
            "seconds to the first answer",
            ["a saved file", "eager", "compile, filled caches", "compile, empty"],
            rows,
            "{:.1f}".format,
        ),
    )


def _streams(results: Results) -> Outcome:
    rows: list[Row] = []
    memory = []
    for name, batches in results["streams-h100"]["models"].items():
        for batch, row in batches.items():
            rows.append((f"{name}, batch {batch}", [row["gain"]]))
            memory.append(row["ways"]["several"]["nbytes"] / row["ways"]["one"]["nbytes"])
    return Outcome(
        f"a graph on several streams is {span(firsts(rows))} as fast as one on one stream, and "
        f"holds {min(memory):.1f} to {max(memory):.1f} times the memory",
        gains("a graph on several streams", ["several streams"], rows, "one stream"),
    )


def _profile(results: Results) -> Outcome:
    models = results["profile-h100"]["models"]

    def right(unseen: bool) -> list[str]:
        known = [row for row in models.values() if row["unseen"] is unseen]
        gains = [abs(each - 1) for row in known if (each := beside(row)) is not None]
        found = [f"{sum(each <= NEAR for each in gains)} of {len(gains)}"]
        for way, remedy in RANGES.items():
            spans = [(row["remedies"][remedy]["under_graph"], row["gains"]) for row in known]
            held = [s[0] <= gains[way] <= s[1] for s, gains in spans if s and way in gains]
            found.append(f"{sum(held)} of {len(held)}")
        return found

    near, fused, half = right(False)
    others = ", ".join(right(True))
    rows: list[Row] = [
        (name, [row["gains"][PLAIN_GRAPH], row["remedies"]["graph"]["likely"]])
        for name, row in models.items()
    ]
    return Outcome(
        f"`profile()` predicts a graph's gain within {100 * NEAR:.0f} % on {near} models; the gain "
        f"of fusion lies in the range on {fused}, that of bf16 on {half}; of models drawn by a "
        f"seed, on {others}",
        Bars(
            "How many times as fast as eager a graph is: as measured, and as predicted before",
            "times as fast as eager",
            ["measured", "predicted by profile()"],
            rows,
            times,
        ),
    )


def _feeding(results: Results) -> Outcome:
    ways = results["feeding-h100"]["ways"]
    ms = {way: ways[way]["median"] * 1e3 for way in SHOWN}
    over_computing = ms["prefetch"] / ms["computing"]
    rows: list[Row] = [
        ("prefetch()", [ms["prefetch"]]),
        ("pin_memory, non_blocking", [ms["pinned"]]),
        ("plain loop", [ms["plain"]]),
    ]
    return Outcome(
        f"with `prefetch()` a batch takes {over_computing:.2f} of the time of computing alone, "
        f"with `pin_memory` and `non_blocking` {ms['pinned'] / ms['computing']:.2f}, in a plain "
        f"loop {ms['plain'] / ms['computing']:.2f}",
        Bars(
            "Milliseconds a batch: prefetch(), PyTorch's own method, and a plain loop",
            "ms a batch of 64 images",
            ["a loop over batches"],
            rows,
            "{:.2f}".format,
            (ms["computing"], "computing alone"),
        ),
    )


def _serving(results: Results) -> Outcome:
    found = results["soak-serving-cpu"]
    requests, memory = found["requests"], found["process"]["rss_mib"]
    first, last, allowed = memory.values()
    total = sum(count for kind, count in requests.items() if kind != "reloads")
    return Outcome(
        f"of {total:,} requests {requests['wrong']} were answered wrongly and {requests['lost']} "
        f"not at all; the server's {first:.0f} MiB grew by {last - first:.0f}",
        Curve(
            "Resident memory of the server over the time of the load",
            "seconds",
            "MiB",
            [(seconds, mib) for seconds, mib, *_ in found["samples"]],
            (max(10.0, 0.25 * found["seconds"]), first + allowed),
            f"allowed: {allowed:.0f} MiB above the end of the warm-up",
        ),
    )


def _servers(results: Results) -> Outcome:
    found, replicas = results["serving-h200"], results["replicas-h200"]["replicas"]
    modes = ("eager", "tuned")
    on_gpu, on_cpu = dict(found["servers"]), dict(results["serving-cpu"]["servers"])
    rows: list[Row] = [
        (f"{name}, {mode}", [row["highest_rate"], row["closed"]["answered_per_s"]])
        for name, row_of in on_gpu.items()
        for mode, row in row_of.items()
    ]
    mine, mine_here = on_gpu.pop("graphwright"), on_cpu.pop("graphwright")
    plain, tuned = (mine[mode]["highest_rate"] for mode in modes)
    others = [max(each[mode]["highest_rate"] for each in on_gpu.values()) for mode in modes]
    here = [max(each[mode]["highest_rate"] for each in on_cpu.values()) for mode in modes]
    closed = mine["eager"]["closed"]["answered_per_s"]
    best = max(each["eager"]["closed"]["answered_per_s"] for each in on_gpu.values())
    one, two = (replicas[count]["answered_per_s"] for count in ("1", "2"))
    return Outcome(
        f"{plain:.0f} requests a second with 99 of 100 answers within "
        f"{1e3 * found['bound_s']:.0f} ms, {_other(others[0])}; with what `tune` made {tuned:.0f}, "
        f"{_other(others[1])}; {over(closed, best):.1f}× the best other one in a closed loop; two "
        f"GPUs answer {two / one:.2f}× as many requests as one; on two CPU cores "
        f"{mine_here['tuned']['highest_rate']:.0f} within "
        f"{1e3 * results['serving-cpu']['bound_s']:.0f} ms with what `tune` made, the best other "
        f"server {here[0]:.0f} with the plain model and {here[1]:.0f} with the same file",
        Bars(
            "Requests a second by server and model, in time and in a closed loop",
            "requests/s",
            ["99 of 100 within 10 ms", "a closed loop"],
            rows,
            "{:,.0f}".format,
        ),
    )


def _other(rate: float) -> str:
    return f"the best other server {rate:.0f}" if rate else "no other server at any rate"


def _unnamed(to_markdown: Callable[[Result], str]) -> Callable[[Result, str], str]:
    return lambda data, _: to_markdown(data)


TOPICS = (
    Topic(
        "tune",
        "Tuning",
        "Ten models, each tuned over five strategies, then timed in turns with PyTorch's own "
        "methods.",
        ["tune"],
        {"tune*": _unnamed(tune_to_markdown)},
        _tune,
    ),
    Topic(
        "search",
        "The default search",
        "This page compares the winner of `tune()`, with its default strategies and budget, with "
        "an exhaustive search and with PyTorch's own methods. ([Tuning](tune.md) is another "
        "benchmark: ten models, five named strategies.)",
        ["search", "first-run"],
        {
            "search-h*": _unnamed(search_to_markdown),
            "search-large*": _unnamed(large_to_markdown),
            "regional*": _unnamed(regional_to_markdown),
            "first-run*": _unnamed(first_run_to_markdown),
            "masks*": _unnamed(masks_to_markdown),
        },
        _search,
    ),
    Topic(
        "busy",
        "On a busy machine",
        "How far the ratios of `tune()` are off where other processes take its time.",
        ["busy"],
        {"busy*": _unnamed(busy_to_markdown)},
        _busy,
    ),
    Topic(
        "programs",
        "Whole programs",
        "`accelerate()` tunes what a program calls, in place. Compared with the program itself, "
        "end to end.",
        ["programs"],
        {"programs*": _unnamed(programs_to_markdown)},
        _programs,
    ),
    Topic(
        "capture",
        "Graphs",
        "`graph()`, which uses no compiler, compared with a CUDA graph captured by hand and with "
        "PyTorch's own methods. Its outputs are yours: the next call does not overwrite them.",
        ["capture"],
        {"capture-h*": _unnamed(capture_to_markdown)},
        _capture,
    ),
    Topic(
        "calls",
        "The cost of a call",
        "What the checks before each call cost: that the inputs fit the graph, and that the module "
        "has not changed.",
        ["calls"],
        {"calls*": _unnamed(calls_to_markdown)},
        _calls,
    ),
    Topic(
        "buckets",
        "Buckets",
        "MiniLM called at random sizes, which graphs of a few sizes answer after padding.",
        ["buckets"],
        {"buckets*": _unnamed(buckets_to_markdown)},
        _buckets,
    ),
    Topic(
        "breaks",
        "Calls with graph breaks",
        "Models that no single capture can hold: `graph()` runs them as segments between their "
        "breaks, or in eager where that is faster.",
        ["breaks", "refused"],
        {"breaks*": breaks_to_markdown, "refused*": _unnamed(refused_to_markdown)},
        _breaks,
    ),
    Topic(
        "objects",
        "Calls with objects",
        "`graph()` on models that take lists, data classes and caches, and that set attributes "
        "while they run.",
        ["objects"],
        {"objects*": _unnamed(objects_to_markdown)},
        _objects,
    ),
    Topic(
        "capturable",
        "Models that can be captured",
        "What `check()` finds in models of transformers, timm and our own, compared with what a "
        "plain capture on a GPU then does. Where a plain capture stops, `graph()` can often "
        "[divide the call at its breaks](breaks.md).",
        ["check"],
        {"check*": check_to_markdown},
        _capturable,
    ),
    Topic(
        "architectures",
        "Architectures that take buckets",
        "Which architectures of transformers can be padded in the batch, the length or both, and "
        "why the others cannot.",
        ["architectures"],
        {"architectures*": architectures_to_markdown},
        _architectures,
    ),
    Topic(
        "training",
        "Training",
        "Whole training steps as one graph, compared with PyTorch's own methods.",
        ["training"],
        {"training*": training_to_markdown},
        _training,
    ),
    Topic(
        "fusion",
        "Fusion",
        "`fuse()` compared with TorchScript and Inductor.",
        ["fusion", "composition"],
        {
            "fusion*": _unnamed(fusion_to_markdown),
            "composition*": _unnamed(composition_to_markdown),
        },
        _fusion,
    ),
    Topic(
        "unseen",
        "Models nobody tuned for",
        "Models that nobody had tuned for, drawn by a seed from timm, torchvision and "
        "transformers: what `fuse()` adds to a graph of the same model.",
        ["unseen"],
        {"unseen*": _unnamed(unseen_to_markdown)},
        _unseen,
    ),
    Topic(
        "operators",
        "Operators",
        "Our fused operators, compared with a plain copy of the same bytes and with what Inductor "
        "generates from the same lines.",
        ["operators"],
        {"operators*": _unnamed(operators_to_markdown)},
        _operators,
    ),
    Topic(
        "engines",
        "Other engines",
        "ONNX Runtime and XLA compared with Inductor and `fuse()`. TensorRT was not installed.",
        ["engines"],
        {"engines*": _unnamed(engines_to_markdown)},
        _engines,
    ),
    Topic(
        "generation",
        "Generation",
        "`generate()` of language models, beside transformers' own ways and graphs captured by "
        "hand.",
        ["generate"],
        {"generate*": _unnamed(generation_to_markdown)},
        _generation,
    ),
    Topic(
        "cold-start",
        "The first answer",
        "Time from the start of a process to its first correct answer: from a saved file, in "
        "eager, and with `torch.compile`.",
        ["answers"],
        {"answers*": _unnamed(answers_to_markdown)},
        _answers,
    ),
    Topic(
        "streams",
        "Branches on several streams",
        "Models with parallel branches, captured on one stream and on four.",
        ["streams"],
        {"streams*": _unnamed(streams_to_markdown)},
        _streams,
    ),
    Topic(
        "profile",
        "Predictions",
        "What `profile()` predicts before any tuning, compared with what a graph, fusion and "
        "bfloat16 then gain.",
        ["profile"],
        {"profile*": _unnamed(profile_to_markdown)},
        _profile,
    ),
    Topic(
        "feeding",
        "Feeding the device",
        "Batches copied to the device while a graph of ResNet-50 computes; and time steps of a "
        "diffusion model that its caller keeps on the host.",
        ["feeding", "host-arguments"],
        {
            "feeding*": _unnamed(feeding_to_markdown),
            "host-arguments*": _unnamed(host_arguments_to_markdown),
        },
        _feeding,
    ),
    Topic(
        "servers",
        "Servers compared",
        "MiniLM behind `graphwright serve` and behind other servers, under the same loads; and "
        "replicas on Ray Serve.",
        ["serving", "replicas"],
        {
            "serving*": _unnamed(servers_to_markdown),
            "replicas*": _unnamed(replicas_to_markdown),
        },
        _servers,
    ),
    Topic(
        "serving",
        "Serving under load",
        "A server under a long mixed load, with malformed requests, clients that leave, and "
        "reloads of the model.",
        ["soak"],
        {"soak*": _unnamed(soak_to_markdown)},
        _serving,
    ),
)
