"""Instances: batches that are computed side by side, each by a copy of the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from served import Encoder, config
from test_runner import assert_answers, request, run, serving
from torch import nn

import graphwright as gw
from graphwright.serving import instances
from graphwright.serving.instances import Instance, best_count, problem
from graphwright.serving.model_config import ModelConfig
from graphwright.serving.prepared_model import PreparedModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Keeps(nn.Module):
    """Keeps what it is given in a buffer of its own, and answers from there a moment later."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("kept", torch.zeros(1, 3))
        self.slow = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.zeros_like(x)
        self.kept.copy_(x)
        if self.slow:
            time.sleep(0.01)
        found: torch.Tensor = self.linear(self.kept)
        return found


def several(model: nn.Module, *args: torch.Tensor, count: int = 2) -> ModelConfig:
    return ModelConfig(model.eval(), args, instances=count)


def test_copies_have_the_parameters_and_buffers_of_their_own() -> None:
    model = Keeps().eval()
    first, second, third = instances.instances(Instance(model), 3, threads=7)
    assert first.call is model
    assert [each.threads for each in (first, second, third)] == [2, 2, 2]
    for each in (second, third):
        assert isinstance(each.call, Keeps)
        assert each.call.linear.weight is model.linear.weight
        assert each.call.kept is not model.kept
        assert each.lock is not first.lock


def test_a_model_that_keeps_what_it_computes_with_answers_each_request_rightly() -> None:
    """Without copies, one call would answer from what another has put there."""
    model = Keeps()
    given = several(model, torch.randn(1, 3), count=4)
    prepared = PreparedModel(given)
    for each in prepared.instances:
        assert isinstance(each.call, Keeps)
        each.call.slow = True
    assert _wrong(prepared) == 0
    shared = [replace(each, call=model) for each in prepared.instances]
    prepared.instances[:] = shared
    assert _wrong(prepared) > 0, "the test would not see it"


def _wrong(prepared: PreparedModel) -> int:
    """How many of the calls that overlap are answered with something else."""
    wrong = []

    def ask(number: int) -> None:
        x = torch.full((1, 3), float(number))
        (part,) = prepared.parts({"x": x})
        for _ in range(5):
            instance = prepared.instances[number]
            (answer,) = prepared.compute([part], (1,), instance=instance)
            expected = instance.call.linear(x)  # type: ignore[attr-defined]  # Keeps
            wrong.append(not torch.allclose(answer["output"], expected))

    calls = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    return sum(wrong)


MEETING = threading.Barrier(2)


