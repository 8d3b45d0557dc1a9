"""ModelRunner and Repository: each request gets its own answer, whatever happens beside it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from served import AmongRows, Encoder, Picky, config, made, sample

import graphwright as gw
from graphwright.serving.model_config import ModelConfig
from graphwright.serving.options import Source
from graphwright.serving.prepared_model import PreparedModel
from graphwright.serving.protocol import (
    ErrorKind,
    InferRequest,
    RequestError,
    Strings,
    TensorMetadata,
)
from graphwright.serving.repository import Repository


def request(rows: int = 1, length: int = 8, seed: int = 0, **options: Any) -> InferRequest:
    ids, mask = sample(rows, length, seed)
    return InferRequest("net", "", str(seed), {"ids": ids, "mask": mask}, **options)


@asynccontextmanager
async def serving(source: Source | ModelConfig, **options: Any) -> AsyncIterator[Repository]:
    made_by: Source = (lambda: source) if isinstance(source, ModelConfig) else source
    chosen = {"max_queue": 1000, "drain_s": 10.0, **options}
    repository = Repository({"net": made_by}, **chosen)
    await repository.load_all()
    try:
        yield repository
    finally:
        await repository.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    before = threading.active_count()
    asyncio.run(asyncio.wait_for(test(), 60))
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def assert_answers(model: torch.nn.Module, asked: InferRequest, outputs: Any) -> None:
    with torch.no_grad():
        expected = model(asked.inputs["ids"], asked.inputs["mask"])
    assert outputs.keys() == expected.keys()
    for name, value in outputs.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [None, AmongRows])
def test_hundreds_of_requests_at_once_get_their_own_answers(kind: Any) -> None:
    async def test() -> None:
        given = config() if kind is None else config(kind)
        asked = [request(1 + n % 3, 1 + n % 16, n) for n in range(300)]
        async with serving(given) as repository:
            answers = await asyncio.gather(*map(repository.infer, asked))
            counted = repository.statistics("net", "")[0]
        for each, answer in zip(asked, answers, strict=True):
            assert answer.id == each.id
            assert_answers(given.model, each, answer.outputs)
        assert counted.success.count == 300
        assert counted.inference_count == sum(1 + n % 3 for n in range(300))
        batches = counted.execution_count
        assert batches == 300 if kind is AmongRows else batches < 60

    run(test)


def test_a_request_that_fails_does_not_fail_its_batch() -> None:
    async def test() -> None:
        given = config(Picky)
        asked = [request(seed=n) for n in range(20)]
        for bad in (3, 11):
            asked[bad].inputs["ids"][0, 0] = 0
        async with serving(given) as repository:
            answers = await asyncio.gather(*map(repository.infer, asked), return_exceptions=True)
            statistics = repository.statistics("", "")[0]
        for number, (each, answer) in enumerate(zip(asked, answers, strict=True)):
            if number in (3, 11):
                assert isinstance(answer, RequestError)
                assert answer.kind is ErrorKind.FAILED
                assert "a row begins with 0" in str(answer)
            else:
                assert_answers(given.model, each, answer.outputs)
        assert (statistics.success.count, statistics.fail.count) == (18, 2)

    run(test)


class _Panic(BaseException):
    """What PyO3 raises for a panic in Rust is no Exception either."""


BEYOND_EXCEPTIONS = [_Panic, SystemExit, asyncio.CancelledError, GeneratorExit]


@pytest.mark.parametrize("kind", BEYOND_EXCEPTIONS)
def test_an_error_that_is_no_exception_fails_its_request_and_no_other(
    kind: type[BaseException],
) -> None:
    class Raising(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
            if bool((ids[:, 0] == 0).any()):
                raise kind("a row begins with 0")
            return super().forward(ids, mask)

    async def test() -> None:
        given = config(Raising)
        asked = [request(seed=n) for n in range(8)]
        asked[3].inputs["ids"][0, 0] = 0
        async with serving(given) as repository:
            found = await asyncio.gather(*map(repository.infer, asked), return_exceptions=True)
            for number, (each, answer) in enumerate(zip(asked, found, strict=True)):
                if number == 3:
                    assert isinstance(answer, RequestError)
                    assert (answer.kind, "a row begins" in str(answer)) == (ErrorKind.FAILED, True)
                else:
                    assert_answers(given.model, each, answer.outputs)
            assert (await repository.infer(request())).outputs

    run(test)


@pytest.mark.parametrize("kind", BEYOND_EXCEPTIONS)
@pytest.mark.parametrize("stage", ["preprocess", "postprocess"])
def test_an_error_in_preprocess_that_is_no_exception_fails_its_request(
    stage: str, kind: type[BaseException]
) -> None:
    def raising(_: Any) -> Any:
        raise kind("oh")

    async def test() -> None:
        given = config()
        changed = {"preprocess": raising} if stage == "preprocess" else {"postprocess": raising}
        async with serving(replace(given, **changed)) as repository:
            with pytest.raises(RequestError, match=f"{stage}ing failed") as caught:
                await asyncio.wait_for(repository.infer(request()), 5)
            assert caught.value.kind is ErrorKind.FAILED

    run(test)


class _Slow(torch.nn.Module):
    """Waits until it is let go, once its sizes were measured."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert self.go.wait(30)
        return ids * mask


