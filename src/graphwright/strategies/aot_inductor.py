"""AOTInductor: torch.export, then Inductor's kernels as a library that no Python has to find again.

What it makes is a package (.pt2) of machine code and weights: it is loaded in another process in
the time that reading it takes, without the model and without compiling.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import StrategyFailed
from ..signature import Args, Kwargs, flatten, unflatten
from ..snapshots import clone_leaves
from ..storage import HERE, results_read, results_written
from .base import AVAILABLE, Availability, Built, tiny_model, without_grad
from .inductor import explained

_PACKAGE, _CALL = "package.pt2", "call.json"


class _Flat(nn.Module):
    """A model from tensors to a list of tensors."""

    def __init__(self, model: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.training = False  # eval() would reach into the user's own submodules.
        self.model = model
        self.slots = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves, self._spec = list(leaves), spec

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(self._leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = unflatten(leaves, self._spec)
        found = pytree.tree_leaves(self.model(*args, **kwargs))
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class AotInductor:
    """A package of AOTInductor, compiled for the sample's own shapes, or for a range of them.

    `dynamic_shapes` names dimensions of the arguments as torch.export does, by position and name:
    `({0: Dim("batch", min=1, max=32)},)`; then what is built answers all sizes in that range.
    """

    name: str = "aot_inductor"
    complexity: int = 34
    dynamic_shapes: Any = None
    holds_code: ClassVar[bool] = True
    bound_to: ClassVar[tuple[str, ...]] = ("torch", "gpu", "cuda", "processor", "system")
    portable: ClassVar[bool] = False

    def probes_late(self, device: torch.device) -> bool:
        """The probe compiles, which takes as long as a build."""
        return True

    def probe(self, device: torch.device) -> Availability:
        """Compile, load and run a tiny model."""
        model, x = tiny_model(device)
        try:
            self.build(model, (x,), {}).call(x)
        except Exception as error:
            return explained(error)
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Export, compile into a package, load it."""
        leaves, spec = flatten(args, kwargs)
        flat = _Flat(model, leaves, spec)
        samples = tuple(t for t in clone_leaves(leaves) if isinstance(t, torch.Tensor))
        if not samples:
            raise StrategyFailed("torch.export needs a tensor among the inputs")
        with torch.no_grad():
            found, tree = pytree.tree_flatten(model(*args, **kwargs))
            results = [HERE if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
            shapes = None if self.dynamic_shapes is None else (self._shapes(args, kwargs),)
            exported = torch.export.export(flat, samples, dynamic_shapes=shapes)
            package = tempfile.TemporaryDirectory(prefix="graphwright-")
            path = Path(package.name) / _PACKAGE
            with _quiet():
                torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
        known = _Packaged(path, flat.slots, results, tree, package)
        return Built(without_grad(known), holds_weights=True, save=known.save)

    def _shapes(self, args: Args, kwargs: Kwargs) -> list[Any]:
        """The dimensions that vary, in the order of the tensors."""
        from ..shapes.dimensions import dims_of_leaves

        return dims_of_leaves(self.dynamic_shapes, args, kwargs)

    def load(self, folder: Path, args: Args, kwargs: Kwargs) -> Built:
        """The package that was saved."""
        known = json.loads((folder / _CALL).read_bytes())
        slots = [int(slot) for slot in known["slots"]]
        call = _Packaged(folder / _PACKAGE, slots, *results_read(known), None)
        return Built(without_grad(call), holds_weights=True, save=call.save)


class _Packaged:
    """A package, called as the model is.

    Args:
        path: of the package.
        slots: which of a call's leaves are its tensors.
        results: the results' leaves, `HERE` where a tensor comes.
        spec: the results' tree.
        folder: that the package lies in, if it is to go with this.
    """

    def __init__(
        self,
        path: Path,
        slots: Sequence[int],
        results: Sequence[Any],
        spec: pytree.TreeSpec,
        folder: tempfile.TemporaryDirectory[str] | None,
    ) -> None:
        self._path, self._slots, self._folder = path, slots, folder
        self._results, self._spec = results, spec
        # It shares one runner between calls, whose state belongs to one of them.
        self._run: Callable[..., Any] = torch._inductor.aoti_load_package(
            str(path), run_single_threaded=True
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten(args, kwargs)
        found = iter(self._run(*[leaves[slot] for slot in self._slots]))
        outputs = [next(found) if leaf is HERE else leaf for leaf in self._results]
        return pytree.tree_unflatten(outputs, self._spec)

    def save(self, folder: Path) -> None:
        """Write the package, and how it is called."""
        (folder / _PACKAGE).write_bytes(self._path.read_bytes())
        known = {"slots": [*self._slots], **results_written(self._results, self._spec)}
        (folder / _CALL).write_text(json.dumps(known), encoding="ascii")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the C++ compiler and the linker have to say where all goes well."""
    import logging

    logger = logging.getLogger("torch._inductor")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


AOT_INDUCTOR = AotInductor()