class Meets(Encoder):
    """A call whose first token is 77 ends only while another one is there."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        if ids[0, 0] == 77:
            MEETING.wait(20)
        return super().forward(ids, mask)


def test_two_batches_are_computed_side_by_side() -> None:
    async def test() -> None:
        given = replace(config(Meets), instances=2)
        asked = [request(seed=1), request(seed=2)]
        async with serving(given) as repository:
            tasks = []
            for each in asked:
                each.inputs["ids"][0, 0] = 77
                tasks.append(asyncio.create_task(repository.infer(each)))
                await asyncio.sleep(0.05)  # So that they are not one batch.
            answers = await asyncio.gather(*tasks)
            assert repository.statistics("net", "")[0].execution_count == 2
        for each, answer in zip(asked, answers, strict=True):
            expected = Encoder.forward(given.model, **each.inputs)  # type: ignore[arg-type]  # a Meets
            for name, value in answer.outputs.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)

    run(test)


def test_hundreds_of_requests_are_answered_by_all_instances() -> None:
    async def test() -> None:
        given = replace(config(), instances=3)
        asked = [request(1 + n % 3, 1 + n % 16, n) for n in range(300)]
        async with serving(given) as repository:
            (prepared,) = repository.prepared().values()
            used: set[int] = set()
            compute = prepared.compute

            def seen(parts: Any, sizes: Any, passed: Any, instance: Instance) -> Any:
                used.add(id(instance))
                return compute(parts, sizes, passed, instance)

            prepared.compute = seen  # type: ignore[method-assign]  # to see by what it is called
            answers = await asyncio.gather(*map(repository.infer, asked))
        for each, answer in zip(asked, answers, strict=True):
            assert_answers(given.model, each, answer.outputs)
        assert used == {*map(id, prepared.instances)}
        assert len(used) == 3

    run(test)


def test_each_has_its_share_of_the_threads() -> None:
    seen: set[int] = set()

    class Sees(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return x * 2

    prepared = PreparedModel(several(Sees(), torch.randn(1, 3)), threads=4)
    seen.clear()
    (part,) = prepared.parts({"x": torch.randn(1, 3)})
    for instance in prepared.instances:
        prepared.compute([part], (1,), instance=instance)
    assert seen == {2}


def test_what_is_being_computed_is_answered_before_a_model_is_closed() -> None:
    async def test() -> None:
        model = Keeps()
        given = several(model, torch.randn(1, 3))
        async with serving(given) as repository:
            (prepared,) = repository.prepared().values()
            for each in prepared.instances:
                each.call.slow = True  # type: ignore[attr-defined]  # Keeps
            x = torch.randn(1, 3)
            asked = replace(request(), inputs={"x": x})
            tasks = []
            for _ in range(2):
                tasks.append(asyncio.create_task(repository.infer(asked)))
                await asyncio.sleep(0.003)
        for task in tasks:
            answer = await task
            torch.testing.assert_close(answer.outputs["output"], model.linear(x))

    run(test)


# How many there are.


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0}, 4),  # Threads give nothing.
        ({1: 1.0, 2: 2.0, 4: 4.0}, 1),  # Each thread gives all it can.
        ({1: 1.0, 2: 1.2, 4: 1.25}, 4),
        ({1: 1.0, 2: 1.2, 4: 1.3}, 2),  # A call of one of four would take too long.
        ({1: 1.0, 2: 1.6, 4: 1.6}, 1),
    ],
)
def test_as_many_as_pay(
    seconds: dict[int, float], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_seconds", lambda copies, works: seconds[len(copies)])
    assert best_count(Instance(nn.Linear(2, 2)), [], threads=4) == count


def test_a_process_with_other_things_to_do_has_one_by_default() -> None:
    assert len(PreparedModel(config()).instances) == 1


def test_a_process_of_the_server_s_own_has_as_many_as_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphwright.serving.prepared_model.best_count", lambda *_: 2)
    assert len(PreparedModel(config(), threads=4).instances) == 2
    assert len(PreparedModel(replace(config(), instances=1), threads=4).instances) == 1
    hooked = config()
    hooked.model.register_forward_hook(lambda *_: None)  # type: ignore[attr-defined]  # a module
    assert len(PreparedModel(hooked, threads=4).instances) == 1


class FailsAsACopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.copied = False

    def __deepcopy__(self, memo: dict[int, Any]) -> FailsAsACopy:
        found = FailsAsACopy()
        found.copied = True
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.copied:
            raise ValueError("there may be one of these")
        return x + 1


@pytest.mark.parametrize("count", [None, 2])
def test_a_copy_that_fails_holds_nobody_up(count: int | None) -> None:
    """The others wait for it at the beginning of each round."""
    x = torch.randn(1, 3)
    made = ModelConfig(FailsAsACopy().eval(), (x,), instances=count)
    if count is None:
        assert len(PreparedModel(made, threads=4).instances) == 1
    else:
        with pytest.raises(ValueError, match="there may be one"):
            PreparedModel(made, threads=4)


def test_a_model_is_copied_and_called_while_no_other_server_calls_it() -> None:
    first = PreparedModel(several(Keeps(), torch.randn(1, 3)))
    with ThreadPoolExecutor(1) as pool:
        with first.instances[0].lock:
            second = pool.submit(PreparedModel, first.config)
            with pytest.raises(TimeoutError):
                second.result(0.3)
        assert len(second.result(30).instances) == 2


def test_they_are_really_timed() -> None:
    works: list[Callable[[Callable[..., Any]], Any]] = [lambda call: call(torch.randn(2, 2))]
    assert best_count(Instance(nn.Linear(2, 2)), works, threads=2) in (1, 2)


class Loses(nn.Module):
    """Its copies are others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Loses:
        found = Loses()
        found.scale = 3.0
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_copies_that_answer_otherwise_are_refused_or_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(gw.GraphwrightError, match="by a copy of the model"):
        PreparedModel(several(Loses(), torch.randn(1, 3)))
    monkeypatch.setattr("graphwright.serving.prepared_model.best_count", lambda *_: 2)
    prepared = PreparedModel(ModelConfig(Loses().eval(), (torch.randn(1, 3),)), threads=4)
    assert len(prepared.instances) == 1
    assert any("one after the other" in note for note in prepared.notes)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_what_cannot_have_several_says_why() -> None:
    hooked = nn.Linear(3, 3)
    hooked.register_forward_hook(lambda *_: None)
    x = torch.randn(1, 3)
    for config_, told in (
        (several(Locked(), x), "cannot pickle"),
        (several(hooked, x), "hooks"),
        (ModelConfig(torch.relu, (x,), instances=2), "plain modules"),
        (ModelConfig(nn.Linear(3, 3), (x,), instances=0), "instances is 0"),
    ):
        with pytest.raises(gw.GraphwrightError, match=told):
            PreparedModel(config_)
    assert problem(nn.Linear(3, 3), torch.device("cuda")) is not None
    assert problem(nn.Linear(3, 3), CPU) is None
    # Where nobody asked for more, one that cannot be copied is served all the same.
    prepared = PreparedModel(ModelConfig(Locked().eval(), (x,)), threads=4)
    assert len(prepared.instances) == 1


# A model that changes after its copies were made.


def _attribute(model: Encoder) -> None:
    model.head.bias = nn.Parameter(torch.ones(5))


def _weight(model: Encoder) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2)


@pytest.mark.parametrize("change", [_attribute, _weight])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_changes_answers_as_it_is_now(change: Callable[[Encoder], None]) -> None:
    async def test() -> None:
        given = replace(config(), instances=3)
        asked = [request(1 + n % 3, 1 + n % 16, n) for n in range(40)]
        async with serving(given) as repository:
            (prepared,) = repository.prepared().values()
            await asyncio.gather(*map(repository.infer, asked))
            assert len(prepared.instances) == 3
            change(given.model)  # type: ignore[arg-type]  # an Encoder
            answers = await asyncio.gather(*map(repository.infer, asked))
            assert len(prepared.instances) == 1
            assert any("since the model changed" in note for note in prepared.notes)
        for each, answer in zip(asked, answers, strict=True):
            assert_answers(given.model, each, answer.outputs)  # type: ignore[arg-type]  # an Encoder

    run(test)


def test_a_model_that_its_own_calls_change_has_one_unless_more_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphwright.serving.prepared_model.best_count", lambda *_: 2)
    x = torch.randn(1, 3)
    assert len(PreparedModel(ModelConfig(Keeps().eval(), (x,)), threads=4).instances) == 1
    assert len(PreparedModel(several(Keeps(), x), threads=4).instances) == 2
