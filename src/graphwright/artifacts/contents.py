"""What the file of a tuned model says of itself, read and checked before anything is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..calls import switches
from ..calls.serialization import unpacked
from ..calls.signature import Range
from ..errors import ArtifactError, first_line
from ..report.report import Report
from ..strategies.base import Candidate, Loader
from ..strategies.registry import LOSSY, parse_candidates
from . import container, evidence
from .saving import REPORT, STRATEGY

_TRUST = "Load with trust=True (--trust) if it comes from someone whose code you would run."


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        file: its path.
        unpacked: its members, in a folder.
        report: of tuning.
        candidate: what was chosen.
        loader: loads what was built; None if it has to be built again.
        saved_on: machine and versions that saved it.
        ranges: of sizes that it answers; empty if it has single sizes.
        shared_weights: weights that are constants of the candidate too: the names of both.
        pure: whether a call changes nothing.
        same_under_no_grad: whether eager computes the same under no_grad.
        model_there: whether the model was there when it was saved.
        argument_names: of the model's parameters, as far as they are known.
        sees_order: whether the model may see the order of keyword arguments.
    """

    file: Path
    unpacked: container.Members
    report: Report
    candidate: Candidate
    loader: Loader | None
    saved_on: Mapping[str, str]
    ranges: tuple[Range, ...]
    shared_weights: Mapping[str, str]
    pure: bool
    same_under_no_grad: bool
    model_there: bool
    argument_names: tuple[str, ...]
    sees_order: bool

    @classmethod
    def of(cls, file: Path, unpacked: container.Members) -> Contents:
        """Read what a file says.

        Args:
            file: its path.
            unpacked: its members; the report and the samples are there.

        Raises:
            ArtifactError: it makes no sense, or was saved under other settings of PyTorch.
        """
        facts = unpacked.facts
        try:
            report = Report.from_json((unpacked.folder / REPORT).read_text(encoding="utf-8"))
            (candidate,) = parse_candidates([facts["strategy"]], LOSSY)
            ranges = tuple(_range(*each) for each in facts["ranges"])
            if ranges and not hasattr(candidate.compiler, "dynamic_shapes"):
                raise ValueError(f"{candidate.name} answers no ranges of sizes")
            shared = dict(facts["shared_weights"])
            found = cls(
                file,
                unpacked,
                report,
                candidate,
                candidate.loader if facts["loads"] else None,
                {str(name): str(each) for name, each in dict(facts["environment"]).items()},
                ranges,
                {str(name): str(other) for name, other in shared.items()},
                bool(facts["pure"]),
                bool(facts["quiet"]),
                bool(facts["model_there"]),
                # Files of earlier versions have neither.
                tuple(_identifier(name) for name in facts.get("argument_names", ())),
                bool(facts.get("sees_order", True)),
            )
            _refuse_switches(file, unpacked)
        except ArtifactError:
            raise
        except Exception as error:  # A damaged file may raise anything.
            raise ArtifactError(f"{file.name} makes no sense: {error!s:.300}.") from error
        return found

    @property
    def members(self) -> Mapping[str, Any]:
        """The names of all members, and what is known of each."""
        members: Mapping[str, Any] = self.unpacked.facts["members"]
        return members

    def refuse_code(self) -> None:
        """Refuse what would be executed by loading it, or may do harm though it is data.

        Raises:
            ArtifactError: the file holds such a thing.
        """
        if not any(name.startswith(f"{STRATEGY}/") for name in self.members):
            return
        if getattr(self.candidate.compiler, "holds_code", True):
            raise ArtifactError(
                f"What {self.file.name} holds of {self.candidate.name} is code, which would be "
                "executed by loading it.",
                remedy=_TRUST,
            )
        doubtful: Callable[[Path], str | None] | None
        doubtful = getattr(self.candidate.compiler, "doubtful", None)
        if doubtful is None:
            return
        folder = self.unpacked.ready()
        for place in sorted((folder / STRATEGY).iterdir()):
            try:
                found = doubtful(place)
            except Exception as error:
                raise ArtifactError(
                    f"{self.file.name} makes no sense: {self.candidate.name} could not be loaded: "
                    f"{first_line(error)}."
                ) from error
            if found is not None:
                raise ArtifactError(f"{self.file.name} holds {found}.", remedy=_TRUST)


def _refuse_switches(file: Path, unpacked_file: container.Members) -> None:
    """Refuse other settings of PyTorch than it was saved under: only these calls it answers."""
    facts = unpacked_file.facts
    saved = unpacked(facts["switches"], {})
    if facts["schema_version"] == 1:
        saved = dict(zip(switches.OF_VERSION_1, saved, strict=True))
    names = switches.saved(evidence.device_type(unpacked_file.folder))
    then = {name: _placed(value) for name, value in saved.items() if name in names}
    now = {name: _placed(value) for name, value in switches.read().items()}
    found = switches.differences(then, now)
    if found:
        raise ArtifactError(
            f"{file.name} was saved under other settings: {', '.join(found)}.",
            remedy="Set them as they were, then load it, and call it under them.",
        )


def _placed(value: Any) -> Any:
    """A switch's value; a device without its number, which may differ between processes."""
    return value.type if isinstance(value, torch.device) else value


def _identifier(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError("the name of an argument is none")
    return name


def _range(leaf: Any, axis: Any, name: Any, low: Any, high: Any) -> Range:
    if not isinstance(name, str) or any(type(n) is not int for n in (leaf, axis, low, high)):
        raise ValueError("a range of sizes is none")
    return Range(leaf, axis, name, low, high)
