"""Reads: what the operations of a run take from outside, and whether anybody watches it.

A graph reads tensors where they were when it was recorded. Those that the module or function
reaches are watched (`calls.watch`). A run shows, operation by operation, what else is read: a
tensor that the code gets from a place that no walk over the module finds. `explain` watches that
place from then on (`calls.holders`), or refuses the call.

Dispatch shows the arguments of PyTorch's operations and no more: neither those of Triton kernels
and of launches by ctypes, nor what an operator in C++ reads by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..calls.holders import Held, everything, holders_of, thaw
from ..calls.leaves import without_memory
from ..calls.operations import leaves
from ..calls.signature import in_backward
from ..calls.watch import ModuleWatch
from ..errors import CaptureError, current_frame, current_place
from .composition import Parts, inside_part
from .random_state import Seeding

_REMEDY = "Pass it as an argument, or hold it in an attribute of the module."
# Arguments of operations that are the state of a random generator: PyTorch keeps it in C++.
_STATES = ("dropout_state",)
# Arguments that say whether it draws from that: a share that is dropped, and whether it trains.
_DRAWS = ("dropout", "train")
# Classes of objects that say with whom to communicate and how, and hold no tensors.
_WITHOUT_TENSORS = "__torch__.torch.classes.c10d."
# What holds constants in C++.
_SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)


@dataclass(eq=False, slots=True)
class OutsideRead:
    """Something from outside that an operation took.

    Attributes:
        value: a tensor, or an object of TorchScript's.
        operation: the first that took it.
        place: `file:line` of the user's code; None where the module was seen to hold it.
        steady: whether the run before it used the same, or made it.
        is_state: whether it is the state of a random generator that PyTorch keeps in C++.
        by_script: whether the user's code there names a function of TorchScript's.
    """

    value: Any
    operation: str
    place: str | None
    steady: bool = True
    is_state: bool = False
    by_script: bool = False


class Reads:
    """Notes what a run's operations take and the run did not make.

    Args:
        held: tells whether the module was seen to hold something.
    """

    def __init__(self, held: Callable[[Any], bool] = lambda value: False) -> None:
        self._held = held
        self._found: dict[Any, OutsideRead] = {}
        # Views of memory from outside that the run made; kept, so that no identity is reused.
        self._views: dict[int, torch.Tensor] = {}
        self._constants: dict[int, torch.UntypedStorage] = {}
        self._storages: set[int] = set()  # of the tensors that were found
        self._objects: dict[Any, torch.ScriptObject] = {}  # that operations gave

    def before(
        self, func: Any, given: tuple[Any, Any], is_made: Callable[[torch.Tensor], bool]
    ) -> None:
        """Note what an operation is about to take.

        Args:
            func: the operation.
            given: its arguments, by position and by name.
            is_made: whether the run made a tensor's memory.
        """
        for value in leaves(given):
            key = self._key_of_new(func, value, is_made)
            if key is None or inside_part():
                continue
            place = None if self._held(value) else current_place()
            state = any(_argument(func, given, name) is value for name in _STATES)
            if state and not all(_argument(func, given, name) for name in _DRAWS):
                continue  # It is passed, and not used.
            self._found[key] = OutsideRead(
                value, str(func), place, is_state=state, by_script=_names_script()
            )
            if isinstance(value, torch.Tensor):
                self._storages.add(value.untyped_storage()._cdata)

    def _key_of_new(self, func: Any, value: Any, is_made: Callable[[torch.Tensor], bool]) -> Any:
        """What something from outside is known by; None for what is known, or made by the run."""
        if isinstance(value, torch.Tensor):
            if id(value) in self._found or id(value) in self._views or _lacks_memory(value):
                return None
            if is_made(value) or self._is_constant(func, value) or self._is_saved(value):
                return None
            return id(value)
        if isinstance(value, torch.ScriptObject):
            key = _identity(value)
            if key in self._found or key in self._objects:
                return None
            named = str(value._type().qualified_name())
            return None if named.startswith(_WITHOUT_TENSORS) else key
        return None

    def after(self, result: Any, is_made: Callable[[torch.Tensor], bool]) -> None:
        """Note views of memory from outside, and objects, that an operation gave."""
        for value in leaves(result):
            if isinstance(value, torch.ScriptObject):
                self._objects[_identity(value)] = value
                continue
            if not isinstance(value, torch.Tensor) or _lacks_memory(value):
                continue
            if id(value) not in self._found and not is_made(value):
                self._views[id(value)] = value

    def constant(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was made of values in Python's code, as by torch.tensor([1, 2])."""
        storage = tensor.untyped_storage()
        self._constants[storage._cdata] = storage

    def _is_saved(self, tensor: torch.Tensor) -> bool:
        """Whether autograd may have saved a tensor: a backward gets another object of it."""
        if not in_backward():
            return False
        return tensor.untyped_storage()._cdata in self._storages

    def _is_constant(self, func: Any, tensor: torch.Tensor) -> bool:
        if func is torch.ops.aten.lift_fresh.default:
            self.constant(tensor)
        return tensor.untyped_storage()._cdata in self._constants

    def compare(self, used: Mapping[int, Any], made: Container[int]) -> None:
        """Note what an earlier run neither used nor made, by identities of storages.

        Memory at the address where that run used other memory belongs to another library.
        """
        addresses = {storage.data_ptr() for storage in used.values()}
        for read in self._found.values():
            if isinstance(read.value, torch.Tensor):
                storage = read.value.untyped_storage()
                known = storage._cdata in used or storage._cdata in made
                read.steady = known or storage.data_ptr() in addresses

    def left(self, inputs: Iterable[torch.Tensor]) -> list[OutsideRead]:
        """What was taken, apart from the arguments of the call."""
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        return [
            read
            for read in self._found.values()
            if not isinstance(read.value, torch.Tensor)
            or read.value.untyped_storage()._cdata not in given
        ]