def slow() -> tuple[_Slow, ModelConfig]:
    model = _Slow().eval()
    return model, ModelConfig(model, sample(), dynamic_shapes=config().dynamic_shapes)


async def computing(repository: Repository) -> asyncio.Task[Any]:
    """A request that is being computed."""
    first = asyncio.create_task(repository.infer(request()))
    await asyncio.sleep(0.05)
    return first


def test_more_than_may_wait_are_refused_with_when_to_ask_again() -> None:
    async def test() -> None:
        model, given = slow()
        async with serving(given, max_queue=3) as repository:
            model.go.clear()
            first = await computing(repository)
            waiting = [asyncio.create_task(repository.infer(request(seed=n))) for n in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as caught:
                await repository.infer(request())
            assert caught.value.kind is ErrorKind.OVERLOADED
            assert caught.value.retry_after_s is not None
            model.go.set()
            await asyncio.gather(first, *waiting)

    run(test)


def test_requests_in_preprocess_are_counted_among_those_that_wait() -> None:
    async def test() -> None:
        go = threading.Event()

        def waiting(inputs: Any) -> Any:
            assert go.wait(30)
            return inputs

        given = config()
        async with serving(replace(given, preprocess=waiting), max_queue=3) as repository:
            asked = [request(seed=n) for n in range(3)]
            answers = [asyncio.create_task(repository.infer(each)) for each in asked]
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as caught:
                await repository.infer(request())
            assert caught.value.kind is ErrorKind.OVERLOADED
            go.set()
            for each, answer in zip(asked, await asyncio.gather(*answers), strict=True):
                assert_answers(given.model, each, answer.outputs)

    run(test)


def test_a_request_that_waits_beyond_its_deadline_is_dropped_and_never_computed() -> None:
    async def test() -> None:
        model, given = slow()
        async with serving(given) as repository:
            model.go.clear()
            first = await computing(repository)
            begin = time.monotonic()
            with pytest.raises(RequestError) as caught:
                await repository.infer(request(deadline=begin + 0.1))
            assert caught.value.kind is ErrorKind.TOO_LATE
            assert time.monotonic() - begin > 0.09
            with pytest.raises(RequestError, match="before the deadline"):
                await repository.infer(request(deadline=begin))
            model.go.set()
            await first
            assert repository.statistics("net", "")[0].inference_count == 1

    run(test)


def test_nobody_waits_for_ever_behind_requests_with_near_deadlines() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return x * scale

    def scaled(scale: float, deadline: float | None = None) -> InferRequest:
        inputs = {"x": torch.ones(1, 4), "scale": torch.full((4,), scale)}
        return InferRequest("net", "", "", inputs, deadline=deadline)

    async def test() -> None:
        shapes: Any = {"x": {0: "batch"}, "scale": None}
        args = (torch.randn(1, 4), torch.ones(4))
        given = ModelConfig(Scaled().eval(), args, dynamic_shapes=shapes, instances=1)
        async with serving(given) as repository:
            going = True

            async def client() -> None:
                while going:
                    with contextlib.suppress(RequestError):
                        await repository.infer(scaled(1.0, time.monotonic() + 0.04))

            clients = [asyncio.create_task(client()) for _ in range(6)]
            await asyncio.sleep(0.1)
            try:
                answer = await asyncio.wait_for(repository.infer(scaled(3.0)), 5)
            finally:
                going = False
            await asyncio.gather(*clients)
        assert answer.outputs["output"].tolist() == [[3.0] * 4]

    run(test)


def test_a_client_that_goes_away_is_not_computed_for() -> None:
    async def test() -> None:
        model, given = slow()
        async with serving(given) as repository:
            model.go.clear()
            first = await computing(repository)
            gone = asyncio.create_task(repository.infer(request(seed=1)))
            stays = asyncio.create_task(repository.infer(request(seed=2)))
            await asyncio.sleep(0.01)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            model.go.set()
            await asyncio.gather(first, stays)
            assert repository.statistics("net", "")[0].inference_count == 2

    run(test)


LARGE = 70  # rows: two calls of 32, and one of 6


def test_a_request_of_more_rows_than_any_size_is_answered_in_parts() -> None:
    async def test() -> None:
        given = config()
        large = [request(LARGE + n, 9 + n, n) for n in range(3)]
        small = [request(1, 1 + n % 16, 10 + n) for n in range(40)]
        asked = [*large[:2], *small, large[2]]
        async with serving(given) as repository:
            answers = await asyncio.gather(*map(repository.infer, asked))
            counted = repository.statistics("net", "")[0]
            text = repository.metrics()[0].decode()
        for each, answer in zip(asked, answers, strict=True):
            assert_answers(given.model, each, answer.outputs)
        assert counted.inference_count == 3 * LARGE + 3 + 40
        assert max(counted.batches) <= 32
        stages = [counted.queue, counted.compute_input, counted.compute_infer]
        assert [each.count for each in (counted.success, *stages)] == [43] * 4
        assert 'graphwright_stage_seconds_count{model="net",stage="queue",version="1"} 43' in text

    run(test)


def test_a_request_in_parts_is_taken_where_one_more_may_wait() -> None:
    async def test() -> None:
        given = config()
        async with serving(given, max_queue=1) as repository:
            asked = request(LARGE)
            assert_answers(given.model, asked, (await repository.infer(asked)).outputs)

    run(test)


@pytest.mark.parametrize("why", ["the client goes", "the deadline passes"])
def test_a_request_in_parts_that_nobody_waits_for_is_computed_no_further(why: str) -> None:
    async def test() -> None:
        model, given = slow()
        async with serving(given) as repository:
            model.go.clear()
            late = time.monotonic() + 0.2 if why == "the deadline passes" else None
            large = asyncio.create_task(repository.infer(request(LARGE, deadline=late)))
            await asyncio.sleep(0.05)
            if late is None:
                large.cancel()
            (found,) = await asyncio.gather(large, return_exceptions=True)
            kind = asyncio.CancelledError if late is None else RequestError
            assert isinstance(found, kind)
            model.go.set()
            assert (await repository.infer(request())).outputs
            counted = repository.statistics("net", "")[0]
        assert counted.inference_count == 32 + 1
        assert (counted.success.count, counted.fail.count) == (1, 1)

    run(test)


def test_a_request_fails_as_a_whole_with_one_of_its_parts_and_no_other_does() -> None:
    async def test() -> None:
        given = config(Picky)
        large, others = request(LARGE), [request(seed=n) for n in range(1, 9)]
        large.inputs["ids"][LARGE - 1, 0] = 0  # In its last part.
        async with serving(given) as repository:
            found = await asyncio.gather(
                *map(repository.infer, [large, *others]), return_exceptions=True
            )
            counted = repository.statistics("net", "")[0]
        assert isinstance(found[0], RequestError)
        assert found[0].kind is ErrorKind.FAILED
        for each, answer in zip(others, found[1:], strict=True):
            assert_answers(given.model, each, answer.outputs)
        assert (counted.success.count, counted.fail.count) == (8, 1)

    run(test)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "rows", "length", "words"),
    [(AmongRows, 33, 8, "is 33; it may be 1 to 32"), (Encoder, 33, 17, "is 17; it may be 1 to 16")],
)
def test_more_rows_that_are_not_apart_and_greater_lengths_are_refused(
    kind: Any, rows: int, length: int, words: str
) -> None:
    async def test() -> None:
        async with serving(config(kind)) as repository:
            with pytest.raises(RequestError, match=words) as caught:
                await repository.infer(request(rows, length))
            assert caught.value.kind is ErrorKind.INVALID

    run(test)


