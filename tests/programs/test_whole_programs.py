"""Results of a whole program, as users get them: numbers, images, labels and texts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphwright.errors import VerificationError
from graphwright.programs.program_runs import run_of
from graphwright.programs.whole import WholeProgram

CPU = torch.device("cpu")


class Image:
    """Gives its pixels as images of Pillow do."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    @property
    def __array_interface__(self) -> Any:
        return self._pixels.__array_interface__


class Moving:
    """A program whose results are off by so much by now."""

    def __init__(self, made: Callable[[torch.Tensor], Any]) -> None:
        self.made, self.off = made, torch.zeros(64, 64)

    def __call__(self, x: torch.Tensor) -> Any:
        return self.made(x + self.off)

    def wrong(self, off: torch.Tensor) -> str | None:
        whole = WholeProgram(self, [X], [], lambda program, call: program(call), CPU)
        self.off = off
        return whole.difference()


torch.manual_seed(0)
X = torch.rand(64, 64)
ROUNDING = 1e-7 * torch.randn(64, 64)
WRONG = torch.zeros(64, 64)
WRONG[3, 5] = 0.02
RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "nested lists": lambda x: x.tolist(),
    "lists of several lengths": lambda x: [row.tolist()[: 8 + n] for n, row in enumerate(x)],
    "scores": lambda x: [{"label": "one", "score": row[5].item()} for row in x],
    "a number": lambda x: x[3, 5].item(),
    "an object": lambda x: SimpleNamespace(images=x.numpy(), flags=None),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_rounding_is_right_and_more_is_wrong(kind: str) -> None:
    assert Moving(RESULTS[kind]).wrong(ROUNDING) is None
    found = Moving(RESULTS[kind]).wrong(WRONG)
    assert found is not None
    assert "call 0" in found


LEVELS = (X * 200).round()


@pytest.mark.parametrize("made", [Image, lambda pixels: [Image(pixels)], lambda pixels: pixels])
def test_a_level_of_a_few_pixels_is_rounding(made: Callable[[Any], Any]) -> None:
    def wrong(off: torch.Tensor) -> str | None:
        def pixels(x: torch.Tensor) -> Any:
            levels = (LEVELS + x - X).round().numpy().astype(np.uint8)
            return made(np.stack([levels, LEVELS.numpy().astype(np.uint8), levels], -1))

        return Moving(pixels).wrong(off)

    off = torch.zeros(64, 64)
    off[0, :50] = 1
    assert wrong(off) is None
    off[1:3] = 1
    assert wrong(off) is not None, "many pixels are off"
    off = torch.zeros(64, 64)
    off[0, 0] = 3
    assert wrong(off) is not None, "a pixel is far off"


def test_labels_and_tokens_have_to_be_equal() -> None:
    for made in (lambda x: x.argmax().item(), lambda x: [str(x.argmax().item())]):
        off = torch.zeros(64, 64)
        assert Moving(made).wrong(off) is None
        off[2, 2] = 5
        assert Moving(made).wrong(off) is not None


EQUAL: list[tuple[Any, Any]] = [
    ([[0.9, 3000, 5]], [[0.9, 3000, 6]]),
    ([0.9, 50000], [0.9, 50001]),
    ([1e4, True], [1e4, False]),
    ([0.9, True], [0.9, 1]),
    (1e39, 1e300),
    ([0.9, 5.0], torch.tensor([0.9, 5.0])),
    ([0.9, 5.0], (0.9, 5.0)),
    (torch.arange(100).to(torch.uint8), torch.arange(100).to(torch.uint8).roll(1)),
    (np.eye(64, dtype=np.uint8), np.eye(64, dtype=np.uint8) + np.eye(64, k=1, dtype=np.uint8)),
    (np.ones((8, 8, 3), np.uint8), np.zeros((8, 8, 3), np.uint8)),
    (float("nan"), 0.0),
    ({"score": 0.5, "label": "one"}, {"score": 0.5, "label": "two"}),
]


@pytest.mark.parametrize(("expected", "found"), EQUAL)
@pytest.mark.parametrize("precision", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_no_rounding_is_wrong(expected: Any, found: Any, precision: torch.dtype) -> None:
    results = [expected, expected, expected, found]
    arguments = ([0], [], lambda program, call: program.pop(0), CPU, precision)
    whole = WholeProgram(results, *arguments)
    assert whole.difference() is None
    assert whole.difference() is not None


def test_generators_among_the_arguments_draw_the_same_in_each_run() -> None:
    def program(generator: torch.Generator, others: list[torch.Generator]) -> torch.Tensor:
        return torch.rand(3, generator=generator) + torch.rand(3, generator=others[0])

    call = {"generator": torch.Generator(), "others": [torch.Generator().manual_seed(3)]}
    state = call["generator"].get_state()
    with pytest.raises(VerificationError):
        WholeProgram(program, [call], [], lambda program, call: program(**call), CPU)
    call["generator"].set_state(state)
    whole = WholeProgram(program, [call], [], run_of(program, None), CPU)
    assert whole.difference() is None
    assert torch.equal(call["generator"].get_state(), state), "as before it"


def test_pipelines_show_no_bars_while_they_are_run() -> None:
    class DiffusionPipeline:
        """As diffusers has them."""

        __module__ = "diffusers.pipelines"

        def set_progress_bar_config(self, **given: Any) -> None:
            self._progress_bar_config = given

        def __call__(self) -> Any:
            return dict(self._progress_bar_config)

    pipeline = DiffusionPipeline()
    pipeline.set_progress_bar_config(leave=False)
    assert run_of(pipeline, None)(pipeline, ()) == {"leave": False, "disable": True}
    assert pipeline() == {"leave": False}
