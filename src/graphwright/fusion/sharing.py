"""Equal constants of several graphs of a model, such as folded weights, share memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import fx, nn

from ..calls.snapshots import same_bits
from ..errors import StrategyFailed
from .nodes import constant, is_added, roots, written_by
from .serialization import seen

# By what a tensor is like, then by identity; it is forgotten with the last graph that holds it.
_Like = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]
_Known = dict[_Like, weakref.WeakValueDictionary[int, torch.Tensor]]
_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def share_constants(graph: fx.GraphModule, module: nn.Module) -> None:
    """Put what other graphs of the module hold in the place of equal constants of this one.

    The model's own memory stays what it is, and so does what may be written to: what a result may
    be, by a caller, or what the graph itself writes to.
    """
    nodes = graph.graph.nodes
    try:
        shown = seen(graph)
    except StrategyFailed:
        return
    written = {root for node in nodes for each in written_by(node) for root in roots(each)}
    of_module = _KNOWN.setdefault(module, {})
    own = _memory([*module.parameters(), *module.buffers()])
    for node in nodes:
        tensor = constant(graph, node)
        if tensor is None or not is_added(node) or node.name in shown or node in written:
            continue
        memory = _memory([tensor])
        if not memory or memory <= own:
            continue
        like = tensor.dtype, tensor.device, tensor.shape, tensor.stride()
        known = of_module.setdefault(like, weakref.WeakValueDictionary())
        other = next((each for each in known.values() if same_bits(each, tensor)), None)
        if other is None:
            known[id(tensor)] = tensor
        else:
            setattr(graph, str(node.target), other)
            node.meta["val"] = other.detach()


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    strided = (t for t in tensors if t.layout is torch.strided and t.nbytes)
    return {t.untyped_storage().data_ptr() for t in strided}
