"""A graph of operations as JSON and tensors, and back; reading executes and imports nothing.

Only PyTorch's tensor operations and our own can be named in it, with plain values. Some of
PyTorch's operations trust their arguments. Those that are known to check them are listed here;
`unlisted` names the others in a graph.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from ..errors import StrategyFailed
from .nodes import constant, finished

Json = Any
_NAMESPACES = ("aten", "mkldnn", "graphwright")
# They are operations too, and reach beyond tensors, or beyond the memory of one.
_REFUSED = re.compile(
    "from_file|save|print|warn|.*unsafe.*|.*as_strided.*|_?reshape_alias.*|set|set_.*|resize.*|"
    ".*storage.*|.*nested_view.*|.*from_blob.*|frombuffer"
)
# PyTorch's that check what they are given: what inference is made of.
_NAMES = """
abs acos adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d add addbmm addcdiv
addcmul addmm addmm_activation alias all amax amin and any arange argmax argmin argsort asin
atan atan2 avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bitwise_and bitwise_not
bitwise_or bmm cat ceil celu chunk clamp clamp_max clamp_min clone concat constant_pad_nd
contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d copy cos cosh
cudnn_convolution_add_relu cudnn_convolution_relu cummax cumprod cumsum detach diagonal div
dot dropout einsum elu embedding empty empty_like empty_strided eq erf exp expand expand_as
expm1 fill flatten flip floor floor_divide fmod full full_like gather ge gelu glu group_norm
gru gt hardsigmoid hardswish hardtanh index index_select instance_norm interpolate isfinite
isinf isnan layer_norm le leaky_relu lift_fresh lift_fresh_copy linear log log10 log1p log2
log_sigmoid log_softmax logical_and logical_not logical_or logical_xor logsumexp lstm lt
masked_fill matmul max max_pool1d max_pool2d maximum mean meshgrid min minimum mish mm movedim
mul mv narrow native_group_norm native_layer_norm ne neg new_empty new_empty_strided new_full
new_ones new_zeros norm one_hot ones ones_like or outer pad permute pixel_shuffle pow prelu
prod reciprocal reflection_pad2d relu relu6 remainder repeat repeat_interleave
replication_pad2d reshape rms_norm rnn_relu rnn_tanh roll rot90 round rsqrt rsub scalar_tensor
scaled_dot_product_attention scatter scatter_add select selu sigmoid sign silu sin sinh slice
softmax softmax_backward softplus softsign sort split split_with_sizes sqrt square squeeze
stack std sub sum swapaxes t tan tanh tensor_split tile to to_copy topk transpose tril triu
true_divide type_as unbind unflatten unfold unsqueeze upsample_bicubic2d upsample_bilinear2d
upsample_nearest2d var var_mean view view_as where xor zeros zeros_like
"""
_LISTED = frozenset(_NAMES.split())
_PACKED_CONVOLUTION = "mkldnn._convolution_pointwise"
# The kinds of plain objects that a graph's arguments name: by their names in torch.
_NAMED: dict[str, type] = {
    "dtype": torch.dtype,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}
# Made of other operations, and always memory of their own.
_FRESH = frozenset(
    f"aten::{name}"
    for name in ("linear", "matmul", "conv1d", "conv2d", "conv3d", "layer_norm", "group_norm")
)


def stored(graph: fx.GraphModule) -> tuple[list[Json], dict[str, torch.Tensor]]:
    """The nodes of a graph, and the tensors that it holds, by name.

    Raises:
        StrategyFailed: it holds what cannot be saved.
    """
    nodes, tensors = [], {}
    for node in graph.graph.nodes:
        entry: dict[str, Json] = {"name": node.name, "op": node.op}
        if node.op == "get_attr":
            tensor = constant(graph, node)
            if tensor is None:
                raise StrategyFailed(f"the graph holds {node.target}, which is no tensor")
            packed = tensor.layout is torch._mkldnn  # type: ignore[attr-defined]  # torch's stubs leave it out
            if packed:
                entry["packed"] = node.meta.get("packed") or _packing(node)
            tensors[node.name] = tensor.to_dense() if packed else tensor
        elif node.op == "call_function":
            entry["target"] = "getitem" if node.target is operator.getitem else str(node.target)
            if entry["target"] != "getitem":
                _operation(entry["target"])
        if node.op in ("call_function", "output"):
            entry["args"], entry["kwargs"] = _written(node.args), _written(dict(node.kwargs))
        nodes.append(entry)
    return nodes, tensors


def seen(graph: fx.GraphModule) -> frozenset[str]:
    """The tensors that a graph holds and whose memory its results may be.

    Raises:
        StrategyFailed: such memory is held in several layouts, which would come back apart.
    """
    found = _may_be_results(graph)
    held = {node.name: constant(graph, node) for node in graph.graph.nodes if node.op == "get_attr"}
    places = {
        name: (t.untyped_storage().data_ptr(), (t.storage_offset(), t.shape, t.stride(), t.dtype))
        for name, t in held.items()
        if t is not None and t.layout is torch.strided and t.nbytes
    }
    shown = {places[name][0] for name in found if name in places}
    beside = {name: place for name, place in places.items() if place[0] in shown}
    if len(set(beside.values())) > len({memory for memory, _ in beside.values()}):
        raise StrategyFailed("a result may be memory that the graph holds in several layouts")
    return frozenset(found | set(beside))


def _may_be_results(graph: fx.GraphModule) -> set[str]:
    """The tensors that a graph holds and that operations may hand on to its results."""
    found, looked = set(), set()
    todo = [node for end in graph.graph.nodes if end.op == "output" for node in end.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in looked:
            continue
        looked.add(node)
        if node.op == "get_attr":
            found.add(node.name)
        elif node.target is operator.getitem or _may_alias(node.target):
            todo += node.all_input_nodes
    return found


def _may_alias(operation: Any) -> bool:
    """Whether a result may be an argument: by its schema, or as it is made of other operations."""
    if not isinstance(operation, torch._ops.OpOverload):
        return True
    if any(argument.alias_info is not None for argument in operation._schema.arguments):
        return True
    if operation._schema.name in _FRESH:
        return False
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key)


def read(
    nodes: Sequence[Json], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> fx.GraphModule:
    """The graph of which `stored` has made these, on a device.

    Raises:
        StrategyFailed: the nodes make no graph, or name what is no operation of tensors.
    """
    module, graph = torch.nn.Module(), fx.Graph()
    known: dict[str, fx.Node] = {}
    try:
        for number, entry in enumerate(nodes):
            # FX makes Python of names: none of the file's gets into it.
            name, op, own = str(entry["name"]), entry["op"], f"value_{number}"
            if op == "placeholder":
                node = graph.placeholder(own)
            elif op == "get_attr":
                tensor = tensors[name].to(device)
                if "packed" in entry:
                    tensor = _packed(tensor, entry["packed"])
                module.register_buffer(own, tensor, persistent=False)
                node = graph.get_attr(own)
                if "packed" in entry:
                    node.meta["packed"] = entry["packed"]
            elif op == "call_function":
                args, kwargs = (_value(entry[n], known, device) for n in ("args", "kwargs"))
                node = graph.call_function(_target(entry["target"], kwargs), args, kwargs)
            elif op == "output":
                node = graph.output(_value(entry["args"], known, device)[0])
            else:
                raise ValueError(f"there is no {op} of nodes")
            known[name] = node
        return finished(fx.GraphModule(module, graph))
    except StrategyFailed:
        raise
    except Exception as error:
        raise StrategyFailed(f"the stored graph is damaged: {error!r}") from error


def _packed(tensor: torch.Tensor, given: Any) -> torch.Tensor:
    """A weight in the layout that oneDNN has for it; see `_packing`."""
    how = [[int(each) for each in several] for several in given[:3]]
    groups, sizes = int(given[3]), [int(n) for n in given[4]]
    # oneDNN divides by them, and does not ask.
    if min(*how[1], *how[2], groups, *sizes) < 1 or min(how[0]) < 0:
        raise ValueError("a convolution has no such steps or sizes")
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(tensor, *how, groups, sizes)
    return packed


def _target(name: Json, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """What a node calls, if it takes these keyword arguments."""
    target: Any = operator.getitem if name == "getitem" else _operation(str(name))
    formal = {a.name for a in target._schema.arguments} if kwargs else set()
    if not set(kwargs) <= formal:
        raise ValueError(f"{target} has no arguments {', '.join(set(kwargs) - formal)}")
    return cast("Callable[..., Any]", target)


def _operation(name: str) -> Callable[..., Any]:
    """An operation of tensors by its name."""
    parts = name.split(".")
    found: Any = None
    refused = len(parts) == 3 and parts[0] == "aten" and _REFUSED.fullmatch(parts[1].strip("_"))
    if len(parts) == 3 and parts[0] in _NAMESPACES and not refused:
        qualified = f"{parts[0]}::{parts[1]}" + ("" if parts[2] == "default" else f".{parts[2]}")
        # What TorchScript alone knows as an operation may do anything.
        if qualified in _known():
            found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2], None)
    if not isinstance(found, torch._ops.OpOverload):
        raise StrategyFailed(
            f"{name!r} is no operation of tensors that may stand in a stored graph"
        )
    return found


def unlisted(nodes: Sequence[Json]) -> list[str]:
    """The operations of PyTorch's that a graph names and of which nothing is known."""
    named = {str(entry.get("target", "getitem")) for entry in nodes}
    parts = [name.split(".") for name in sorted(named)]
    return [
        ".".join(each)
        for each in parts
        if each[0] != "graphwright" and each[0] != "getitem" and not _is_listed(each)
    ]


