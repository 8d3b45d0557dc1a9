"""PyTorch's own modules, each built from small arguments, with inputs; and ways to change them.

`MODULES` has every class of `torch.nn`, `torch.ao.nn.quantized` and `.quantized.dynamic` that can
be called alone; `WITHOUT` says why another is missing. `changes()` finds for each attribute what
eager notices.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.nn.quantized as quantized
import torch.ao.nn.quantized.dynamic as dynamic
from torch import nn
from torch.utils import _pytree as pytree

Inputs = Callable[[], tuple[Any, ...]]
SPACES = {"nn": nn, "quantized": quantized, "dynamic": dynamic}
_OWN = frozenset(vars(nn.Module()))
_SEED = 5


class Between(nn.Module):
    """A quantized module between plain tensors."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        given = [torch.quantize_per_tensor(each, 0.05, 64, torch.quint8) for each in args]
        result: torch.Tensor = self.inner(*given)
        return result.dequantize()


@dataclass(frozen=True)
class Built:
    """How a module is built and called."""

    make: Callable[[], nn.Module]
    inputs: Inputs

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        made = self.make()
        if any("Lazy" in type(part).__name__ for part in made.modules()):
            made(*self.inputs())  # Which gives it its weights and its class.
        return made.eval()

    def args(self) -> tuple[Any, ...]:
        torch.manual_seed(_SEED)
        return self.inputs()


def _randn(*shapes: tuple[int, ...]) -> Inputs:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def _ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


_LINE, _IMAGE, _VOLUME = (1, 2, 6), (1, 2, 6, 6), (1, 2, 6, 6, 6)
_SPACE = {"1d": _LINE, "2d": _IMAGE, "3d": _VOLUME}
_ROWS, _SEQUENCE = (3, 4), (2, 3, 4)
# Arguments of a constructor by the beginning of its name, for modules of each dimension.
_BY_DIMENSION: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool": (3,),
    "AdaptiveMaxPool": (3,),
    "AvgPool": (2,),
    "BatchNorm": (2,),
    "CircularPad": (1,),
    "ConstantPad": (1, 0.5),
    "Conv": (2, 2, 2),
    "ConvTranspose": (2, 2, 2),
    "Dropout": (),
    "InstanceNorm": (2,),
    "LPPool": (2.0, 2),
    "LazyBatchNorm": (),
    "LazyConv": (2, 2),
    "LazyConvTranspose": (2, 2),
    "LazyInstanceNorm": (),
    "MaxPool": (2,),
    "ReflectionPad": (1,),
    "ReplicationPad": (1,),
    "ZeroPad": (1,),
}
# Those that keep a list that they are given.
_TAKE_LISTS = ("AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool", "LPPool", "MaxPool")
_WITHOUT_ARGUMENTS = (
    *("AlphaDropout", "CELU", "Dropout", "ELU", "FeatureAlphaDropout", "Flatten", "GELU", "GLU"),
    *("Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid"),
    *("Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus"),
    *("Softshrink", "Softsign", "Tanh", "Tanhshrink"),
)
# Those that take rows of numbers, and nothing else.
_OF_ROWS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_WITHOUT_ARGUMENTS, ()),
    "LogSoftmax": (1,),
    "Softmax": (1,),
    "Softmin": (1,),
    "Threshold": (0.1, 0.5),
    "Linear": (4, 2),
    "LazyLinear": (2,),
    "LayerNorm": (4,),
    "RMSNorm": (4,),
    "GroupNorm": (2, 4),
    "GRUCell": (4, 2),
    "LSTMCell": (4, 2),
    "RNNCell": (4, 2),
    "Unflatten": (1, (2, 2)),
}
_OF_IMAGES: dict[str, tuple[Any, ...]] = {
    "ChannelShuffle": (2,),
    "CrossMapLRN2d": (2,),
    "LocalResponseNorm": (2,),
    "PixelUnshuffle": (2,),
    "Softmax2d": (),
    "Unfold": ([2, 2],),
    "SyncBatchNorm": (2,),
}


