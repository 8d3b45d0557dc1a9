"""Our own operators: their bandwidth beside a copy's, and their time beside Inductor's.

    scripts/bench operators [--out DIR] [--quick]

Bandwidth is that of inputs of at least 64 MiB each, as a share of what Tensor.copy_ reaches with as
many bytes. At the sizes of models each operator runs beside torch.compile of its reference. Both
ways of a pair repeat the call on inputs of their own inside a CUDA graph, so that no launch counts,
and are replayed in turns; every sample is kept. Without a GPU the sizes are tiny, eager stands for
Inductor, and the figures mean nothing.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphwright.ops.fused import reference, registry
from graphwright.ops.fused.fused_operator import triton_works
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.timing import Call, in_turns, times

Row = dict[str, Any]
Args = tuple[Any, ...]

COPY_SHARE, INDUCTOR_RATIO = 0.85, 1.03
REPEATS, ROUNDS = 20, 60
# Bytes of an input whose bandwidth is taken, and at most of all inputs that a graph goes through.
LARGE, ALTOGETHER = 128 * 2**20, 2**31
COPIED_BY = 2 * 2**20
# Of MobileNetV3's convolutions: channels, size, window, stride, activation.
MOBILENET = (
    (16, 112, 3, 1, "relu"),
    (64, 112, 3, 2, "relu"),
    (72, 56, 5, 2, "relu"),
    (120, 28, 5, 1, "relu"),
    (240, 28, 3, 2, "hardswish"),
    (480, 14, 3, 1, "hardswish"),
    (672, 14, 5, 2, "hardswish"),
    (960, 7, 5, 1, "hardswish"),
)


@dataclass(frozen=True)
class Case:
    """An operator at a size: `make` gives its arguments."""

    name: str
    operator: str
    make: Callable[[], Args]


def _new(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(sizes, dtype=torch.float32, device=device).to(dtype)


def _norm(rows: int, width: int, dtype: torch.dtype, *, bias: bool) -> Args:
    x, residual = _new(rows, width, dtype=dtype), _new(rows, width, dtype=dtype)
    weight = _new(width, dtype=dtype)
    if bias:
        return x, residual, weight, _new(width, dtype=dtype), 1e-5
    return x, residual, weight, 1e-6


def _alone(rows: int, width: int, dtype: torch.dtype) -> Args:
    return _new(rows, width, dtype=dtype), *(_new(width, dtype=dtype) for _ in range(2)), 1e-5


def _biased(rows: int, width: int, dtype: torch.dtype, *more: str) -> Args:
    return _new(rows, width, dtype=dtype), _new(width, dtype=dtype), *more


def _halves(rows: int, width: int, dtype: torch.dtype) -> Args:
    return _new(rows, 2 * width, dtype=dtype).chunk(2, -1)


def _attention(
    batch: int, heads: int, length: int, dtype: torch.dtype, *, causal: bool = False
) -> Args:
    """Scores under a causal mask, or one that leaves a fourth of each sequence out."""
    scores = _new(batch, heads, length, length, dtype=dtype)
    mask = torch.ones(length, length, dtype=torch.bool, device=scores.device)
    if causal:
        return scores, mask.tril(), 0.125
    mask = mask[:1].expand(batch, 1, 1, length).contiguous()
    mask[..., length * 3 // 4 :] = False
    return scores, mask, 0.125


def _images(count: int, size: int, dtype: torch.dtype, *, last: bool) -> Args:
    form = torch.channels_last if last else torch.contiguous_format
    return _new(count, 64, size, size, dtype=dtype).to(memory_format=form), 3, 2, 1


def _planes(count: int, channels: int, size: int, dtype: torch.dtype) -> Args:
    return (_new(count, channels, size, size, dtype=dtype),)


def _halved(count: int, channels: int, size: int, dtype: torch.dtype) -> Args:
    """Images in channels_last whose pool is to be contiguous."""
    return *_pixels(count, channels, size, dtype), 2, 2, 0, True


def _channels(
    count: int, channels: int, size: int, dtype: torch.dtype, activation: str, *, sum_: bool
) -> Args:
    x, other = (
        _new(count, channels, size, size, dtype=dtype).to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    return x, _new(channels, dtype=dtype), other if sum_ else None, activation


def _pixels(count: int, channels: int, size: int, dtype: torch.dtype) -> Args:
    x = _new(count, channels, size, size, dtype=dtype)
    return (x.to(memory_format=torch.channels_last),)


def _gated(count: int, channels: int, size: int, dtype: torch.dtype, activation: str) -> Args:
    gate = _new(count, channels, 1, 1, dtype=dtype)
    return *_pixels(count, channels, size, dtype), gate, _new(channels, dtype=dtype), activation


def _depthwise(
    count: int, channels: int, size: int, window: int, stride: int, dtype: torch.dtype,
    activation: str,
) -> Args:  # fmt: skip
    """The weight lies as the kernel has it best, which is how fuse() lays it."""
    x = _new(count, channels, size, size, dtype=dtype).to(memory_format=torch.channels_last)
    weight = _new(window, window, channels, dtype=dtype).permute(2, 0, 1)[:, None]
    return x, weight, _new(channels, dtype=dtype), stride, window // 2, activation


def as_peers_have_it(case: Case, args: Args) -> Args:
    """The arguments for PyTorch: a convolution would copy a weight that lies as ours each time."""
    if case.operator != "depthwise_conv2d":
        return args
    return args[0], args[1].contiguous(), *args[2:]


def large_cases(nbytes: int) -> Iterator[Case]:
    """Each operator in each dtype, its inputs of so many bytes.

    But the convolution, which has more to do than to move.
    """
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        count = nbytes // dtype.itemsize
        kind = str(dtype).removeprefix("torch.")
        wide, narrow = min(4096, count), min(768, count)

        def case(name: str, make: Callable[..., Args], *args: Any, kind: str = kind, **named: Any):
            operator = name.split()[0]
            return Case(f"{name} {kind}", operator, lambda: make(*args, **named))

        rows, more = count // wide, math.ceil(count / narrow)
        yield case("add_layer_norm 4096", _norm, rows, wide, dtype, bias=True)
        yield case("add_layer_norm 768", _norm, more, narrow, dtype, bias=True)
        yield case("layer_norm 768", _alone, more, narrow, dtype)
        yield case("add_rms_norm 4096", _norm, rows, wide, dtype, bias=False)
        yield case("bias_gelu 4096", _biased, rows, wide, dtype, "none")
        yield case("bias_gelu tanh 3072", _biased, more // 4, narrow * 4, dtype, "tanh")
        yield case("bias_silu 4096", _biased, rows, wide, dtype)
        yield case("swiglu 4096 halves", _halves, rows, wide, dtype)
        side = 56 if nbytes >= LARGE else 4
        pictures = math.ceil(count / (64 * side**2))
        yield case("channel_activation hardswish", _channels, pictures, 64, side, dtype,
                   "hardswish", sum_=False)  # fmt: skip
        yield case("channel_activation sum relu", _channels, pictures, 64, side, dtype,
                   "relu", sum_=True)  # fmt: skip
        few = 14 if nbytes >= LARGE else 4
        thumbnails = math.ceil(count / (256 * few**2))
        yield case("channel_mean 256", _pixels, thumbnails, 256, few, dtype)
        yield case("channel_gate sigmoid", _gated, thumbnails, 256, few, dtype, "sigmoid")
        yield case("to_channels_last 64", _planes, pictures, 64, side, dtype)
        length = 1024 if nbytes >= LARGE else 32
        batch = max(1, count // length**2)
        yield case("masked_softmax 1024", _attention, batch, 1, length, dtype, causal=True)
        size = 112 if nbytes >= LARGE else 8
        images = math.ceil(count / (64 * size**2))
        yield case("relu_max_pool2d contiguous", _images, images, size, dtype, last=False)
        yield case("relu_max_pool2d channels_last", _images, images, size, dtype, last=True)
        yield case("relu_max_pool2d to contiguous", _halved, images, 64, size, dtype)


def model_cases(*, quick: bool) -> Iterator[Case]:
    """The calls of BERT base, GPT-2 small, a block like Llama's, and of images' networks."""
    half, brain = torch.float16, torch.bfloat16

    def case(model: str, operator: str, make: Callable[..., Args], *args: Any, **named: Any):
        sizes = "×".join(str(a) for a in args if isinstance(a, int))
        layout = " channels_last" if named.get("last") else ""
        return Case(f"{model} {operator} {sizes}{layout}", operator, lambda: make(*args, **named))

    for batch in (1,) if quick else (1, 8):
        rows, length = (4, 8) if quick else (batch * 128, 128)
        wide, hidden, inner = (64, 64, 96) if quick else (768, 4096, 14336)
        yield case("bert", "add_layer_norm", _norm, rows, wide, half, bias=True)
        yield case("bert", "layer_norm", _alone, rows, wide, half)
        yield case("bert", "bias_gelu", _biased, rows, 4 * wide, half, "none")
        yield case("bert", "masked_softmax", _attention, batch, 12, length, half)
        yield case("gpt2", "add_layer_norm", _norm, max(4, rows // 2), wide, half, bias=True)
        yield case("gpt2", "bias_gelu", _biased, max(4, rows // 2), 4 * wide, half, "tanh")
        yield case("gpt2", "masked_softmax", _attention, batch, 12, length // 2, half, causal=True)
        yield case("llama", "add_rms_norm", _norm, rows, hidden, brain, bias=False)
        yield case("llama", "swiglu", _halves, rows, inner, brain)
        yield case("llama", "bias_silu", _biased, rows, inner, brain)
        for channels, size, activation in ((960, 7, "hardswish"), (256, 56, "relu")):
            yield case("resnet" if activation == "relu" else "mobilenet", "channel_activation",
                       _channels, batch, channels, 4 if quick else size, half, activation,
                       sum_=activation == "relu")  # fmt: skip
        for channels, size in ((72, 28), (672, 14), (960, 7)):
            size = 4 if quick else size
            yield case("mobilenet", "channel_mean", _pixels, batch, channels, size, half)
            yield case("mobilenet", "channel_gate", _gated, batch, channels, size, half,
                       "hardsigmoid")  # fmt: skip
        yield case("classifier", "to_channels_last", _planes, 8 * batch, 32, 8 if quick else 56,
                   torch.float32)  # fmt: skip
        yield case("resnet", "to_channels_last", _planes, 4 * batch, 3, 8 if quick else 224, half)
        yield case("classifier", "relu_max_pool2d", _halved, 8 * batch, 64, 8 if quick else 56,
                   torch.float32)  # fmt: skip
        for channels, size in ((96, 56), (192, 28), (384, 14), (768, 7)):
            yield case("convnext", "depthwise_conv2d", _depthwise, batch,
                       8 if quick else channels, 7 if quick else size, 7, 1, half,
                       "none")  # fmt: skip
        for channels, size, window, stride, activation in MOBILENET:
            yield case("mobilenet", "depthwise_conv2d", _depthwise, batch,
                       8 if quick else channels, 7 if quick else size, window, stride, half,
                       activation)  # fmt: skip
        for last in (False, True):
            yield case(
                "resnet", "relu_max_pool2d", _images, batch, 8 if quick else 112, half, last=last
            )


def bytes_of(*values: Any) -> int:
    """Of all tensors, each element once."""
    leaves = pytree.tree_leaves(values)
    return sum(v.numel() * v.element_size() for v in leaves if isinstance(v, torch.Tensor))


def repeated(function: Callable[..., Any], sets: list[Args]) -> Call:
    """A call of the function on each set of arguments; on CUDA the replay of a graph of these."""

    def run() -> None:
        for args in sets:
            function(*args)

    if not torch.cuda.is_available():
        run()
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*sets[0])
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def kernel_used(case: Case, args: Args) -> bool:
    """Whether our kernel computes the call, rather than the reference."""
    operator = registry.OPERATORS[case.operator]
    return torch.cuda.is_available() and triton_works() and operator.applies(*args)


def bandwidth(case: Case, *, quick: bool) -> Row:
    """The operator beside a copy of as many bytes, read and written together."""
    args = case.make()
    operator = getattr(registry, case.operator)
    moved = bytes_of(args, operator(*args))
    # Rounded down to what copies best: the driver is slower by a third with some odd sizes.
    size = max(moved // 2 // COPIED_BY * COPIED_BY, 1)
    source = torch.empty(size, dtype=torch.uint8, device=args[0].device).random_()
    target = torch.empty_like(source)
    repeats = 2 if quick else 4
    ways = {
        "ours": repeated(operator, [args] * repeats),
        "copy": repeated(lambda: target.copy_(source), [()] * repeats),
    }
    found = in_turns(ways, 3 if quick else ROUNDS // 2)
    row = {"case": case.name, "kernel": kernel_used(case, args), "bytes": moved}
    row |= times(found, repeats)
    row["gb_per_s"] = moved / row["ours"]["median"] / 1e9
    row["copy_gb_per_s"] = 2 * size / row["copy"]["median"] / 1e9
    row["copy_share"] = statistics.median(
        (moved / ours) / (2 * size / copy)
        for ours, copy in zip(found["ours"], found["copy"], strict=True)
    )
    return row


def beside_inductor(case: Case, *, quick: bool) -> Row:
    """The operator beside its reference as Inductor compiles it."""
    torch._dynamo.reset()
    ours, plain = getattr(registry, case.operator), getattr(reference, case.operator)
    on_gpu = torch.cuda.is_available()
    other = torch.compile(plain, dynamic=False) if on_gpu else plain
    one = case.make()
    repeats = 2 if quick else REPEATS
    count = max(2, min(repeats, ALTOGETHER // bytes_of(one)))
    sets = [one, *(case.make() for _ in range(count - 1))]
    sets = [sets[n % count] for n in range(repeats)]
    row: Row = {"case": case.name, "kernel": kernel_used(case, one), "bytes": bytes_of(one)}
    row["difference"] = difference(ours(*one), plain(*one))
    peer = "inductor" if on_gpu else "eager"
    theirs = {id(args): as_peers_have_it(case, args) for args in sets}
    ways = {
        "ours": repeated(ours, sets),
        peer: repeated(other, [theirs[id(args)] for args in sets]),
    }
    found = in_turns(ways, 3 if quick else ROUNDS)
    row |= times(found, repeats)
    row["ratio"] = statistics.median(a / b for a, b in zip(found["ours"], found[peer], strict=True))
    return row


def difference(ours: Any, plain: Any) -> float:
    """The largest one from eager's result, over its largest value."""
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(plain), strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.abs().max()) for a, b in pairs)