def _is_listed(parts: Sequence[str]) -> bool:
    if parts[0] == "mkldnn":
        return parts[1:2] == ["_convolution_pointwise"]
    return parts[0] == "aten" and len(parts) == 3 and parts[1].strip("_") in _LISTED


@functools.cache
def _known() -> frozenset[str]:
    """All operations that PyTorch dispatches; ours are among them when this is asked."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def _packing(node: fx.Node) -> Json:
    """How oneDNN is to lay a weight out: padding, stride, dilation, groups, the input's sizes."""
    for user in node.users:
        if str(user.target).startswith(_PACKED_CONVOLUTION):
            first = user.args[0]
            assert isinstance(first, fx.Node)
            start = 4 if str(user.target).endswith("binary") else 3
            padding, stride, dilation, groups = user.args[start : start + 4]
            return _written([padding, stride, dilation, groups, list(first.meta["val"].shape)])
    raise StrategyFailed("the graph holds a packed tensor that no convolution uses")


def _written(value: Any) -> Json:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_written(each) for each in value]}
    if isinstance(value, list):  # FX's own lists and dictionaries too.
        return [_written(each) for each in value]
    if isinstance(value, dict):
        return {"dict": {str(key): _written(each) for key, each in value.items()}}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, torch.device):
        return {"device": value.type}
    for kind, named in _NAMED.items():
        if isinstance(value, named):
            return {kind: str(value).removeprefix("torch.")}
    raise StrategyFailed(f"the graph holds {value!r:.80}, which cannot be saved")


def _value(given: Json, known: Mapping[str, fx.Node], device: torch.device) -> Any:
    if isinstance(given, list):
        return [_value(each, known, device) for each in given]
    if not isinstance(given, dict):
        return given
    ((kind, inner),) = given.items()
    if kind == "node":
        return known[inner]
    if kind == "tuple":
        return tuple(_value(each, known, device) for each in inner)
    if kind == "dict":
        return {key: _value(each, known, device) for key, each in inner.items()}
    if kind == "float":
        return float.fromhex(inner)
    if kind == "device":
        return device if inner == device.type else torch.device(inner)
    found = vars(torch).get(inner)  # An attribute might be imported for being asked for.
    if not isinstance(found, _NAMED[kind]):
        raise ValueError(f"{inner} is no {kind}")
    return found