def _of_torch() -> Iterator[tuple[str, Callable[[], nn.Module], Inputs]]:
    def make(name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
        # Lists are changed in place.
        return lambda: getattr(nn, name)(*copy.deepcopy(args), **kwargs)

    for prefix, args in _BY_DIMENSION.items():
        for count, (kind, shape) in enumerate(_SPACE.items(), 1):
            given = args
            if prefix in _TAKE_LISTS and count > 1:
                given = (*args[:-1], [args[-1]] * count)
            yield f"{prefix}{kind}", make(f"{prefix}{kind}", *given), _randn(shape)
    for name, args in _OF_ROWS.items():
        yield name, make(name, *args), _randn(_ROWS)
    for name, args in _OF_IMAGES.items():
        yield name, make(name, *args), _randn(_IMAGE)
    for name in ("RNN", "GRU", "LSTM"):
        yield name, make(name, 4, 2), _randn(_SEQUENCE)
    yield "PixelShuffle", make("PixelShuffle", 2), _randn((1, 4, 3, 3))
    yield "Fold", make("Fold", [4, 4], [2, 2]), _randn((1, 8, 9))
    yield "Upsample", lambda: nn.Upsample(size=[4, 4]), _randn(_IMAGE)
    yield "UpsamplingNearest2d", make("UpsamplingNearest2d", scale_factor=2.0), _randn(_IMAGE)
    yield "UpsamplingBilinear2d", make("UpsamplingBilinear2d", size=(4, 4)), _randn(_IMAGE)
    for count, shape in ((2, _IMAGE), (3, _VOLUME)):
        name = f"FractionalMaxPool{count}d"
        samples = torch.full((1, 2, count), 0.3)
        yield name, make(name, 2, output_size=2, _random_samples=samples), _randn(shape)
    for kind, shape in {"1d": (1, 2, 3), "2d": (1, 2, 3, 3), "3d": (1, 2, 2, 2, 2)}.items():
        yield f"MaxUnpool{kind}", make(f"MaxUnpool{kind}", 2), functools.partial(_pooled, shape)
    yield "Bilinear", make("Bilinear", 4, 4, 2), _randn(_ROWS, _ROWS)
    yield "CosineSimilarity", make("CosineSimilarity"), _randn(_ROWS, _ROWS)
    yield "PairwiseDistance", make("PairwiseDistance"), _randn(_ROWS, _ROWS)
    yield "Embedding", make("Embedding", 5, 3), lambda: (_ids(5, 2, 4),)
    yield "EmbeddingBag", make("EmbeddingBag", 5, 3), lambda: (_ids(5, 2, 4),)
    attention = make("MultiheadAttention", 4, 2, batch_first=True)
    yield "MultiheadAttention", attention, _randn(_SEQUENCE, _SEQUENCE, _SEQUENCE)
    yield from _transformers()
    yield from _losses()
    linear = nn.Linear(4, 4)
    yield "Sequential", lambda: nn.Sequential(copy.deepcopy(linear), nn.ReLU()), _randn(_ROWS)


def _pooled(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randn(shape)
    places = torch.arange(values[0, 0].numel()).view(shape[2:]).expand(shape).contiguous()
    return values, places


def _transformers() -> Iterator[tuple[str, Callable[[], nn.Module], Inputs]]:
    kind = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True}

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, activation=nn.functional.gelu, **kind)
        return nn.TransformerEncoder(layer, 2, nn.LayerNorm(4), enable_nested_tensor=False)

    yield (
        "TransformerEncoderLayer",
        lambda: nn.TransformerEncoderLayer(4, 2, activation=nn.functional.gelu, **kind),
        _randn(_SEQUENCE),
    )
    yield "TransformerEncoder", encoder, _randn(_SEQUENCE)
    yield (
        "TransformerDecoderLayer",
        lambda: nn.TransformerDecoderLayer(4, 2, **kind),
        _randn(_SEQUENCE, _SEQUENCE),
    )
    yield (
        "TransformerDecoder",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, **kind), 1),
        _randn(_SEQUENCE, _SEQUENCE),
    )
    yield (
        "Transformer",
        lambda: nn.Transformer(4, 2, 1, 1, **kind),
        _randn(_SEQUENCE, _SEQUENCE),
    )


