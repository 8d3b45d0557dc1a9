"""Calls of the modules inside a program, seen while it runs.

Hooks see calls of `module(...)` alone, and pipelines call `vae.decode(...)` and
`model.generate(...)`. So calls of all public methods that a class of the user's or a library's
defines are noted while the program runs (`installation`). The modules stay the same objects.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..calls.leaves import describe, in_words
from ..calls.snapshots import clone_leaves
from ..calls.split import Args, argument_names, flatten, tensors_of, unflatten
from ..calls.switches import read
from ..errors import GraphwrightError
from .installation import Answer, install, original_class, takes_installations, uninstall

FORWARD = "forward"
# A call of one kind: where its module is, its method, and what its arguments are.
CallKind = tuple[str, str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class ModuleMethod:
    """A method of a module in a program.

    Attributes:
        path: where the module is.
        method: its name.
    """

    path: str
    method: str

    def __str__(self) -> str:
        return self.path if self.method == FORWARD else f"{self.path}.{self.method}"


@dataclass
class ObservedCall:
    """One call of a method.

    Attributes:
        target: what was called.
        module: whose method it is.
        parent: the call of another module's method in which it was made; None for none.
        arguments: what each of them is, by name: "1×128 int64", or a plain value.
        sizes: the shapes of the tensors among them, by name.
        keywords: the names of those that were passed by keyword.
        mode: "train" or "eval", and what else is on: gradients, inference mode, autocast.
        host_s: seconds of the host in it, calls inside of it included.
        device_s: seconds of a GPU from its begin to its end; None without one.
        sample: the arguments as they were, where somebody wanted them.
        switches: PyTorch's that the program has set around it, if there is a sample.
        has_tensors: whether tensors go in or come out.
    """

    target: ModuleMethod
    module: nn.Module
    parent: ObservedCall | None
    arguments: dict[str, str]
    sizes: dict[str, tuple[int, ...]]
    keywords: tuple[str, ...]
    mode: tuple[str, ...]
    host_s: float = 0.0
    device_s: float | None = None
    sample: tuple[Args, dict[str, Any]] | None = None
    switches: dict[str, Any] = field(default_factory=dict, repr=False)
    has_tensors: bool = False
    _events: tuple[Any, Any] | None = field(default=None, repr=False)

    @property
    def kind(self) -> CallKind:
        """What calls have in common that could share a graph."""
        return self.target.path, self.target.method, tuple(self.arguments.items())


class CallsObserver:
    """Notes the calls of modules as long as it is entered.

    Attributes:
        calls: what was called, in the order of beginnings; calls without tensors are left out.
        left_out: where modules are whose calls cannot be noted, with their classes.

    Args:
        modules: the outermost modules, by where they are.
        wanted: calls of these methods of modules keep their arguments, the first of each kind.
        device: where the modules are.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        wanted: frozenset[ModuleMethod] = frozenset(),
    ) -> None:
        self.calls: list[ObservedCall] = []
        self._places, self.left_out = _places_of(modules)
        self._device, self._wanted = device, wanted
        self._kept: set[CallKind] = set()
        self._switches = read()
        self._running = threading.local()
        self._installed: list[tuple[nn.Module, dict[str, Answer]]] = []

    def __enter__(self) -> CallsObserver:
        try:
            for path, module in self._places.items():
                # What somebody has put on the object itself runs, and is not looked into.
                observed: dict[str, Answer] = {
                    method: self._observed(
                        ModuleMethod(path, method), module, getattr(module, method)
                    )
                    for method in _methods_of(module)
                    if method not in vars(module)
                }
                self._installed.append((module, observed))
                install(module, observed)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for module, observed in self._installed:
            uninstall(module, observed)
        self._installed.clear()
        self._leave_out_others()
        if self._device.type == "cuda" and self.calls:
            torch.cuda.synchronize(self._device)
            for call in self.calls:
                if call._events is not None:
                    begin, end = call._events
                    call.device_s, call._events = begin.elapsed_time(end) / 1e3, None

    def _observed(
        self, target: ModuleMethod, module: nn.Module, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        positional = positional_of(original)

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            parent = getattr(self._running, "call", None)
            call = self._begin(target, module, parent, positional, args, kwargs)
            self._running.call = call
            self.calls.append(call)
            events = self._events()
            began = time.perf_counter()
            if events is not None:
                events[0].record()
            try:
                result = original(*args, **kwargs)
            finally:
                if events is not None:
                    events[1].record()
                call.host_s = time.perf_counter() - began
                call._events = events
                self._running.call = parent
            call.has_tensors = call.has_tensors or _holds_tensors(result)
            return result

        return observed

    def _begin(
        self,
        target: ModuleMethod,
        module: nn.Module,
        parent: ObservedCall | None,
        positional: Sequence[str],
        args: Args,
        kwargs: dict[str, Any],
    ) -> ObservedCall:
        arguments, sizes = described(positional, args, kwargs)
        call = ObservedCall(
            target,
            module,
            parent,
            arguments,
            sizes,
            (*kwargs,),
            _mode(module),
            has_tensors=bool(sizes),
        )
        if target in self._wanted and call.kind not in self._kept:
            self._kept.add(call.kind)
            with contextlib.suppress(GraphwrightError):  # Something in them holds itself.
                call.sample = _copied(args, kwargs)
                before, now = self._switches, read()
                call.switches = {name: now[name] for name in now if now[name] != before[name]}
        return call

    def _leave_out_others(self) -> None:
        """Forget calls that have nothing to do with tensors; what they called is their parents'."""
        self.calls = [call for call in self.calls if call.has_tensors]
        for call in self.calls:
            while call.parent is not None and not call.parent.has_tensors:
                call.parent = call.parent.parent

    def _events(self) -> tuple[Any, Any] | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _places_of(modules: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The modules whose calls are noted, by where they are, and the classes of those left out.

    PyTorch's own modules are operations of the module around them. What is left out is left out
    with all that is inside of it.
    """
    found: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    seen: set[int] = set()
    for outer, root in modules.items():
        for path, module in root.named_modules():
            place = f"{outer}.{path}" if path else outer
            own = type(module).__module__.startswith("torch.nn.")
            inside = any(place.startswith(f"{each}.") for each in left_out)
            if id(module) in seen or (own and path) or inside:
                continue
            seen.add(id(module))
            if takes_installations(module):
                found[place] = module
            else:
                left_out[place] = type(module).__name__
    return found, left_out


def _methods_of(module: nn.Module) -> Iterator[str]:
    """The names of a module's public methods that its own classes define, and of `forward`."""
    yield FORWARD
    seen = {FORWARD, *dir(nn.Module)}
    for cls in original_class(module).__mro__:
        if cls is object or cls.__module__.startswith("torch.nn."):
            continue
        for name, value in vars(cls).items():
            if name in seen or name.startswith("_"):
                continue
            seen.add(name)
            if inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
                yield name


def positional_of(method: Callable[..., Any]) -> list[str]:
    """The names of parameters that may be passed by position, in order."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]


def described(
    positional: Sequence[str], args: Args, kwargs: dict[str, Any]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """What the arguments are in words, and the shapes of tensors, by name."""
    named = dict(zip(positional, args, strict=False))
    others = args[len(named) :]
    try:
        leaves, _ = flatten(others, {**named, **kwargs})
        names = argument_names(others, {**named, **kwargs})
    except GraphwrightError:
        leaves = [*others, *named.values(), *kwargs.values()]
        names = [*(f"args[{n}]" for n in range(len(others))), *named, *kwargs]
    words: dict[str, str] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            sizes[name] = tuple(leaf.shape)
            shape = "×".join(map(str, leaf.shape)) or "scalar"
            words[name] = f"{shape} {str(leaf.dtype).removeprefix('torch.')}"
            continue
        try:
            words[name] = in_words(describe(leaf))
        except GraphwrightError:
            words[name] = type(leaf).__name__
            sizes |= {f"{name}.{n}": tuple(t.shape) for n, t in enumerate(tensors_of(leaf))}
    return words, sizes


def _copied(args: Args, kwargs: dict[str, Any]) -> tuple[Args, dict[str, Any]]:
    """The arguments with tensors of their own: the call may write to them."""
    leaves, spec = flatten(args, kwargs)
    return unflatten(clone_leaves(leaves), spec)


def _holds_tensors(result: Any) -> bool:
    try:
        return bool(tensors_of(result))
    except GraphwrightError:
        return True  # It cannot be looked into.


def _mode(module: nn.Module) -> tuple[str, ...]:
    found = ["train" if module.training else "eval"]
    if torch.is_inference_mode_enabled():
        found.append("inference mode")
    elif torch.is_grad_enabled():
        found.append("gradients")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        found.append("autocast")
    return tuple(found)