def explain(
    read: Sequence[OutsideRead],
    watch: ModuleWatch,
    parts: Parts,
    device: torch.device,
    used: Container[int] = (),
) -> None:
    """Have what was read from outside be watched, unless it is already.

    Args:
        read: what a run has read.
        watch: of the module or function that it called.
        parts: are told of the places that are to be watched, too.
        device: where it ran.
        used: identities of storages that the caller looks at by itself.

    Raises:
        CaptureError: something is read from where nobody could see it replaced.
    """
    if any(each.is_state for each in read):
        parts.watch(Seeding(device))
    unseen = [each for each in _unseen(read, watch, used) if not parts.covers(each.value)]
    if not unseen:
        return
    explained = _watch_holders(unseen, watch, parts)
    if any(isinstance(each, _SCRIPTED) for each in watch.objects):
        return  # Its constants are where only TorchScript gets at them.
    watched = {storage._cdata for storage in watch.memory}
    for each in unseen:
        if _is_explained(each, watched, device):
            continue
        if each.by_script:
            continue
        if each.steady and id(each) in explained:
            continue
        why = "Python does not show what the call gets it from."
        if not each.steady:
            why = "each call gets another one, which no operation of PyTorch's makes."
        raise CaptureError(
            f"{each.operation} reads {_in_words(each.value)} that nobody could see replaced: {why}",
            where=each.place,
            remedy=_REMEDY,
        )


def _watch_holders(unseen: Sequence[OutsideRead], watch: ModuleWatch, parts: Parts) -> set[int]:
    """Have the places watched where code gets these from; of which there are any, by identity."""
    thaw()
    owners = [(each, thing) for each in unseen for thing in _in_python(each.value)]
    things = [thing for _, thing in owners]
    links, leads = holders_of(things, watch.objects, watch.visits)
    held = [thing for thing, found in zip(things, leads, strict=True) if found]
    if held:
        parts.watch(Held(held, links))
    return {id(each) for (each, _), found in zip(owners, leads, strict=True) if found}


def _unseen(
    read: Sequence[OutsideRead], watch: ModuleWatch, used: Container[int]
) -> list[OutsideRead]:
    """What was read and is not watched itself."""
    scripts = {_identity(o) for o in watch.objects if isinstance(o, torch.ScriptObject)}

    def is_seen(value: Any) -> bool:
        if isinstance(value, torch.ScriptObject):
            return _identity(value) in scripts
        return id(value) in watch.visits or value.untyped_storage()._cdata in used

    return [each for each in read if not (each.is_state or is_seen(each.value))]


def _is_explained(read: OutsideRead, watched: Container[int], device: torch.device) -> bool:
    """Whether it is a tensor that need not be watched, although nobody holds it.

    It is a view of memory that is, or a constant of the host's, which segments copy at each call.
    """
    value = read.value
    if not isinstance(value, torch.Tensor):
        return False
    return value.untyped_storage()._cdata in watched or value.device.type != device.type


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"an object ({value._type().name()})"
    shape = "×".join(map(str, value.shape)) or "no dimensions"
    return f"a tensor ({shape}, {str(value.dtype).removeprefix('torch.')})"


def _names_script() -> bool:
    """Whether the user's code that runs now names a function of TorchScript's."""
    frame = current_frame()
    if frame is None:
        return False
    named = map(frame.f_globals.get, frame.f_code.co_names)
    return any(isinstance(each, _SCRIPTED) for each in named)


def _lacks_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is not torch.strided or tensor.is_nested or without_memory(tensor) is not None
    )


def _argument(func: Any, given: tuple[Any, Any], name: str) -> Any:
    """An operation's argument of a name; None if it has none."""
    args, kwargs = given
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name)
    return None


def _identity(value: torch.ScriptObject) -> tuple[str, int]:
    """What an object of TorchScript's is known by: each operation gets another wrapper of it."""
    return "script", hash(value)


def _in_python(value: Any) -> list[Any]:
    """The thing itself; of an object of TorchScript's, the wrappers that code may hold."""
    if isinstance(value, torch.Tensor):
        return [value]
    identity = _identity(value)
    found = {
        id(each): each
        for each in everything()
        if type(each) is torch.ScriptObject and each is not value and _identity(each) == identity
    }
    return list(found.values())