def test_draining_answers_what_was_asked_and_takes_no_more() -> None:
    async def test() -> None:
        model, given = slow()
        async with serving(given) as repository:
            model.go.clear()
            asked = [asyncio.create_task(repository.infer(request(seed=n))) for n in range(5)]
            await asyncio.sleep(0.05)
            draining = asyncio.create_task(repository.drain())
            await asyncio.sleep(0)
            assert not repository.is_ready()
            with pytest.raises(RequestError) as caught:
                await repository.infer(request())
            assert caught.value.kind is ErrorKind.UNAVAILABLE
            assert not draining.done()
            model.go.set()
            await draining
            assert all(task.done() and not task.exception() for task in asked)

    run(test)


@pytest.mark.parametrize("stage", ["preprocess", "model", "a model that was replaced"])
def test_requests_that_take_longer_than_the_drain_are_refused(stage: str) -> None:
    async def test() -> None:
        model, given = slow()
        go = threading.Event()

        def waiting(inputs: Any) -> Any:
            assert go.wait(30)
            return inputs

        if stage == "preprocess":
            given = replace(config(), preprocess=waiting)
        models = [given, config()]
        repository = Repository({"net": lambda: models.pop(0)}, max_queue=9, drain_s=0.2)
        await repository.load_all()
        model.go.clear()
        loading: asyncio.Task[Any] | None = None
        if stage == "a model that was replaced":
            asked, loading = await loaded_beside(repository)
        else:
            asked = await computing(repository)
        begin = time.monotonic()
        await repository.drain()
        with pytest.raises(RequestError, match="being unloaded") as caught:
            await asyncio.wait_for(asyncio.shield(asked), 1)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        assert not await asyncio.wait_for(repository.close(), 5)
        assert time.monotonic() - begin < 3
        go.set()
        model.go.set()
        if loading is not None:
            await loading

    run(test)


