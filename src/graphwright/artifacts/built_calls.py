"""The calls that something was built for, and which of them a call is."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..calls.binding import Form, Parameters, form_of
from ..calls.signature import CallSignature, RangedSignature, inside_transform, quick_key
from ..calls.split import Args, Kwargs
from ..errors import SignatureError
from ..graphs.taken_apart import ApartCall, key_with_objects
from .proved_forms import ProvedForms
from .untuned_calls import Absent, model_sees_order

# Shapes and plain values of which is remembered that they were looked at.
_MAX_LOOKED_AT = 256
# The signature of calls that something was built for, and what was built.
Entry = tuple[CallSignature | RangedSignature, Callable[..., Any]]


class Entries:
    """What was built, with the signatures of the calls that it answers.

    Attributes:
        table: of all.

    Args:
        module: what was tuned.
        table: as the attribute.
        apart: for calls with objects: those of the table, taken apart.
        proofs: that plain keywords change nothing; None if none may be tried.
    """

    def __init__(
        self,
        module: nn.Module,
        table: Sequence[Entry],
        apart: Sequence[ApartCall],
        proofs: ProvedForms | None,
    ) -> None:
        self.table = list(table)
        self._module = module
        self._proofs = proofs
        # In which forms the calls of the table pass their arguments.
        self._forms: dict[Form, None] = dict.fromkeys(_form(signature) for signature, _ in table)
        # Of calls with objects, which take long to compare: the table by what is seen at once.
        self._by_key: dict[Any, list[Entry]] = {}
        for call, entry in zip(apart, self.table if apart else (), strict=True):
            self._by_key.setdefault(key_with_objects(*call.anew()), []).append(entry)
        # Shapes and plain values of calls that were looked at.
        self._looked_at: set[Any] = set()

    def entry_for(self, args: Args, kwargs: Kwargs) -> Entry | None:
        """The entry that answers a call; None if there is none."""
        table = self._by_key.get(key_with_objects(args, kwargs), ()) if self._by_key else self.table
        for entry in table:
            if entry[0].fits(args, kwargs):
                return entry
        return None

    def found_for(self, args: Args, kwargs: Kwargs) -> tuple[Entry | None, Args, Kwargs]:
        """The entry that answers a call in some form, and the call in that form."""
        found = self.entry_for(args, kwargs)
        return self.in_other_forms(args, kwargs) if found is None else (found, args, kwargs)

    def in_other_forms(self, args: Args, kwargs: Kwargs) -> tuple[Entry | None, Args, Kwargs]:
        """The entry that answers a call in another form, and the call in that form.

        A call that is not answered in its own form is put in those of the entries: what was a
        keyword there is one. The module itself always gets the caller's form.
        """
        own = form_of(args, kwargs)
        forms = [form for form in self._forms if form != own]
        others = self._in_forms(forms, args, kwargs) if forms else []
        for mine, named in others:
            found = self.entry_for(mine, named)
            if found is not None:
                return found, mine, named
        if own in self._forms or not others:
            return None, args, kwargs
        return None, *others[0]

    def _in_forms(
        self, forms: Sequence[Form], args: Args, kwargs: Kwargs
    ) -> list[tuple[Args, dict[str, Any]]]:
        """A call in those of some forms in which it is the same call."""
        parameters = Parameters.of(self._module)
        if parameters is not None:
            every = [parameters.in_form(form, args, kwargs) for form in forms]
            return [each for each in every if each is not None]
        orders = [names for count, names in forms if count == len(args)]
        orders = [names for names in orders if kwargs.keys() == {*names}]
        if not orders or model_sees_order(self._module):
            return []
        return [(args, {name: kwargs[name] for name in names}) for names in orders]

    def proved_for(self, args: Args, kwargs: Kwargs) -> tuple[Entry | None, Kwargs]:
        """The entry that answers a call but for plain keywords that are proved to change nothing.

        Behind it are the keyword arguments of its form. The first call of a form may run the module
        for a proof: see `proved_forms`.
        """
        if self._proofs is not None:
            for entry in self.table:
                named = self._proofs.in_form_of(entry[0], args, kwargs)
                if named is not None:
                    return entry, named
        return None, kwargs

    def differences(self, args: Args, kwargs: Kwargs) -> str | None:
        """How a call differs from what was tuned for: a range of sizes, or the nearest call."""
        signatures = [signature for signature, _ in self.table]
        found = [each for each in signatures if isinstance(each, RangedSignature)] or signatures
        if len(found) > 1 and not inside_transform():
            with contextlib.suppress(SignatureError):
                call = CallSignature.of(args, kwargs, objects=bool(self._by_key))
                found.sort(key=functools.partial(_distance, call))
        made = "saved" if isinstance(self._module, Absent) else "tuned"
        return found[0].differences(args, kwargs, made) if found else None

    def is_new(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a call of such shapes and plain values is seen here for the first time."""
        key = quick_key(args, kwargs)
        if key is None:
            key = key_with_objects(args, kwargs)
        if key is None or key in self._looked_at:
            return False
        if len(self._looked_at) >= _MAX_LOOKED_AT:
            self._looked_at.clear()
        self._looked_at.add(key)
        return True


def _form(signature: CallSignature | RangedSignature) -> Form:
    """In which form calls of a signature pass their arguments."""
    base = signature.base if isinstance(signature, RangedSignature) else signature
    args, kwargs = base.spec.children()
    return len(args.children()), tuple(kwargs.context)


def _distance(call: CallSignature, other: CallSignature | RangedSignature) -> tuple[float, int]:
    """How far a call is from another: how many leaves differ, and by how many elements.

    Those with the same arguments are nearer than all others.
    """
    base = other.base if isinstance(other, RangedSignature) else other
    if call.spec != base.spec:
        mine, its = call.by_name().items(), base.by_name().items()
        return math.inf, len(mine ^ its)
    apart = [pair for pair in zip(call.leaves, base.leaves, strict=True) if pair[0] != pair[1]]
    shapes = [(a[0], b[0]) for a, b in apart if len(a) == len(b) == 5]
    return len(apart), sum(abs(math.prod(a) - math.prod(b)) for a, b in shapes)
