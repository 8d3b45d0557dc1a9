"""Calls with objects in a file: what builds the arguments, and the results with their effects.

Each is a tree without its tensors, which follow the rules of `written_trees`: a class is built only
where the model was passed or the file is trusted. What a call does to the caller's objects is a
list of changes by position, which can name nothing but these objects and their plain attributes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from ..calls.serialization import TreeTemplate, packed, unpacked
from ..calls.signature import CallSignature
from ..calls.split import objects_of
from ..errors import ArtifactError
from ..evaluation.reference import Sample
from ..graphs.effects import ObjectChange, Outcome
from ..graphs.taken_apart import ApartCall
from .tuned_module import Apart

FILE = "objects.json"
Json = Any


@dataclass(frozen=True)
class StoredCall:
    """One kind of call, as it was read.

    Attributes:
        template: of the arguments.
        names: of their tensors.
        written: what they return and do, as JSON; None if it could not be written.
        may: what the file may build.
    """

    template: TreeTemplate
    names: tuple[str, ...]
    written: Json
    may: dict[str, Any]


def calls_of(stored: Sequence[StoredCall], samples: Sequence[Sample]) -> list[ApartCall]:
    """The calls, with the tensors of the stored samples.

    Raises:
        ArtifactError: they do not fit.
    """
    try:
        return [_call(*pair) for pair in zip(stored, samples, strict=True)]
    except Exception as error:  # A damaged file may raise anything.
        raise _senseless(error) from error


def _call(stored: StoredCall, sample: Sample) -> ApartCall:
    tensors = tuple(sample.call.args)
    args, kwargs = stored.template.fill(tensors)
    signature = CallSignature.of(args, kwargs, objects=True)
    return ApartCall(stored.template, tensors, stored.names, signature)


def made_of(
    stored: Sequence[StoredCall], calls: Sequence[ApartCall], samples: Sequence[Sample]
) -> list[TreeTemplate]:
    """What the calls return and do, without tensors.

    Raises:
        ArtifactError: it was not written, or makes no sense.
    """
    if any(each.written is None for each in stored):
        raise ArtifactError(
            "What the model returns for calls with objects could not be written to the file.",
            remedy="Pass the model.",
        )
    try:
        found = []
        for each, call, sample in zip(stored, calls, samples, strict=True):
            made = _read(each.written, len(objects_of(*call.anew())), each.may)
            if len(made.slots) != len(sample.reference.cases[0].eager.outputs):
                raise ValueError("results hold another number of tensors")
            found.append(made)
        return found
    except ArtifactError:
        raise
    except Exception as error:  # A damaged file may raise anything.
        raise _senseless(error) from error


def write(folder: Path, apart: Apart) -> None:
    """Write all kinds of calls that were tuned for.

    Raises:
        ArtifactError: an argument cannot be written.
    """
    found = []
    for call, made in zip(apart.calls, apart.made, strict=True):
        written = None
        with contextlib.suppress(ArtifactError):  # The model, which may be passed, tells it too.
            written = _written(made, len(objects_of(*call.anew())))
        found.append({"names": call.names, "call": call.template.written(), "made": written})
    (folder / FILE).write_text(json.dumps(found), encoding="ascii")


def read(folder: Path, *, imports: bool, objects: Collection[str] | None) -> list[StoredCall]:
    """Read what `write` has written.

    Args:
        folder: that was written to.
        imports: whether modules that define the classes may be imported.
        objects: packages whose classes may be built.

    Raises:
        ArtifactError: the file makes no sense, or a class may not be built.
    """
    may: dict[str, Any] = {"imports": imports, "objects": objects}
    try:
        found = [
            StoredCall(
                TreeTemplate.read(each["call"], **may),
                tuple(map(str, each["names"])),
                each["made"],
                may,
            )
            for each in json.loads((folder / FILE).read_bytes())
        ]
        if not found:
            raise ValueError("there are none")
        return found
    except ArtifactError:
        raise
    except Exception as error:  # A damaged file may raise anything.
        raise _senseless(error) from error


def _senseless(error: Exception) -> ArtifactError:
    return ArtifactError(f"The calls with objects make no sense: {error!r:.200}.")


def _written(made: TreeTemplate, given: int) -> Json:
    """What a call returns and does, as JSON; an `Outcome` is a pair and its changes.

    Raises:
        ArtifactError: it holds something that has no name.
    """
    changes = None
    if made.spec.type is Outcome:
        changes = [
            [each.position, each.attributes, packed([*each.removed], {}, ""), each.start]
            for each in made.spec.context
        ]
        pair = pytree.TreeSpec(tuple, None, made.spec.children())
        made = replace(made, spec=pair)
    return {"changes": changes, "tree": made.written(given=given)}


def _read(known: Json, given: int, may: dict[str, Any]) -> TreeTemplate:
    """Inverse of `_written`; raises for anything else."""
    made = TreeTemplate.read(known["tree"], given=given, **may)
    if known["changes"] is None:
        return made
    result, values = made.spec.children()
    changes = tuple(
        _change(value, given, *each)
        for value, each in zip(values.children(), known["changes"], strict=True)
    )
    return replace(made, spec=pytree.TreeSpec(Outcome, changes, [result, values]))


def _change(
    value: pytree.TreeSpec, given: int, position: Any, attributes: Any, removed: Any, start: Any
) -> ObjectChange:
    gone = tuple(unpacked(removed, {}))
    if not (type(position) is int and 0 <= position < given):
        raise ValueError(f"the call has no object {position!r:.20}")
    if type(attributes) is not bool or not (type(start) is int and start >= 0):
        raise ValueError("a change is none")
    if attributes:
        if value.type is not dict:
            raise ValueError("a change of attributes names none")
        _refuse_private([*gone, *value.context])
    return ObjectChange(position, attributes, gone, start)


def _refuse_private(names: Sequence[Any]) -> None:
    """Raise for what a class is made of."""
    for name in names:
        if type(name) is not str or name.startswith("__"):
            raise ValueError(f"{name!r:.40} is no attribute of an object")