def test_a_model_is_loaded_again_without_losing_a_request() -> None:
    async def test() -> None:
        models = [made()]

        def source() -> ModelConfig:
            return replace(config(), model=models[-1])

        async with serving(source) as repository:
            new = made()
            with torch.no_grad():
                new.head.weight.add_(1)
            answers: list[tuple[InferRequest, Any]] = []
            going = True

            async def client(number: int) -> None:
                while going:
                    asked = request(1, 1 + len(answers) % 16, len(answers))
                    answers.append((asked, await repository.infer(asked)))

            clients = [asyncio.create_task(client(n)) for n in range(8)]
            await asyncio.sleep(0.1)
            models.append(new)
            await repository.load("net", {})
            from_here = len(answers)
            await asyncio.sleep(0.1)
            going = False
            await asyncio.gather(*clients)
        by_new = []
        for asked, answer in answers:
            try:
                assert_answers(models[0], asked, answer.outputs)
                by_new.append(False)
            except AssertionError:
                assert_answers(new, asked, answer.outputs)
                by_new.append(True)
        assert not by_new[0]
        assert all(by_new[from_here + 8 :])
        assert len(by_new) > from_here + 8

    run(test)


async def loaded_beside(repository: Repository) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """A request that the old model computes, and the load that waits for its answer."""
    asked = await computing(repository)
    before = repository._entries["net"].runner
    loading = asyncio.create_task(repository.load("net", {}))
    while repository._entries["net"].runner is before:
        await asyncio.sleep(0.01)
    return asked, loading


def test_what_is_computed_when_its_model_is_closed_is_answered() -> None:
    async def test() -> None:
        model, given = slow()
        models = [given, config()]
        async with serving(lambda: models.pop(0), drain_s=0.05) as repository:
            model.go.clear()
            asked, loading = await loaded_beside(repository)
            await asyncio.sleep(0.1)  # It is waited for no longer.
            model.go.set()
            await loading
            assert (await asked).outputs

    run(test)


@pytest.mark.parametrize("client_goes", [False, True])
def test_the_end_of_the_server_waits_for_a_model_that_was_just_replaced(client_goes: bool) -> None:
    async def test() -> None:
        model, given = slow()
        models = [given, config()]
        async with serving(lambda: models.pop(0)) as repository:
            model.go.clear()
            asked, loading = await loaded_beside(repository)
            if client_goes:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
            draining = asyncio.create_task(repository.drain())
            await asyncio.sleep(0.05)
            assert not draining.done()
            model.go.set()
            await draining
            assert (await asked).outputs
            await asyncio.gather(loading, return_exceptions=True)
        assert not repository._retiring

    run(test)


