"""A graph of operations as JSON and tensors, and back; reading executes and imports nothing.

What can be named in it are PyTorch's operations of tensors and our own, with plain values.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import StrategyFailed
from .nodes import constant, finished

Json = Any
_NAMESPACES = ("aten", "mkldnn", "graphwright")
# They are operations too, and reach beyond tensors.
_REFUSED = ("from_file", "save", "print", "warn")
_PACKED_CONVOLUTION = "mkldnn._convolution_pointwise"
# The kinds of plain objects that a graph's arguments name: by their names in torch.
_NAMED: dict[str, type] = {
    "dtype": torch.dtype,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}


def stored(graph: fx.GraphModule) -> tuple[list[Json], dict[str, torch.Tensor]]:
    """The nodes of a graph, and the tensors that it holds, by name.

    Raises:
        StrategyFailed: it holds what cannot be written down.
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
        for entry in nodes:
            name, op = str(entry["name"]), entry["op"]
            if op == "placeholder":
                node = graph.placeholder(name)
            elif op == "get_attr":
                tensor = tensors[name].to(device)
                if "packed" in entry:
                    how = [[int(each) for each in given] for given in entry["packed"][:3]]
                    groups, sizes = int(entry["packed"][3]), [int(n) for n in entry["packed"][4]]
                    reorder = torch.ops.mkldnn._reorder_convolution_weight
                    tensor = reorder(tensor, *how, groups, sizes)
                module.register_buffer(name, tensor, persistent=False)
                node = graph.get_attr(name)
                if "packed" in entry:
                    node.meta["packed"] = entry["packed"]
            elif op == "call_function":
                args, kwargs = (_value(entry[n], known, device) for n in ("args", "kwargs"))
                getitem = entry["target"] == "getitem"
                target = operator.getitem if getitem else _operation(str(entry["target"]))
                node = graph.call_function(target, args, kwargs)
            elif op == "output":
                node = graph.output(_value(entry["args"], known, device)[0])
            else:
                raise ValueError(f"there is no {op} of nodes")
            known[name] = node
        return finished(fx.GraphModule(module, graph))
    except StrategyFailed:
        raise
    except Exception as error:
        raise StrategyFailed(f"the stored graph makes no sense: {error!r}") from error


def _operation(name: str) -> Callable[..., Any]:
    """An operation of tensors by its name."""
    parts = name.split(".")
    found: Any = None
    if len(parts) == 3 and parts[0] in _NAMESPACES and parts[1].strip("_") not in _REFUSED:
        qualified = f"{parts[0]}::{parts[1]}" + ("" if parts[2] == "default" else f".{parts[2]}")
        # What TorchScript alone knows as an operation may do anything.
        if qualified in _known():
            found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2], None)
    if not isinstance(found, torch._ops.OpOverload):
        raise StrategyFailed(
            f"{name!r} is no operation of tensors that may stand in a stored graph"
        )
    return found


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
    raise StrategyFailed(f"the graph holds {value!r:.80}, which cannot be written down")


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
    found = getattr(torch, inner)
    if not isinstance(found, _NAMED[kind]):
        raise ValueError(f"{inner} is no {kind}")
    return found
