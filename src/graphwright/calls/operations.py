"""Facts about ATen operations: what they write to, draw from, and tell the host."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

# Batch norms update their running statistics in training, and most of their schemas hide it; so
# does cuDNN's dropout between the layers of an RNN with its random state.
_STATISTICS = ("running_mean", "running_var", "dropout_state")
_WITHOUT_UPDATE = ("backward", "functional", "no_training", "no_update")
# Their result is PyTorch's own and stays: the random state of cuDNN's dropout.
_KEPT = ("_cudnn_init_dropout_state",)
# Arguments that say whether it is training.
_MODE = ("training", "train")

# Functions that give a tensor's values to Python without an operation that a dispatch mode sees.
HOST_READS = {
    "tolist": "Tensor.tolist()",
    "numpy": "Tensor.numpy()",
    "__array__": "conversion to a NumPy array",
    "__dlpack__": "DLPack export",
    "__repr__": "printing a tensor",
    "__format__": "formatting a tensor",
}
# Functions that make a tensor of Python's values.
FROM_DATA = ("tensor", "as_tensor", "asarray", "new_tensor")
# Dtypes of indices that select elements by a mask.
MASKS = (torch.bool, torch.uint8)

# Types of arguments that hold no others; there are more.
_PLAIN = (int, float, bool, complex, str, type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, nn.Parameter)
_LEAVES: frozenset[type] = frozenset((*_PLAIN, *_OF_TORCH))

# Position and name of an operation's argument.
Argument = tuple[int, str]


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def leaves(tree: Any) -> list[Any]:
    """The leaves of an operation's arguments or results, as `pytree.tree_leaves` gives them.

    That takes ten times as long, and each operation that a mode sees needs them.
    """
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    cls = type(value)
    if cls is torch.Tensor or cls in _LEAVES:
        found.append(value)
    elif cls is tuple or cls is list:
        for each in value:
            _collect(each, found)
    elif cls is dict:
        for each in value.values():
            _collect(each, found)
    else:
        found += pytree.tree_leaves(value)


def generator_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Generator:
    """The generator that a random operation draws from: its argument, else its device's own."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = next((t.device for t in tensors((args, kwargs))), None) or kwargs.get("device")
    device = torch.device("cpu" if device is None else device)
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def default_generators(device: torch.device) -> list[torch.Generator]:
    """The generators that are used where none is named: the host's and the device's."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@functools.cache
def _written_arguments(func: Any) -> tuple[list[Argument], list[Argument], list[Argument]]:
    """Arguments that it always writes to, that it writes to in training, and that say which."""
    arguments = list(enumerate(func._schema.arguments))
    always = [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]
    hidden = [(i, a.name) for i, a in arguments if a.name in _STATISTICS and not a.alias_info]
    mode = [(i, a.name) for i, a in arguments if a.name in _MODE]
    quiet = any(part in func._opname for part in _WITHOUT_UPDATE)
    return always, [] if quiet else hidden, mode


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""

    def value(argument: Argument) -> Any:
        index, name = argument
        return args[index] if index < len(args) else kwargs.get(name)

    always, in_training, mode = _written_arguments(func)
    if in_training and not any(value(argument) is False for argument in mode):
        always = always + in_training
    return [tensor for argument in always for tensor in tensors(value(argument))]


def announced(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that it writes to according to its schema; autograd counts a new version."""
    always, _, _ = _written_arguments(func)
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in always]
    found = [tensor for value in given for tensor in tensors(value)]
    return [t for t in found if t.layout is torch.strided and not t.is_nested]


def is_kept(func: Any) -> bool:
    """Whether PyTorch itself keeps what an operation returns, for all later calls."""
    return func._opname in _KEPT


def one_hot(index: torch.Tensor, classes: int) -> torch.Tensor:
    """F.one_hot without the check of its values, which it makes on the CPU only."""
    result = torch.zeros(*index.shape, classes, dtype=torch.long, device=index.device)
    return result.scatter_(-1, index.unsqueeze(-1), 1)


def has_fixed_shape(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the result's shape does not depend on values in this call of an operation."""
    if func._opname == "index":
        return not any(t is not None and t.dtype in MASKS for t in args[1])
    return func._opname == "repeat_interleave" and kwargs.get("output_size") is not None


@functools.cache
def _reads(func: Any) -> tuple[bool, bool]:
    """Whether an operation always tells the host values, and whether it may by a shape."""
    always = torch.Tag.data_dependent_output in func.tags
    return always, torch.Tag.dynamic_output_shape in func.tags


def reads_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host has to see values of the tensors in this call of an operation."""
    always, may = _reads(func)
    return always or (may and not has_fixed_shape(func, args, kwargs))