def measure(*, quick: bool) -> Row:
    """All rows; each is printed when it is there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    large, models = [], []
    with torch.no_grad():
        for case in large_cases(2**14 if quick else LARGE):
            large.append(bandwidth(case, quick=quick))
            row = large[-1]
            print(f"{row['case']}: {row['gb_per_s']:.0f} GB/s, {row['copy_share']:.2f} of a copy's")
            sys.stdout.flush()
        for case in model_cases(quick=quick):
            models.append(beside_inductor(case, quick=quick))
            row = models[-1]
            print(
                f"{row['case']}: {row['ours']['median'] * 1e6:.2f} µs, "
                f"{row['ratio']:.3f} of its peer's",
                flush=True,
            )
    return {"environment": environment(device), "bandwidth": large, "models": models}


def targets(result: Row) -> list[Row]:
    """What is asked of the figures, and whether it holds."""
    found = []
    for row in result["bandwidth"]:
        asked = f"{row['case']}: {COPY_SHARE:.0%} of a copy's bandwidth"
        met = row["kernel"] and row["copy_share"] >= COPY_SHARE
        found.append({"target": asked, "figure": row["copy_share"], "met": met})
    for row in result["models"]:
        asked = f"{row['case']}: at most {INDUCTOR_RATIO:g} times Inductor's time"
        met = row["kernel"] and row["ratio"] <= INDUCTOR_RATIO
        found.append({"target": asked, "figure": row["ratio"], "met": met})
    return found


def to_text(result: Row) -> str:
    """The targets as a table."""
    rows = [
        (t["target"], f"{t['figure']:.3f}", "yes" if t["met"] else "NO") for t in result["targets"]
    ]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{asked:{width}}  {figure:>7}  {met}" for asked, figure, met in rows)


def to_markdown(result: Row) -> str:
    """Both parts as tables."""
    where = result["environment"]
    lines = [
        f"Our own operators ({where['gpu']}, PyTorch {where['torch']}), each call on inputs",
        f"of its own inside a CUDA graph: medians of {ROUNDS // 2} and {ROUNDS} turns.",
        "",
        "| operator, 128 MiB an input | GB/s | a copy's GB/s | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in result["bandwidth"]:
        speeds = f"{row['gb_per_s']:.0f} | {row['copy_gb_per_s']:.0f}"
        lines.append(f"| {row['case']} | {speeds} | {row['copy_share']:.2f} |")
    lines += [
        "",
        "| operator, as a model calls it | ours, µs | Inductor's fusion, µs | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in result["models"]:
        ours, other = (
            f"{row[way]['median'] * 1e6:.2f} ± {row[way]['spread'] * 1e6:.2f}"
            for way in ("ours", "inductor")
        )
        lines.append(f"| {row['case']} | {ours} | {other} | {row['ratio']:.2f} |")
    return "\n".join([*lines, ""])


def benchmark(out: Path, *, quick: bool) -> int:
    """Measure and write; the number of targets that are missed."""
    quick = quick or not torch.cuda.is_available()
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "operators",
        "commit": commit(),
        "quick": quick,
        **measure(quick=quick),
    }
    result["targets"] = targets(result)
    where = out / "operators.json"
    write(where, result)
    print(f"{to_text(result)}\nwrote {where}")
    return sum(not target["met"] for target in result["targets"])
