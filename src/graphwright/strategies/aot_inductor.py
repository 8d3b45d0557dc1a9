"""AOTInductor: torch.export, then Inductor's kernels as a library; plain, and with frozen weights.

It builds a package (.pt2) of machine code and weights. Another process loads it as fast as it can
be read, without the model and without compiling.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..calls.serialization import TreeTemplate
from ..calls.snapshots import clone_leaves
from ..calls.split import Args, Kwargs, flatten
from ..errors import StrategyFailed
from .base import AVAILABLE, Availability, Built, probe, tiny_model, without_grad
from .export import Flat, dims_of, exported
from .inductor import FROZEN, INSTRUCTIONS, explained

_PACKAGE, _CALL = "package.pt2", "call.json"
# It is written to by a compilation, and is part of the keys of torch.compile's cache.
_ITS_OWN: dict[str, Any] = {"aot_inductor.metadata": {}}


@dataclass(frozen=True)
class AotInductor:
    """A package of AOTInductor, compiled for the sample's own shapes, or for a range of them.

    `dynamic_shapes` names dimensions of the arguments as torch.export does, by position and name:
    `({0: Dim("batch", min=1, max=32)},)`; then what is built answers all sizes in that range.
    With `freezing`, Inductor takes the weights for constants, as `inductor:freeze` has it do.
    """

    name: str = "aot_inductor"
    complexity: int = 34
    dynamic_shapes: Any = None
    freezing: bool = False
    holds_code: ClassVar[bool] = True
    bound_to: ClassVar[tuple[str, ...]] = ("torch", "gpu", "cuda", "processor", "system")
    portable: ClassVar[bool] = False

    def probes_late(self, device: torch.device) -> bool:
        """The probe compiles, which takes as long as a build."""
        return True

    def probe(self, device: torch.device) -> Availability:
        """Compile, load and run a tiny model; frozen weights need nothing more."""
        if self.freezing:
            return probe(AOT_INDUCTOR, device)
        model, x = tiny_model(device)
        try:
            self.build(model, (x,), {}).call(x)
        except Exception as error:
            return explained(error)
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Export, compile into a package, load it."""
        leaves, spec = flatten(args, kwargs)
        flat = Flat(model, TreeTemplate.of(leaves, spec))
        samples = tuple(t for t in clone_leaves(leaves) if isinstance(t, torch.Tensor))
        if not samples:
            raise StrategyFailed("torch.export needs a tensor among the inputs")
        dims = dims_of(self.dynamic_shapes, model, args, kwargs)
        with torch.no_grad():
            flat(*samples)
            out = flat.out
            assert out is not None
            program = exported(flat, samples, dims)
            folder = tempfile.mkdtemp(prefix="graphwright-")
            try:
                path = Path(folder) / _PACKAGE
                options = _ITS_OWN | (FROZEN if self.freezing else {})
                with _quiet(), torch._inductor.config.patch(options):
                    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
                known = _Packaged(path, flat.call.slots, out)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        # It lives as long as what can save it. TemporaryDirectory would warn when collected.
        weakref.finalize(known, shutil.rmtree, folder, ignore_errors=True)
        return Built(without_grad(known), holds_weights=True, save=known.save, self_contained=True)

    def load(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], args: Args, kwargs: Kwargs
    ) -> Built:
        """The package that was saved."""
        _refuse_other_processor(folder / _PACKAGE)
        known = json.loads((folder / _CALL).read_bytes())
        slots = [int(slot) for slot in known["slots"]]
        call = _Packaged(folder / _PACKAGE, slots, TreeTemplate.read(known["out"]), passing=True)
        return Built(without_grad(call), holds_weights=True, save=call.save, self_contained=True)


def _refuse_other_processor(package: Path) -> None:
    """Refuse machine code that this processor would crash at; PyTorch logs a warning and goes on.

    Processors of one name may differ in their instructions, as those of virtual machines do.

    Raises:
        StrategyFailed: the processor lacks instructions that the package was compiled for.
    """
    needed: set[str] = set()
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith("_metadata.json"):
                needed.update(json.loads(archive.read(name)).get("AOTI_CPU_ISA", "").split())
    lacking = [
        name
        for name, asked in INSTRUCTIONS.items()
        if name in needed and not getattr(torch.cpu, asked, lambda: True)()
    ]
    if lacking:
        raise StrategyFailed(
            f"it was compiled for {' and '.join(lacking)}, which this processor lacks"
        )


class _Packaged:
    """A package, called as the model is.

    Args:
        path: of the package.
        slots: which of a call's leaves are its tensors.
        out: what its results belong to.
        passing: whether the package goes before this does, so that its content has to be kept.
    """

    def __init__(
        self, path: Path, slots: Sequence[int], out: TreeTemplate, *, passing: bool = False
    ) -> None:
        self._package, self._slots, self._out = path, slots, out
        # Its own locks would break a capture; this one is never taken at a replay.
        self._run: Callable[..., Any] = torch._inductor.aoti_load_package(
            str(path), run_single_threaded=True
        )
        self._lock = threading.Lock()
        self._content = path.read_bytes() if passing else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten(args, kwargs)
        with self._lock:
            return self._out.fill(self._run(*[leaves[slot] for slot in self._slots]))

    def save(self, folder: Path) -> None:
        """Write the package, and how it is called."""
        content = self._package.read_bytes() if self._content is None else self._content
        (folder / _PACKAGE).write_bytes(content)
        known = {"slots": [*self._slots], "out": self._out.written()}
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
FREEZE = AotInductor("aot_inductor:freeze", 35, freezing=True)
