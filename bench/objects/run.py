"""Calls with objects beside eager: language models with caches, and torchvision's detection models.

    scripts/bench objects [--out DIR] [--quick]

Language models, tiny and with their default `use_cache`, answer a text and, with the cache that
came back, the next token. Fifty steps go on with one cache. A captured step with a static cache is
called by hand, beside its raw graph. On a GPU torchvision's RAFT and its detection models, which
set attributes in forward, answer 20 random images of a size. Every result is compared with eager's.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import generative
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.objects import flatten_result, map_tensors
from graphwright.errors import first_line
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.timing import in_turns, times

Row = dict[str, Any]

ROUNDS, IMAGES, STEPS, TURNS = 30, 20, 50, 21
# What is asked: at most so many models refused; no model slower than eager, as far as can be seen;
# and what fifty steps with a cache of another length each may take.
REFUSED, SLOWER, DECODING = 3, 1.03, 1.1
# What a captured step with a static cache may take over its raw graph; how long these caches are,
# and how many steps are timed together.
OVER_RAW_S, LENGTH, TOGETHER = 1e-4, 64, 10
DETECTION = (
    "fasterrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
)
# How far a result may be off eager's, relative to its largest value.
NEAR = 2e-3


def near(mine: Any, its: Any) -> bool:
    """Whether two results are the same tree with tensors that are close to each other."""
    leaves, spec = flatten_result(mine)
    others, expected = flatten_result(its)
    if spec != expected:
        return False
    for a, b in zip(leaves, others, strict=True):
        if isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return False
            if b.numel() and not torch.allclose(
                a.double(), b.double(), rtol=NEAR, atol=NEAR * float(b.double().abs().max())
            ):
                return False
        elif (type(a), a) != (type(b), b):
            return False
    return True


def on(device: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) for name, value in values.items()}


def cache_of(result: Any) -> dict[str, Any]:
    """The argument that takes a result's cache; none where it has no cache."""
    for name in ("past_key_values", "cache_params", "state"):
        if result.get(name) is not None:
            return {name: result[name]}
    return {}