def test_the_end_of_the_server_during_a_load_leaves_nothing() -> None:
    async def test() -> None:
        begun, go = threading.Event(), threading.Event()
        first = True

        def source() -> ModelConfig:
            nonlocal first
            if not first:
                begun.set()
                assert go.wait(30)
            first = False
            return config()

        async with serving(source) as repository:
            loading = asyncio.create_task(repository.load("net", {}))
            await asyncio.to_thread(begun.wait, 30)
            assert (await repository.infer(request())).outputs
            await repository.drain()
            await repository.close()
            go.set()
            with pytest.raises(RequestError, match="about to end") as caught:
                await loading
            assert caught.value.kind is ErrorKind.UNAVAILABLE
            assert repository._entries["net"].runner is None

    run(test)


def test_a_model_is_unloaded_and_loaded() -> None:
    async def test() -> None:
        fails = False

        def source() -> ModelConfig:
            if fails:
                raise ValueError("no such file")
            return config()

        async with serving(source) as repository:
            assert [each.state for each in repository.index(False)] == ["READY"]
            await repository.unload("net")
            assert [each.state for each in repository.index(False)] == ["UNAVAILABLE"]
            assert repository.index(True) == []
            assert not repository.is_ready()
            with pytest.raises(RequestError) as caught:
                await repository.infer(request())
            assert caught.value.kind is ErrorKind.UNAVAILABLE
            fails = True
            with pytest.raises(RequestError, match="no such file"):
                await repository.load("net", {})
            fails = False
            await repository.load("net", {})
            assert (await repository.infer(request())).outputs
            fails = True  # What answers goes on answering.
            with pytest.raises(RequestError, match="no such file"):
                await repository.load("net", {})
            assert (await repository.infer(request())).outputs

    run(test)


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("other", "", "no model 'other'; the server has net"),
        ("net", "2", "no version '2'"),
        ("o" * 10_000, "", "no model 'ooo.*; the server has net"),
    ],
)
def test_what_is_not_there_is_named(name: str, version: str, words: str) -> None:
    async def test() -> None:
        async with serving(config()) as repository:
            with pytest.raises(RequestError, match=words) as caught:
                await repository.infer(replace(request(), model=name, version=version))
            assert caught.value.kind is ErrorKind.NOT_FOUND
            assert len(str(caught.value)) < 500

    run(test)


def test_texts_are_preprocessed_beside_the_loop_and_answers_postprocessed() -> None:
    loop_thread = threading.get_ident()

    def ids_of(inputs: Any) -> dict[str, torch.Tensor]:
        assert threading.get_ident() != loop_thread
        texts = inputs["text"].values
        if any(len(text) > 16 for text in texts):
            raise ValueError("a text has more than 16 letters")
        longest = max(map(len, texts))
        rows = [list(text) + [0] * (longest - len(text)) for text in texts]
        ids = torch.tensor(rows) % 100
        return {"ids": ids, "mask": (ids > 0).long()}

    def labels_of(outputs: Any) -> dict[str, Strings]:
        best = outputs["logits"].argmax(1).tolist()
        return {"label": Strings((len(best),), tuple(b"%d" % each for each in best))}

    async def test() -> None:
        given = replace(
            config(),
            preprocess=ids_of,
            postprocess=labels_of,
            inputs=[TensorMetadata("text", "BYTES", (-1,))],
            outputs=[TensorMetadata("label", "BYTES", (-1,))],
        )
        async with serving(given) as repository:
            asked = [
                InferRequest("net", "", "", {"text": Strings((1,), (b"a" * n,))})
                for n in range(1, 17)
            ]
            answers = await asyncio.gather(*map(repository.infer, asked))
            for each, answer in zip(asked, answers, strict=True):
                inputs = ids_of_here(each.inputs["text"])
                with torch.no_grad():
                    best = given.model(**inputs)["logits"].argmax(1).item()
                assert answer.outputs["label"] == Strings((1,), (b"%d" % best,))
            with pytest.raises(RequestError, match="more than 16 letters") as caught:
                await repository.infer(
                    InferRequest("net", "", "", {"text": Strings((1,), (b"a" * 17,))})
                )
            assert caught.value.kind is ErrorKind.INVALID

    def ids_of_here(text: Any) -> dict[str, torch.Tensor]:
        ids = torch.tensor([list(value) for value in text.values]) % 100
        return {"ids": ids, "mask": torch.ones_like(ids)}

    run(test)


