"""inspect(): which methods of modules a program calls, how, and what could be done with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.programs.inspection import CalledMethod
from graphwright.programs.program_modules import modules_inside


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))

    def width(self) -> int:
        return 4


class Decodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def decode(self, z: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(z) * scale * self.inner.width()

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.decode(z)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return self.second(y) if y.sum().item() > -1 else y


class Pipeline:
    def __init__(self, device: torch.device) -> None:
        self.unet, self.vae = Reads().eval().to(device), Decodes().eval().to(device)

    def __call__(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(steps):
                x = self.unet(x, mask=torch.ones(len(x), device=x.device))
            result: torch.Tensor = self.vae.decode(x, scale=2.0)
        return result


def row_of(inspection: gw.ProgramInspection, method: str) -> CalledMethod:
    (row,) = (row for row in inspection.rows if str(row.target) == method)
    return row


def calls(device: torch.device) -> list[Any]:
    return [(torch.rand(2, 4, device=device),), {"x": torch.rand(3, 4, device=device), "steps": 3}]


def test_methods_calls_and_shapes_are_told(device: torch.device) -> None:
    inspection = gw.inspect(Pipeline(device), calls(device))
    assert {str(row.target) for row in inspection.rows} == {
        *("unet", "unet.first", "unet.second", "vae.decode", "vae.inner")
    }, "forward of vae is not called, and width() has no tensors"
    unet, decode = row_of(inspection, "unet"), row_of(inspection, "vae.decode")
    assert (unet.calls, decode.calls) == (5, 2)
    assert unet.kinds[0] == ({"x": "3×4 float32", "mask": "3 float32"}, 3)
    assert unet.keywords == ["mask"]
    assert decode.kinds[0][0]["scale"] == "float 2.0"
    assert unet.modes == ["eval"]
    (varying,) = unet.varying
    assert str(varying) == "dimension 0 of x and mask: 2 to 3"
    assert (unet.device_s is not None) == (device.type == "cuda")
    assert 0 < inspection.share(unet) <= 1.2
    assert inspection.rows[row_of(inspection, "unet.first").inside or 0] is unet


def test_a_parent_that_refuses_gives_way_to_its_children(device: torch.device) -> None:
    inspection = gw.inspect(Pipeline(device), calls(device))
    unet = row_of(inspection, "unet")
    assert unet.takes_part is False
    assert "reads a value" in unet.reason
    parts = [str(row.target) for row in inspection.parts()]
    assert parts == ["unet.first", "unet.second", "vae.decode"]
    assert row_of(inspection, "vae.inner").takes_part is None


def test_the_program_is_as_it_was(device: torch.device) -> None:
    program = Pipeline(device)
    before = [{**vars(m)} for m in (*program.unet.modules(), *program.vae.modules())]
    gw.inspect(program, calls(device))
    after = [{**vars(m)} for m in (*program.unet.modules(), *program.vae.modules())]
    assert [each.keys() for each in before] == [each.keys() for each in after]
    assert program.unet.forward.__func__ is Reads.forward  # type: ignore[attr-defined]  # a method


def test_a_call_that_raises_leaves_the_program_as_it_was(device: torch.device) -> None:
    program = Pipeline(device)
    with pytest.raises(RuntimeError):
        gw.inspect(
            program, [(torch.rand(2, 4, device=device),), (torch.rand(2, 5, device=device),)]
        )
    assert not {"forward", "decode"} & {*vars(program.vae), *vars(program.unet)}


def test_modes_that_keep_a_module_from_taking_part_are_told(device: torch.device) -> None:
    program = Pipeline(device)
    program.vae.train()
    decode = row_of(gw.inspect(program, calls(device)), "vae.decode")
    assert decode.modes == ["train"]
    assert decode.reason == "it is in train mode: call .eval()"
    model = Decodes().eval().to(device)
    alone = gw.inspect(model, calls(device)[:1])
    assert alone.rows[0].modes == ["eval", "gradients"]
    assert [str(row.target) for row in alone.parts()] == ["Decodes"]


def shared(device: torch.device) -> tuple[Any, list[Any]]:
    inner = Inner().eval().to(device)
    holder = {"one": [inner], "two": inner}
    return lambda x: holder["one"][0](x) + holder["two"](x), [torch.rand(2, 4, device=device)]


def recursive(device: torch.device) -> tuple[Any, list[Any]]:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self(x, depth - 1) + 1 if depth else x

    return Calls().eval(), [torch.rand(2, 4, device=device)]


def on_a_thread(device: torch.device) -> tuple[Any, list[Any]]:
    inner = Inner().eval().to(device)

    def program(x: torch.Tensor) -> None:
        thread = threading.Thread(target=inner, args=(x,))
        thread.start()
        thread.join()

    return program, [torch.rand(2, 4, device=device)]


@pytest.mark.parametrize(
    ("make", "methods"), [(shared, {"": 2}), (recursive, {"": 3}), (on_a_thread, {"": 1})]
)
def test_all_calls_of_a_module_are_counted(
    make: Callable[..., tuple[Any, list[Any]]], methods: dict[str, int], device: torch.device
) -> None:
    program, given = make(device)
    inspection = gw.inspect(program, given)
    assert sum(row.calls for row in inspection.rows) == methods[""]


def test_modules_are_found_in_all_that_can_hold_them() -> None:
    class Holder:
        def __init__(self) -> None:
            self.own, self._hidden = nn.Linear(1, 1), [nn.Linear(2, 2), {"key": nn.Linear(3, 3)}]

    model, holder = nn.Linear(4, 4), Holder()

    def names(x: torch.Tensor) -> Any:
        return model(x)

    assert [*modules_inside(holder)] == ["own", "_hidden[0]", "_hidden[1]['key']"]
    assert [*modules_inside([model])] == ["[0]"]
    assert [*modules_inside(names)] == ["model"]
    assert "model" in modules_inside(holder, lambda program, call: model(call))
    assert [*modules_inside(model.forward)] == ["Linear"]


def test_it_is_shown_in_80_columns_as_json_and_in_a_notebook(
    device: torch.device, tmp_path: Path
) -> None:
    inspection = gw.inspect(Pipeline(device), calls(device))
    text = str(inspection)
    assert max(map(len, text.splitlines())) <= 80 or "/" in text  # A path is not broken.
    assert "cannot take part: " in text
    assert "vae.inner" not in text, "it is inside of what takes part"
    found = json.loads(inspection.to_json())
    assert found["schema"] == "graphwright.inspect"
    assert len(found["rows"]) == len(inspection.rows)
    inspection.save(tmp_path / "it.json")
    assert json.loads((tmp_path / "it.json").read_text("utf-8")) == found
    assert "<table>" in inspection._repr_html_()
    assert repr(inspection) == "<ProgramInspection Pipeline, 3 parts that can be captured or tuned>"


def test_mistakes_name_what_to_do() -> None:
    with pytest.raises(gw.OptionError, match="calls is empty"):
        gw.inspect(nn.Linear(1, 1), [])
    with pytest.raises(gw.OptionError, match="No module was found inside of"):
        gw.inspect(lambda x: x + 1, [torch.ones(1)])
    with pytest.raises(gw.OptionError):
        gw.inspect(object(), [torch.ones(1)])


def made(kind: str, device: torch.device) -> nn.Module:
    model, x = Inner().eval().to(device), torch.rand(2, 4, device=device)
    if kind in ("script", "trace"):
        with torch.no_grad():
            scripted: nn.Module = (
                torch.jit.script(model) if kind == "script" else torch.jit.trace(model, x)
            )
        return scripted
    graphed: nn.Module = gw.graph(model) if kind == "graph" else gw.fuse(model)
    return graphed


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "trace", "graph", "fuse"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_cannot_be_looked_into_is_named(kind: str, inside: bool, device: torch.device) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.own = made(kind, device), Inner().to(device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.part(x))

    part = Outer().eval() if inside else made(kind, device)

    def program(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return part(x)

    x = torch.rand(2, 4, device=device)
    before, expected = type(part), program(x)
    inspection = gw.inspect(program, [x])
    (place,) = inspection.left_out
    assert place == ("part.part" if inside else "part")
    assert f"Not looked into: {place} (" in str(inspection)
    assert bool(inspection.rows) == inside
    assert type(part) is before
    torch.testing.assert_close(program(x), expected)


def test_calls_without_tensors_on_other_threads_take_no_others_out(device: torch.device) -> None:
    inner = Inner().eval().to(device)

    def work(x: torch.Tensor) -> None:
        for _ in range(50):
            inner.width()
            inner(x)

    def program(x: torch.Tensor) -> None:
        threads = [threading.Thread(target=work, args=(x,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    (row,) = gw.inspect(program, [torch.rand(2, 4, device=device)]).rows
    assert (str(row.target), row.calls) == ("inner", 200)
