"""Random programs that read values, write in place and keep tensors: graphs against eager."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shares import share
from torch.utils import _pytree as pytree

import graphwright as gw

PROGRAMS, CALLS = 40, 8

# What a program is made of. In braces: {t} a tensor that is there, {n} a number, {v} a new name.
PLAIN = (
    "{v} = {t} * {n} + {t}",
    "{v} = torch.tanh({t}) - {n}",
    "{v} = {t} @ {t}.T @ {t}",
    "{v} = torch.where({t} > {n}, {t}, {n})",
    "{v} = {t}.T.contiguous().T",
    "{v} = {t}[:, [2, 0, 1]]",
    "{v} = torch.stack([{t}, {t}]).mean(0)",
    "{v} = {t} + torch.tensor([1.0, 2.0, 3.0], device=x.device)",
    "{v} = {t}.unsafe_chunk(1)[0]",
    "{v} = torch.dropout({t}, 0.5, True)",
    "{v} = {t} + torch.rand_like({t})",
)
IN_PLACE = (
    "{t}.mul_({n})",
    "x.add_({n})",
    "{t}[0] = {n}",
    "{t}[:, 1] += {n}",
    "{t}[{t} > 1] = {n}",
    "buffer.add_({t}.sum(0))",
    "kept.append({t})",
)
CONDITIONS = (
    "{t}.sum() > {n}",
    "({t} > {n}).any()",
    "{t}[0, 0].item() > {n}",
    "({t}[0] > {n}).tolist()[1]",
    "int(({t} > {n}).sum()) % 2",
    "({t} > {n}).nonzero().shape[0] > 3",
)
RESULTS = (
    "{t}",
    "({t}, {t} * 2)",
    "{t}[{t} > 0]",
    "x",
    "({t}.view(-1) if {t}.is_contiguous() else {t}, buffer + 1)",
    "torch.stack([*kept, {t}]).sum(0)",
    "({t} > 0).sum().item()",
    "[{t}[1:], {t}[:1], x]",
)


class Writer:
    """Writes the source of a program."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.count = 0

    def filled(self, template: str, names: list[str]) -> str:
        """A template with names and numbers."""
        text = template
        while "{t}" in text:
            text = text.replace("{t}", self.chance.choice(names), 1)
        return text.replace("{n}", self.chance.choice(("0", "1", "-0.5", "2")))

    def block(self, names: list[str], depth: int, lines: int) -> list[str]:
        """Some statements, which may branch, loop and return."""
        names, found = list(names), []
        for _ in range(lines):
            dice = self.chance.random()
            if dice < 0.5:
                self.count += 1
                name = f"v{self.count}"
                found.append(self.filled(self.chance.choice(PLAIN), names).replace("{v}", name))
                names.append(name)
            elif dice < 0.72:
                found.append(self.filled(self.chance.choice(IN_PLACE), names))
            elif depth < 2:
                condition = self.filled(self.chance.choice(CONDITIONS), names)
                inner = self.block(names, depth + 1, 2)
                if dice < 0.8:
                    found += [f"for i in range(1 + int(({names[-1]} > 0).sum()) % 3):"]
                    found += [f"    {line}" for line in inner]
                else:
                    found += [f"if {condition}:", *(f"    {line}" for line in inner)]
                    if self.chance.random() < 0.5:
                        other = self.block(names, depth + 1, 2)
                        found += ["else:", *(f"    {line}" for line in other)]
        if depth and self.chance.random() < 0.25:
            found.append(f"return {self.filled(self.chance.choice(RESULTS), names)}")
        return found or ["pass"]

    def program(self) -> str:
        """A function of x (3, 3) that also uses `buffer`."""
        body = ["kept = []", "y = x * 2", *self.block(["x", "y"], 0, 6)]
        body.append(f"return {self.filled(self.chance.choice(RESULTS), ['x', 'y'])}")
        return "\n".join(["def program(x):", *(f"    {line}" for line in body)])


def made(source: str, device: torch.device) -> tuple[Callable[..., Any], torch.Tensor]:
    """The function, with a buffer of its own."""
    buffer = torch.zeros(3, device=device)
    space: dict[str, Any] = {"torch": torch, "buffer": buffer}
    exec(source, space)  # written above
    return space["program"], buffer


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the kind of error that it raises."""
    try:
        return call()
    except (RuntimeError, IndexError) as error:
        if isinstance(error, gw.GraphwrightError):
            raise
        return type(error).__name__


def flat(value: Any) -> list[Any]:
    """Leaves in a form that can be compared bit for bit."""
    return [
        (leaf.shape, leaf.dtype, leaf.cpu().nan_to_num(nan=7.0).tolist())
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in pytree.tree_leaves(value)
    ]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", share(range(PROGRAMS)))
def test_a_random_program_does_what_it_does_in_eager(seed: int, device: torch.device) -> None:
    source = Writer(seed).program()
    (plain, its), (divided, mine) = made(source, device), made(source, device)
    graphed = gw.graph(divided, outputs=("fresh", "static")[seed % 2])
    held: list[tuple[Any, Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(CALLS):
            torch.manual_seed(1000 * seed + call)
            x = torch.randn(3, 3, device=device) * (1 + call % 3)
            one, two = x.clone(), x.clone()
            torch.manual_seed(call)
            expected = outcome(lambda one=one: plain(one))
            torch.manual_seed(call)
            actual = outcome(lambda two=two: graphed(two))
            assert flat(actual) == flat(expected), f"call {call} of\n{source}"
            assert flat([mine, two]) == flat([its, one]), f"what call {call} leaves, of\n{source}"
            if seed % 2 == 0:
                held.append((actual, flat(actual)))
        for actual, before in held:
            changed = any(leaf is mine for leaf in pytree.tree_leaves(actual))
            assert changed or flat(actual) == before, f"a result that was held, of\n{source}"