def _losses() -> Iterator[tuple[str, Callable[[], nn.Module], Inputs]]:
    def make(name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
        return lambda: getattr(nn, name)(*args, **kwargs)

    both = _randn(_ROWS, _ROWS)
    for name in ("HuberLoss", "KLDivLoss", "L1Loss", "MSELoss", "PoissonNLLLoss", "SmoothL1Loss"):
        yield name, make(name), both

    def signs(*shapes: tuple[int, ...]) -> Inputs:
        return lambda: (*_randn(*shapes)(), torch.tensor([1.0, -1.0, 1.0]))

    yield "HingeEmbeddingLoss", make("HingeEmbeddingLoss"), signs((3,))
    yield "SoftMarginLoss", make("SoftMarginLoss"), signs((3,))
    yield "MarginRankingLoss", make("MarginRankingLoss"), signs((3,), (3,))
    yield "CosineEmbeddingLoss", make("CosineEmbeddingLoss"), signs(_ROWS, _ROWS)
    yield "TripletMarginLoss", make("TripletMarginLoss"), _randn(_ROWS, _ROWS, _ROWS)
    yield (
        "TripletMarginWithDistanceLoss",
        make("TripletMarginWithDistanceLoss", distance_function=nn.functional.pairwise_distance),
        _randn(_ROWS, _ROWS, _ROWS),
    )
    yield "BCELoss", make("BCELoss"), lambda: (torch.rand(3, 4), torch.rand(3, 4))
    yield "BCEWithLogitsLoss", make("BCEWithLogitsLoss"), lambda: (*both(),)
    yield "GaussianNLLLoss", make("GaussianNLLLoss"), lambda: (*both(), torch.rand(3, 4) + 0.1)

    def classes() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(3, 4), _ids(4, 3)

    for name in ("CrossEntropyLoss", "MultiMarginLoss", "NLLLoss"):
        yield name, make(name), classes
    yield "NLLLoss2d", make("NLLLoss2d"), lambda: (torch.randn(1, 4, 2, 2), _ids(4, 1, 2, 2))
    yield (
        "MultiLabelMarginLoss",
        make("MultiLabelMarginLoss"),
        lambda: (
            torch.randn(3, 4),
            _ids(4, 3, 4),
        ),
    )
    yield (
        "MultiLabelSoftMarginLoss",
        make("MultiLabelSoftMarginLoss"),
        lambda: (
            torch.randn(3, 4),
            _ids(2, 3, 4).float(),
        ),
    )
    yield (
        "CTCLoss",
        make("CTCLoss"),
        lambda: (
            torch.randn(5, 2, 4).log_softmax(2),
            torch.randint(1, 4, (2, 3)),
            torch.tensor([5, 5]),
            torch.tensor([3, 2]),
        ),
    )
    yield "LinearCrossEntropyLoss", make("LinearCrossEntropyLoss", 4, 5), classes
    yield (
        "AdaptiveLogSoftmaxWithLoss",
        make("AdaptiveLogSoftmaxWithLoss", 4, 6, [2, 4]),
        lambda: (
            torch.randn(3, 4),
            torch.tensor([0, 1, 0]),
        ),
    )


def _of_quantized() -> Iterator[tuple[str, Callable[[], nn.Module], Inputs]]:
    def between(name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
        return lambda: Between(getattr(quantized, name)(*args, **kwargs))

    def packed(name: str, *args: Any) -> Callable[[], nn.Module]:
        return lambda: Between(_with_weights(getattr(quantized, name)(*args)))

    for kind, shape in _SPACE.items():
        yield f"Conv{kind}", packed(f"Conv{kind}", 2, 2, 2), _randn(shape)
        yield f"ConvTranspose{kind}", packed(f"ConvTranspose{kind}", 2, 2, 2), _randn(shape)
        norm = between(f"InstanceNorm{kind}", 2, *_weights(2), 0.1, 10)
        yield f"InstanceNorm{kind}", norm, _randn(shape)
        if kind != "1d":
            yield f"BatchNorm{kind}", between(f"BatchNorm{kind}", 2), _randn(shape)
    yield "Linear", packed("Linear", 4, 2), _randn(_ROWS)
    yield "LayerNorm", between("LayerNorm", 4, *_weights(4), 0.1, 10), _randn(_ROWS)
    yield "GroupNorm", between("GroupNorm", 2, 2, *_weights(2), 0.1, 10), _randn(_IMAGE)
    yield "Dropout", between("Dropout"), _randn(_ROWS)
    yield "ELU", between("ELU", 0.1, 10), _randn(_ROWS)
    yield "Hardswish", between("Hardswish", 0.1, 10), _randn(_ROWS)
    yield "LeakyReLU", between("LeakyReLU", 0.1, 10), _randn(_ROWS)
    yield "PReLU", between("PReLU", 0.1, 10), _randn(_ROWS)
    yield "ReLU6", between("ReLU6"), _randn(_ROWS)
    yield "Sigmoid", between("Sigmoid", 0.01, 10), _randn(_ROWS)
    yield "Softmax", between("Softmax", 1, 0.01, 10), _randn(_ROWS)
    yield "MaxPool2d", between("MaxPool2d", 2), _randn(_IMAGE)
    yield "DeQuantize", lambda: nn.Sequential(_quantize(), quantized.DeQuantize()), _randn(_ROWS)
    yield "Quantize", lambda: nn.Sequential(_quantize(), quantized.DeQuantize()), _randn(_ROWS)

    def ids() -> tuple[torch.Tensor]:
        return (_ids(5, 2, 4),)

    yield "Embedding", functools.partial(_quantized_embedding, "Embedding"), ids
    yield "EmbeddingBag", functools.partial(_quantized_embedding, "EmbeddingBag"), ids


def _weights(count: int) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.ones(count)), nn.Parameter(torch.zeros(count))


def _quantize() -> nn.Module:
    made: nn.Module = quantized.Quantize(0.1, 10, torch.quint8)
    return made


def _with_weights(module: Any) -> nn.Module:
    """A quantized module with random weights, since a new one's are uninitialised."""
    weight, bias = module.weight(), module.bias()
    by = torch.quantize_per_tensor(torch.randn(weight.shape), 0.02, 0, torch.qint8)
    module.set_weight_bias(by, torch.randn_like(bias))
    module.scale = 0.1
    made: nn.Module = module
    return made


def _quantized_embedding(name: str) -> nn.Module:
    """An embedding with random weights."""
    scales, zeros = torch.full((5,), 0.1), torch.zeros(5)
    kind = {"axis": 0, "dtype": torch.quint8}
    weight = torch.quantize_per_channel(torch.rand(5, 4), scales, zeros, **kind)
    made: nn.Module = getattr(quantized, name)(5, 4, _weight=weight)
    return made


def _of_dynamic() -> Iterator[tuple[str, Callable[[], nn.Module], Inputs]]:
    def packed(name: str, *args: Any) -> Callable[[], nn.Module]:
        return lambda: _with_weights(getattr(dynamic, name)(*args))

    for kind, shape in _SPACE.items():
        yield f"Conv{kind}", packed(f"Conv{kind}", 2, 2, 2), _randn(shape)
        yield f"ConvTranspose{kind}", packed(f"ConvTranspose{kind}", 2, 2, 2), _randn(shape)
    yield "Linear", packed("Linear", 4, 2), _randn(_ROWS)
    for name in ("GRU", "LSTM"):
        yield name, functools.partial(_dynamic_of, getattr(nn, name)), _randn(_SEQUENCE)
    for name in ("GRUCell", "LSTMCell", "RNNCell"):
        yield name, functools.partial(_dynamic_of, getattr(nn, name)), _randn(_ROWS)


def _dynamic_of(kind: Any) -> nn.Module:
    """The quantized form of a recurrent module with random weights."""
    float_ = nn.Sequential(kind(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.ao.quantization.quantize_dynamic(float_, {kind})
    found: nn.Module = made[0]
    return found


def _table() -> dict[str, Built]:
    found = {}
    of = {"nn": _of_torch, "quantized": _of_quantized, "dynamic": _of_dynamic}
    for space, rows in of.items():
        for name, make, inputs in rows():
            if hasattr(SPACES[space], name):  # Some came with later versions of PyTorch.
                found[f"{space}.{name}"] = Built(make, inputs)
    return found


MODULES: dict[str, Built] = _table()
# Classes that cannot be called alone, and why.
WITHOUT = {
    **dict.fromkeys(
        ("nn.Container", "nn.Module", "nn.ModuleDict", "nn.ModuleList"), "it has no forward"
    ),
    **dict.fromkeys(("nn.ParameterDict", "nn.ParameterList"), "it has no forward"),
    **dict.fromkeys(("nn.RNNBase", "nn.RNNCellBase"), "it has no forward"),
    "nn.DataParallel": "it is for several GPUs",
    **dict.fromkeys(
        ("quantized.FXFloatFunctional", "quantized.FloatFunctional", "quantized.QFunctional"),
        "its forward raises: other methods are called",
    ),
    **dict.fromkeys(
        ("quantized.LSTM", "quantized.MultiheadAttention"), "only converting makes one"
    ),
}


def classes() -> set[str]:
    """All classes of modules in the three packages."""
    return {
        f"{space}.{name}"
        for space, held in SPACES.items()
        for name, value in vars(held).items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    }


@dataclass(frozen=True)
class Change:
    """Another value of one attribute.

    Attributes:
        module: the module's name in `MODULES`.
        path: of the part that has the attribute.
        key: the attribute.
        kind: "same type", "another type" or "in place".
        number: which of the values for it.
        raises: whether eager raises with it.
    """

    module: str
    path: str
    key: str
    kind: str
    number: int
    raises: bool

    def __str__(self) -> str:
        where = f"{self.path}." if self.path else ""
        return f"{self.module}:{where}{self.key} {self.kind}{' (raises)' if self.raises else ''}"

    def apply(self, model: nn.Module) -> None:
        """Make the change to a model that was built as `MODULES` says."""
        part = model.get_submodule(self.path)
        values = [v for kind, v in candidates(vars(part)[self.key]) if kind == self.kind]
        made = values[self.number]
        if isinstance(vars(part)[self.key], torch.ScriptObject):
            made = vars(MODULES[self.module].model(seed=1).get_submodule(self.path))[self.key]
        if self.kind == "in place":
            made(vars(part)[self.key])
        else:
            setattr(part, self.key, made)


_WORDS = (
    *("none", "sum", "mean", "max", "tanh", "relu", "reflect", "circular", "replicate", "constant"),
    *("bilinear", "nearest-exact", "nearest", "zeros", "LSTM", "GRU", "RNN_TANH", "xyz"),
)


def _other(value: Any) -> Any:
    """A value of the same type that is not equal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 + 0.25
    return "xyz" if isinstance(value, str) else value


def candidates(value: Any) -> list[tuple[str, Any]]:
    """Values that may take the place of another, by kind.

    What changes it in place is a function.
    """
    same, other = "same type", "another type"
    if isinstance(value, bool):
        return [(same, not value), (other, int(not value)), (other, None), (other, "xyz")]
    if isinstance(value, int):
        more = [(same, n) for n in (value + 1, value + 2, -value, 0, 1) if n != value]
        return [
            *more,
            (other, float(value)),
            (other, [value + 1] * 2),
            (other, value + 0.5),
            (other, "xyz"),
            (other, None),
        ]
    if isinstance(value, float):
        more = [(same, n) for n in (value * 2 + 0.25, value * 1e3 + 3, 0.0, -1.0, 1e9)]
        return [*more, (other, int(value) + 2), (other, "xyz"), (other, None)]
    if isinstance(value, str):
        return [*((same, word) for word in _WORDS if word != value), (other, 3), (other, None)]
    if isinstance(value, tuple):
        changed = [tuple(map(_other, value)), tuple(value) * 2, (0,) * len(value)]
        return [
            *((same, type(value)(n) if type(value) is tuple else n) for n in changed),
            (other, [*map(_other, value)]),
            (other, 2),
            (other, None),
        ]
    if isinstance(value, list):
        return [
            (same, [*map(_other, value)]),
            (same, [*value, *value]),
            (same, [None] * len(value)),
            (other, tuple(map(_other, value))),
            (other, None),
            ("in place", _change_item),
            ("in place", list.clear),
        ]
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return [
            (same, _half_of(value)),
            (other, None),
            ("in place", lambda t: t.copy_(_half_of(t))),
        ]
    if isinstance(value, torch.Tensor):
        return [
            (same, value.detach() * 0.5),
            (same, value.detach() * 0 + 0.9),
            (other, None),
            (other, 2.0),
            ("in place", lambda tensor: tensor.detach().mul_(0.5)),
        ]
    if isinstance(value, torch.dtype):
        kinds = (torch.float16, torch.qint8, torch.quint8, torch.float32, torch.qint32)
        return [*((same, kind) for kind in kinds if kind != value), (other, None), (other, 3)]
    if isinstance(value, torch.ScriptObject):
        return [(same, None), (other, None)]  # The first stands for another module's.
    if isinstance(value, dict):
        return [(same, {}), (other, None), ("in place", dict.clear)]
    if value is None:
        made = (2, 0.5, True, (2, 2), [3, 3], torch.ones(4), torch.ones(2), "xyz")
        return [(other, each) for each in made]
    if callable(value):
        mine = functools.partial(torch.mul, other=-0.5)
        return [
            (same, torch.tanh),
            (same, torch.sigmoid),
            (same, _halved),
            (other, _halved),
            (other, mine),
            (other, _Scaled(3.0)),
            (other, None),
        ]
    return [(other, None), (other, 2)]


def _half_of(tensor: torch.Tensor) -> torch.Tensor:
    """A quantized tensor of half the values."""
    by, zero = tensor.q_scale(), tensor.q_zero_point()
    return torch.quantize_per_tensor(tensor.dequantize() / 2, by, zero, tensor.dtype)


def _change_item(items: list[Any]) -> None:
    items[0] = None if isinstance(items[0], torch.Tensor) else _other(items[0])


def _halved(*args: torch.Tensor) -> torch.Tensor:
    return args[0] / 2


class _Scaled:
    """A callable object."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return args[0] * self.by


def places(name: str) -> Iterator[tuple[str, str, Any]]:
    """The attributes of a module and of parts that have no row of their own: path, key, value."""
    model = MODULES[name].model()
    known = {re.sub(r"^.*\.", "", each) for each in MODULES}
    for path, part in model.named_modules():
        inner = path and not name.startswith(("quantized.", "dynamic."))
        if isinstance(part, Between) or (inner and type(part).__name__ in known):
            continue
        for key, value in vars(part).items():
            if key not in _OWN:
                yield path, key, value


def run(model: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The model's result without gradients, and its arguments then; or what it raised."""
    torch.manual_seed(_SEED)
    given = copy.deepcopy(args)
    with torch.no_grad():
        try:
            return model(*given), given
        except Exception as error:
            return error


def differ(a: Any, b: Any) -> bool:
    """Whether two results differ in structure, kinds or values."""
    mine, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    if spec != other_spec:
        return True
    return any(_leaves_differ(x, y) for x, y in zip(mine, others, strict=True))


def _leaves_differ(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is not type(b) or bool(a != b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    return not torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def _repeats(result: Any, model: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether eager gives a result again: with wrong sizes it may read memory of others."""
    for _ in range(3):
        scratch = [torch.full((64,), float(n)) for n in range(32)]
        del scratch
        if differ(run(model, args), result):
            return False
    return True


@functools.cache
def changes(name: str) -> tuple[Change, ...]:
    """Those changes of a module's attributes that eager notices, one of each kind an attribute.

    Where no value gives another result, one is taken with which eager raises.
    """
    built = MODULES[name]
    args = built.args()
    before = run(built.model(), args)
    if isinstance(before, Exception):
        raise AssertionError(f"{name} cannot be called") from before
    found: dict[tuple[str, str, str], Change] = {}
    for path, key, value in places(name):
        if (name, key) == ("nn.LSTM", "hidden_size"):
            continue  # oneDNN reads beyond the weights then, and gives whatever lies there.
        counts: dict[str, int] = {}
        for kind, _ in candidates(value):
            number = counts.get(kind, 0)
            counts[kind] = number + 1
            known = found.get((path, key, kind))
            if known is not None and not known.raises:
                continue
            change, model = Change(name, path, key, kind, number, False), built.model()
            try:
                change.apply(model)
            except Exception:  # PyTorch takes no such value.
                continue
            now = run(model, args)
            if isinstance(now, Exception):
                raising = Change(name, path, key, kind, number, True)
                found.setdefault((path, key, kind), raising)
            elif differ(now, before) and _repeats(now, model, args):
                found[path, key, kind] = change
    return tuple(found.values())