def test_metrics_say_what_happened() -> None:
    async def test() -> None:
        async with serving(config()) as repository:
            await asyncio.gather(*(repository.infer(request(1, 5, n)) for n in range(9)))
            with pytest.raises(RequestError):
                await repository.infer(replace(request(), outputs=("none",)))
            text = repository.metrics()[0].decode()
        of = 'model="net",'
        assert f'graphwright_requests_total{{{of}outcome="answered",version="1"}} 9.0' in text
        assert f'graphwright_requests_total{{{of}outcome="invalid",version="1"}} 1.0' in text
        assert f'graphwright_elements_total{{kind="requested",{of}version="1"}} 45.0' in text
        assert f'graphwright_stage_seconds_count{{{of}stage="queue",version="1"}} 9.0' in text
        assert "graphwright_batch_rows_bucket" in text

    run(test)


def test_only_the_calls_of_requests_are_counted_and_each_of_them_once() -> None:
    def counted(repository: Repository) -> float:
        lines = repository.metrics()[0].decode().splitlines()
        found = [line for line in lines if line.startswith("graphwright_calls_total{")]
        return sum(float(line.split()[-1]) for line in found)

    async def test() -> None:
        graphed = gw.graph(torch.nn.Linear(4, 4).eval(), buckets=gw.Buckets(batch=[1, 4]))
        asked = InferRequest("net", "", "", {"input": torch.ones(1, 4)})
        async with serving(ModelConfig(graphed, (torch.randn(1, 4),))) as repository:
            for number in range(1, 4):
                await repository.infer(asked)
                assert counted(repository) == 2 * number - 1
                loading = asyncio.create_task(repository.load("net", {}))
                await repository.infer(asked)
                assert counted(repository) == 2 * number
                await loading
                assert counted(repository) == 2 * number

    run(test)


def test_a_model_is_prepared_once_for_all_its_requests() -> None:
    prepared = PreparedModel(config())
    assert set(prepared.timings.seconds) >= {(1, 16), (32, 16)}
    assert all(seconds > 0 for seconds in prepared.timings.seconds.values())


def test_a_defect_in_batching_fails_its_requests_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("oh")

    async def test() -> None:
        async with serving(config()) as repository:
            with monkeypatch.context() as patch:
                patch.setattr("graphwright.serving.runner.choose", broken)
                found = await asyncio.gather(
                    *(repository.infer(request(seed=n)) for n in range(3)), return_exceptions=True
                )
            assert all(isinstance(e, RequestError) and e.kind is ErrorKind.FAILED for e in found)
            assert "a batch of net failed" in caplog.text
            assert (await repository.infer(request())).outputs

    run(test)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "The input 'text' is missing; it takes text BYTES [-1]."),
        ({"text": torch.ones(1)}, "The input 'text' is FP32, not BYTES."),
        ({"text": Strings((1, 1), (b"",))}, "has the shape [1, 1], not [-1]"),
    ],
)
def test_what_preprocess_is_not_made_for_is_the_client_s_error(inputs: Any, words: str) -> None:
    async def test() -> None:
        text = TensorMetadata("text", "BYTES", (-1,))
        given = replace(
            config(), preprocess=lambda _: dict(zip("ab", sample(), strict=True)), inputs=[text]
        )
        async with serving(given) as repository:
            with pytest.raises(RequestError) as caught:
                await repository.infer(InferRequest("net", "", "", inputs))
            assert (caught.value.kind, words in str(caught.value)) == (ErrorKind.INVALID, True)
            with pytest.raises(RequestError, match="preprocessing failed") as caught:
                await repository.infer(InferRequest("net", "", "", {"text": Strings((0,), ())}))
            assert caught.value.kind is ErrorKind.FAILED

    run(test)


@pytest.mark.parametrize("made", [{}, {"logits": None}, [1], {"logits": torch.ones(1) * 1j}])
def test_what_postprocess_leaves_out_is_no_answer(made: Any) -> None:
    async def test() -> None:
        async with serving(replace(config(), postprocess=lambda _: made)) as repository:
            with pytest.raises(RequestError, match="postprocessing failed") as caught:
                await repository.infer(request())
            assert caught.value.kind is ErrorKind.FAILED

    run(test)


def test_metrics_do_not_grow_with_the_sizes_of_requests() -> None:
    async def test() -> None:
        async with serving(config()) as repository:
            for length in range(1, 17):
                await repository.infer(request(1, length))
            text = repository.metrics()[0].decode()
        lines = [line for line in text.splitlines() if "bucket_batches_total{" in line]
        assert len(lines) == 3
        assert all(each in text for each in ('bucket="1x4"', 'bucket="1x8"', 'bucket="1x16"'))

    run(test)