def following(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the call for the next token, its cache excepted."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    return given | {name: given[name][:, -1:]}


def language_model(name: str, device: torch.device, rounds: int) -> Row:
    """One model: the call for a text, and the one for the next token, eager and graphed."""
    model = generative.build(name).to(device)
    given = on(device, generative.inputs(name))
    graphed = gw.graph(model)
    with torch.no_grad():
        expected, result = model(**given), graphed(**given)
        row: Row = {"right": near(result, expected)}
        cache = cache_of(expected)
        if cache:
            more = following(given)
            for _ in range(2):  # The first call with objects is eager.
                mine, its = copy.deepcopy(cache), copy.deepcopy(cache)
                answer, wanted = graphed(**more, **mine), model(**more, **its)
                row["right"] &= near(answer, wanted) and near(mine, its)
        row["times"] = times(
            in_turns({"eager": lambda: model(**given), "graph": lambda: graphed(**given)}, rounds),
            1,
        )
    return row | about(graphed)


def about(graphed: Any) -> Row:
    """How the calls were answered."""
    found = graphed.statistics
    eager = {why: count for why, count in found.eager.items() if "first call" not in why}
    last = graphed.explain().rpartition("last call without a graph: ")[2] if eager else ""
    return {
        "hits": found.hits,
        "in_parts": found.in_parts,
        "captures": found.captures,
        "eager": eager,
        "reason": last.partition(" (at ")[0],
    }


def decoding(name: str, device: torch.device) -> Row:
    """Seconds of fifty steps that go on with one cache, in turns: eager's and a new graph's."""
    model = generative.build(name).to(device)
    given = on(device, generative.inputs(name))
    found: dict[str, list[float]] = {"eager": [], "graph": []}
    ends: dict[str, Any] = {}
    with torch.no_grad():
        for turn in range(TURNS):
            graphed = gw.graph(model)  # A graph that knows these lengths would capture them.
            graphed(**given)
            ways: list[tuple[str, Any]] = [("eager", model), ("graph", graphed)]
            for way, call in ways if turn % 2 else ways[::-1]:
                result = model(**given)
                cache, more = cache_of(result), following(given)
                wait(device)
                began = time.perf_counter()
                for _ in range(STEPS):
                    result = call(**more, **cache)
                wait(device)
                found[way].append(time.perf_counter() - began)
                ends[way] = map_tensors(torch.clone, result)
            found_at_last = about(graphed)
            graphed.close()
    seconds = {way: statistics.median(each) for way, each in found.items()}
    right = near(ends["graph"], ends["eager"])
    return {"seconds": seconds, "samples": found, "right": right} | found_at_last


def static_model(name: str, device: torch.device) -> nn.Module:
    """GPT-2 as it is, or a Llama of 22 layers; tiny on a CPU, where only the host's part counts."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    gpu = device.type == "cuda"
    torch.manual_seed(0)
    model: nn.Module
    if name == "GPT-2":
        size = {} if gpu else {"n_embd": 16, "n_head": 2, "vocab_size": 64}
        model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    else:
        width = 2048 if gpu else 16
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=22,
                hidden_size=width,
                intermediate_size=2 * width,
                num_attention_heads=2,
                num_key_value_heads=2,
                vocab_size=64,
            )
        )
    return model.eval().to(device, torch.float16 if gpu else torch.float32)


def static_step(name: str, device: torch.device, rounds: int) -> Row:
    """A captured step with a StaticCache, called by hand: beside eager and its raw graph.

    The raw graph is captured by PyTorch alone, on a cache of its own, with the token copied in.
    """
    from transformers import StaticCache

    model = static_model(name, device)

    def cache() -> Any:
        return StaticCache(config=model.config, max_cache_len=LENGTH)

    def step(ids: torch.Tensor, held: Any) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, past_key_values=held, use_cache=True).logits
        return logits

    ids = torch.randint(0, 64, (1, 1), device=device)
    with torch.no_grad():
        caches = [cache() for _ in range(3)]
        for held in caches:
            for _ in range(3):
                step(ids, held)
        graphed = gw.capture(step, ids, caches[0])

        def begun(held: Any) -> None:
            for layer in held.layers:  # So that no call runs out of the cache.
                layer.cumulative_length.zero_()

        def by_hand() -> None:
            begun(caches[0])
            graphed(ids, caches[0])

        def eager() -> None:
            begun(caches[1])
            step(ids, caches[1])

        ways = {"eager": eager, "by hand": by_hand}
        begun(caches[0])
        begun(caches[1])
        right = near(graphed(ids, caches[0]), step(ids, caches[1]))
        if device.type == "cuda":
            fixed, graph = ids.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(fixed, caches[2])

            def raw() -> None:
                begun(caches[2])
                fixed.copy_(ids)
                graph.replay()

            ways["raw"] = raw
        # Several at a time, as a loop makes them: after a step of eager the caches are cold.
        blocks = {name: functools.partial(_repeated, way) for name, way in ways.items()}
        found = times(in_turns(blocks, rounds), TOGETHER)
    row: Row = {"right": right, "times": found}
    if "raw" in found:
        row["over_raw_s"] = found["by hand"]["median"] - found["raw"]["median"]
    return row


def _repeated(step: Callable[[], None]) -> None:
    for _ in range(TOGETHER):
        step()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def vision_models(device: torch.device) -> Iterator[tuple[str, Callable[[], nn.Module], Any]]:
    """Names, what makes the models, and what makes the arguments of a call."""
    from torchvision import models as known

    def frames() -> Any:
        return tuple(torch.rand(1, 3, 360, 520, device=device) for _ in range(2))

    def image() -> Any:
        return ([torch.rand(3, 320, 320, device=device)],)

    yield "raft_large", known.optical_flow.raft_large, frames
    for name in DETECTION:
        make = getattr(known.detection, name)
        yield name, lambda make=make: make(weights=None, weights_backbone=None), image


def vision_model(make: Callable[[], nn.Module], arguments: Callable[[], Any], rounds: int) -> Row:
    """One model on random images of a size, eager and graphed."""
    torch.manual_seed(0)
    model = make().eval()
    args = arguments()
    model.to(next(iter(args[0])).device if isinstance(args[0], list) else args[0].device)
    graphed = gw.graph(copy.deepcopy(model))  # Eager calls rebuild what is then compared.
    right = True
    with torch.no_grad():
        for _ in range(IMAGES):
            args = arguments()
            right &= near(graphed(*args), model(*args))
        found = in_turns({"eager": lambda: model(*args), "graph": lambda: graphed(*args)}, rounds)
    return {"right": right, "times": times(found, 1)} | about(graphed)


def targets(result: Row) -> list[Row]:
    """What is asked, and whether it holds."""
    rows = result["language"] | result["vision"]
    done = {name: row for name, row in rows.items() if "error" not in row}
    ratios = {
        name: row["times"]["graph"]["median"] / row["times"]["eager"]["median"]
        for name, row in done.items()
    }
    slow = [name for name, ratio in ratios.items() if ratio > SLOWER]
    eager = [name for name, row in done.items() if row["hits"] + row["in_parts"] == 0]
    wrong = [name for name, row in rows.items() if not row.get("right")]
    others = (result["decoding"] | result["static"]).items()
    wrong += [name for name, row in others if not row.get("right")]
    found = [
        ("results that are not eager's", wrong, 0),
        ("models that no graph answers", eager, REFUSED),
        (f"models that take over {SLOWER:g} of eager's time", slow, 0),
    ]
    asked = [
        {"target": what, "figure": len(names), "names": names, "most": most}
        for what, names, most in found
    ]
    for name, row in result["decoding"].items():
        ratio = row["seconds"]["graph"] / row["seconds"]["eager"]
        asked.append({"target": f"{name}: {STEPS} steps", "figure": ratio, "most": DECODING})
    for name, row in result["static"].items():
        if "over_raw_s" in row:
            what = f"{name}: seconds that a step with a static cache takes over its raw graph"
            asked.append({"target": what, "figure": row["over_raw_s"], "most": OVER_RAW_S})
    return [row | {"met": row["figure"] <= row["most"]} for row in asked]


def benchmark(out: Path, *, quick: bool) -> int:
    """Measure all models and write after each; the number of targets missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    names = generative.FEW if quick else (*generative.FEW, *generative.MORE)
    result: Row = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "objects",
        "commit": commit(),
        "quick": quick,
        "environment": environment(device),
        "language": {},
        "vision": {},
        "decoding": {},
        "static": {},
    }
    where = out / f"objects-{'h200' if device.type == 'cuda' else 'cpu'}.json"
    tasks: list[tuple[str, str, Callable[[], Row]]] = [
        ("vision", name, lambda make=make, given=given: vision_model(make, given, ROUNDS))
        for name, make, given in (vision_models(device) if device.type == "cuda" else ())
    ]
    tasks += [
        ("decoding", name, lambda name=name: decoding(name, device))
        for name in ("Qwen2ForCausalLM", "MT5ForConditionalGeneration")
    ]
    tasks += [
        ("static", name, lambda name=name: static_step(name, device, ROUNDS))
        for name in ("GPT-2", "Llama of 22 layers")
    ]
    tasks += [
        ("language", name, lambda name=name: language_model(name, device, ROUNDS)) for name in names
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # They say that calls are eager, which is counted.
        for kind, name, work in tasks:
            try:
                result[kind][name] = work()
            except Exception as error:
                result[kind][name] = {"error": f"{type(error).__name__}: {first_line(error)}"}
            gc.collect()
            write(where, result)
            print(name, json.dumps(brief(result[kind][name])), flush=True)
    result["decoding"] = {n: r for n, r in result["decoding"].items() if "error" not in r}
    result["targets"] = targets(result)
    write(where, result)
    for target in result["targets"]:
        met = "yes" if target["met"] else f"NO {', '.join(target.get('names', ()))}"
        print(f"{target['target']:50}{target['figure']:>8.3g} of {target['most']:g}  {met}")
    print(f"wrote {where}")
    return sum(not target["met"] for target in result["targets"])


def brief(row: Row) -> Row:
    """A row for whoever watches."""
    if "times" not in row:
        return row
    ms = {way: round(found["median"] * 1e3, 3) for way, found in row["times"].items()}
    kept = ("right", "hits", "in_parts", "eager")
    return {"ms": ms} | {name: row[name] for name in kept if name in row}


def to_markdown(result: Row) -> str:
    """The tables of a result."""
    ratios = []
    for row in result["language"].values():
        if "times" in row and row["hits"]:
            ratios.append(row["times"]["eager"]["median"] / row["times"]["graph"]["median"])
    lines = [
        f"Language models of transformers, tiny, with their default cache: {len(ratios)} of "
        f"{len(result['language'])} answered by graphs, {statistics.geometric_mean(ratios):.2f} "
        "times as fast as eager (geometric mean).",
        "",
    ]
    if result["vision"]:
        lines += [
            "| model | eager, ms | graph, ms | ratio | right |",
            "| --- | ---: | ---: | ---: | --- |",
        ]
    for name, row in result["vision"].items():
        if "times" not in row:
            lines.append(f"| {name} | | | | {row['error']} |")
            continue
        eager, graph = (row["times"][way]["median"] * 1e3 for way in ("eager", "graph"))
        verdict = "yes" if row["right"] else "NO"
        lines.append(f"| {name} | {eager:.2f} | {graph:.2f} | {graph / eager:.2f} | {verdict} |")
    for name, row in result["decoding"].items():
        seconds = row["seconds"]
        lines += [
            "",
            f"{STEPS} steps of {name} with one growing cache: "
            f"{seconds['graph'] / seconds['eager']:.2f} of eager's time.",
        ]
    for name, row in result.get("static", {}).items():
        if "over_raw_s" in row:
            ms = {way: found["median"] * 1e3 for way, found in row["times"].items()}
            lines += [
                "",
                f"A captured step of {name} with a static cache, called by hand: "
                f"{ms['by hand']:.3f} ms, its raw graph {ms['raw']:.3f}, eager {ms['eager']:.3f}.",
            ]
    return "\n".join([*lines, ""])
