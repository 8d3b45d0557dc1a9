"""ModelRunner: the queue of a model, the thread that computes it, and what it has done."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..calls.options import in_brief
from ..calls.plurals import counted
from ..dispatch.answerer import answerer_of
from ..errors import first_line
from ..shapes.padding import Sizes
from .batching import Choice, choose
from .instances import Instance
from .joining import Part
from .metrics import Metrics, ModelMetrics
from .model_config import Tensors
from .prepared_model import PreparedModel
from .protocol import (
    DATATYPES,
    Duration,
    ErrorKind,
    InferRequest,
    InferResponse,
    ModelConfiguration,
    ModelMetadata,
    ModelStatistics,
    RequestError,
    Strings,
    Value,
)
from .requests import check_inputs

_LOGGER = logging.getLogger("graphwright.serving")
PLATFORM = "graphwright_pytorch"
_Result = TypeVar("_Result")
_STAGES = ("compute_input", "compute_infer", "compute_output")


@dataclass(eq=False)
class _Pending:
    """A request in the queue, or a part of one.

    Attributes:
        part: its share of a call.
        deadline: until when it is of use.
        answer: to be set.
        since: when it was put there, on the clock of `time.monotonic`.
        seconds: what each stage took, once it is computed.
    """

    part: Part
    deadline: float | None
    answer: asyncio.Future[Tensors]
    since: float
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        return self.part.sizes

    @property
    def key(self) -> tuple[bytes, ...]:
        return self.part.key


@dataclass
class _Computed:
    """What a batch gave.

    Attributes:
        answers: an answer or an error for each request.
        seconds: how long each stage took.
        sizes: at which it was computed.
    """

    answers: Sequence[Tensors | Exception]
    seconds: Mapping[str, float]
    sizes: Sizes


@dataclass
class _Counts:
    """What a model has done so far."""

    last_inference: int = 0
    rows: int = 0
    durations: dict[str, Duration] = field(default_factory=dict)
    batches: dict[int, Duration] = field(default_factory=dict)

    def add(self, stage: str, seconds: float) -> None:
        known = self.durations.get(stage, Duration())
        self.durations[stage] = Duration(known.count + 1, known.ns + int(seconds * 1e9))


class _Answering:
    """How many requests are being answered: each inside a block with it."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def ended(self) -> None:
        """Wait until there is none."""
        await self._none.wait()


class _Threads:
    """Threads, whose calls are noted as long as they run.

    Args:
        most: how many, at most.
        name: of the threads.
        calls: where to note calls.
    """

    def __init__(self, most: int | None, name: str, calls: set[Future[Any]]) -> None:
        self._threads, self._calls = ThreadPoolExecutor(most, name), calls

    def call(self, function: Callable[..., _Result], *args: Any) -> asyncio.Future[_Result]:
        """Call a function in a thread."""
        call = self._threads.submit(function, *args)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return asyncio.wrap_future(call)

    def shutdown(self, *, wait: bool) -> None:
        """End the threads once their calls have ended; waits for that if told to."""
        self._threads.shutdown(wait)


class _CallCounts:
    """How a model's calls went.

    Args:
        model: what is called.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._new: Counter[str] = Counter()
        self._so_far: Counter[str] | None = None  # unless it has to be asked
        self._shared = False

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the calls inside the block, which nobody else may make meanwhile."""
        before = self._so_far if self._so_far is not None else _calls_of(self._model)
        try:
            yield
        finally:
            now = _calls_of(self._model)
            self._new += now - before
            self._so_far = None if self._shared else now

    def share(self, shared: bool) -> None:
        """Say whether others call the model between the blocks, which is not to be counted."""
        self._shared = shared
        self._so_far = None

    def new(self) -> Mapping[str, int]:
        """How the calls since the last time went: by graph, tuned, or eagerly and why."""
        new, self._new = self._new, Counter()
        return new


class ModelRunner:
    """Answers requests of one model, joined into batches.

    Args:
        name: of the model.
        version: of the model.
        model: it.
        max_queue: how many requests may wait.
        metrics: of the server.
        calls: where to note what runs in threads, as long as it runs.
    """

    def __init__(
        self,
        name: str,
        version: str,
        model: PreparedModel,
        *,
        max_queue: int,
        metrics: Metrics,
        calls: set[Future[Any]],
    ) -> None:
        self.name, self.version, self.model = name, version, model
        self._max_queue = max_queue
        self._metrics: ModelMetrics = metrics.of_model(name, version)
        self._counts = _Counts()
        self._queue: list[_Pending] = []
        self._work: asyncio.Event = asyncio.Event()
        self._answering = _Answering()
        self._preparing = 0  # requests that are in the user's preprocess
        self._passed = 0  # batches in a row without the oldest request
        self._closing = False
        self._given_up = False
        # One for each request, by which it ends when it is given up.
        self._limits: set[asyncio.Timeout] = set()
        # Threads of its own, one for each instance: graphs are replayed one after the other.
        self._threads = _Threads(len(model.instances), f"graphwright-serve-{name}", calls)
        self._aside_threads = _Threads(None, f"graphwright-aside-{name}", calls)
        self._free = list(model.instances)
        self._computing: set[asyncio.Task[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"serve {name}")
        self._calls = _CallCounts(model.call)

    @property
    def metadata(self) -> ModelMetadata:
        """What the model takes and gives."""
        return ModelMetadata(
            self.name, (self.version,), PLATFORM, self.model.inputs, self.model.outputs
        )

    @property
    def configuration(self) -> ModelConfiguration:
        """How the model is called."""
        return ModelConfiguration(self.metadata, self.model.max_batch_size)

    def is_running(self) -> bool:
        """Whether batches are computed; they are until `close()`, unless that failed for good."""
        return not self._task.done()

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request, joined with others.

        Raises:
            RequestError: it is malformed, comes while too many wait, is too late, or fails.
        """
        begin = request.received or time.monotonic()
        spent: dict[str, float] = {}
        with self._answering:
            try:
                response = await self._answer_unless_given_up(request, spent)
            except BaseException as error:
                took = time.monotonic() - begin
                self._counts.add("fail", took)
                other = ErrorKind.FAILED if isinstance(error, Exception) else ErrorKind.CANCELLED
                kind = error.kind if isinstance(error, RequestError) else other
                self._metrics.failed(kind.value, took)
                raise
        took = time.monotonic() - begin
        self._counts.add("success", took)
        for stage, seconds in spent.items():
            self._counts.add(stage, seconds)
        self._metrics.stage("queue", spent["queue"])
        self._counts.last_inference = time.time_ns() // 1_000_000
        self._metrics.answered(took)
        return response

    async def _answer_unless_given_up(
        self, request: InferRequest, spent: dict[str, float]
    ) -> InferResponse:
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                return await self._answer(request, spent)
        except TimeoutError:
            if not limit.expired():
                raise
            raise _unloaded(self.name) from None
        finally:
            self._limits.discard(limit)

    async def _answer(self, request: InferRequest, spent: dict[str, float]) -> InferResponse:
        """The answer to a request; adds to `spent` the seconds of each stage."""
        config = self.model.config
        wanted = request.outputs
        known = [each.name for each in self.model.outputs]
        for name in wanted:
            if name not in known:
                raise RequestError(
                    ErrorKind.INVALID,
                    f"The model has no output {in_brief(name)}; it gives {', '.join(known)}.",
                )
        inputs: Mapping[str, Any] = request.inputs
        if config.preprocess is not None:
            if config.inputs:
                check_inputs(inputs, config.inputs)
            self._refuse_overload()
            self._preparing += 1
            try:
                inputs = await self._aside("preprocess", config.preprocess, inputs)
            finally:
                self._preparing -= 1
        try:
            parts = self.model.parts(inputs)
        except Exception:
            if config.preprocess is None:
                raise
            _LOGGER.exception("what preprocess made of a request is not what %s takes", self.name)
            raise RequestError(ErrorKind.FAILED, "The server's preprocessing failed.") from None
        if config.preprocess is None:
            self._refuse_overload()
        outputs: Mapping[str, Value] = await self._in_parts(parts, request.deadline, spent)
        if config.postprocess is not None:
            made = await self._aside("postprocess", config.postprocess, outputs)
            outputs = self._sendable(made, wanted or known)
        return InferResponse(
            self.name,
            self.version,
            request.id,
            {name: outputs[name] for name in wanted or known},
        )

    async def _in_parts(
        self, parts: Sequence[Part], deadline: float | None, spent: dict[str, float]
    ) -> Tensors:
        """The answer to a request that is computed in parts.

        One part waits at a time: other requests have their turn between them.
        """
        answers = []
        for part in parts:
            answers.append(await self._computed(part, deadline, spent))
        if len(answers) == 1:
            return answers[0]
        return await asyncio.to_thread(self.model.joiner.put_together, answers)

    def _sendable(self, made: Any, names: Sequence[str]) -> dict[str, Value]:
        """What the user's function made of outputs, as transports send it."""
        found: dict[str, Value] = {}
        for name in names:
            value = made.get(name) if isinstance(made, Mapping) else None
            if isinstance(value, torch.Tensor) and value.dtype in DATATYPES:
                value = value.detach().cpu().contiguous()
            elif not isinstance(value, Strings):
                _LOGGER.error("postprocess of %s gave %s for %r", self.name, in_brief(value), name)
                raise RequestError(ErrorKind.FAILED, "The server's postprocessing failed.")
            found[name] = value
        return found

    async def _aside(self, stage: str, function: Callable[[Any], Any], values: Any) -> Any:
        """Run the user's function in a thread; its own RequestErrors and ValueErrors are kept."""

        def run() -> Any:
            try:
                return function(values)
            except RequestError:
                raise
            except ValueError as error:
                raise RequestError(ErrorKind.INVALID, first_line(error)) from error
            # Panics of libraries in Rust are no Exceptions; and what ends tasks or the loop is not
            # to leave this thread.
            except BaseException as error:
                _LOGGER.exception("%s of %s failed", stage, self.name)
                raise RequestError(ErrorKind.FAILED, f"The server's {stage}ing failed.") from error

        begin = time.monotonic()
        try:
            return await self._aside_threads.call(contextvars.copy_context().run, run)
        finally:
            self._metrics.stage(stage, time.monotonic() - begin)

    def _refuse_overload(self) -> None:
        """Refuse a request that would wait, be it for preprocess, beside as many as may."""
        waiting = len(self._queue) + self._preparing
        if waiting >= self._max_queue:
            share = self.model.timings.share
            raise RequestError(
                ErrorKind.OVERLOADED,
                f"The queue of {self.name} is full, with {counted(waiting, 'request')}.",
                remedy="Ask again later.",
                retry_after_s=sum(share(each.sizes) for each in self._queue),
            )

    async def _computed(
        self, part: Part, deadline: float | None, spent: dict[str, float]
    ) -> Tensors:
        """The answer to a part of a request that was let in."""
        if self._closing:
            raise _unloaded(self.name)
        answer: asyncio.Future[Tensors] = asyncio.get_running_loop().create_future()
        pending = _Pending(part, deadline, answer, time.monotonic())
        self._queue.append(pending)
        self._metrics.waiting(len(self._queue))
        self._work.set()
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            async with asyncio.timeout(left):
                found = await answer
        except TimeoutError:
            raise _too_late(self.name) from None
        finally:
            if pending in self._queue:  # Cancelled, or too late.
                self._queue.remove(pending)
                self._metrics.waiting(len(self._queue))
        for stage, seconds in pending.seconds.items():
            spent[stage] = spent.get(stage, 0.0) + seconds
        return found

    async def _run(self) -> None:
        """Compute batch after batch, for as long as the runner lives."""
        while not self._closing:
            self._drop_the_late()
            if not self._queue or not self._free:
                self._work.clear()
                await self._work.wait()
                continue
            batch = list(self._queue)
            try:
                self.model.use_current_instances()
                self._free = [each for each in self._free if self._is_used(each)]
                if not self._free:
                    continue
                choice = self._choice()
                batch = [batch[index] for index in choice.members]
            except Exception as error:
                self._fail(batch, error)
                self._queue = [each for each in self._queue if not each.answer.done()]
                continue
            chosen = {id(pending) for pending in batch}
            self._queue = [each for each in self._queue if id(each) not in chosen]
            self._metrics.waiting(len(self._queue))
            # The one that was busy last: its memory is still in caches.
            answering = self._answer_batch(batch, choice.sizes, self._free.pop())
            task = asyncio.create_task(answering, name=f"compute {self.name}")
            self._computing.add(task)
            task.add_done_callback(self._computing.discard)

    def _fail(self, batch: Sequence[_Pending], error: BaseException) -> None:
        """A defect of ours: other requests are answered all the same."""
        _LOGGER.error("a batch of %s failed", self.name, exc_info=error)
        failed = RequestError(ErrorKind.FAILED, f"{self.name} failed: {first_line(error)}")
        _settle(batch, [failed] * len(batch))

    def _is_used(self, instance: Instance) -> bool:
        return any(instance is each for each in self.model.instances)

    async def _answer_batch(
        self, batch: Sequence[_Pending], sizes: Sizes, instance: Instance
    ) -> None:
        """Compute requests together by one of the instances, and answer each."""
        try:
            await self._answered(batch, sizes, instance)
        except asyncio.CancelledError:
            _settle(batch, [_unloaded(self.name)] * len(batch))
            raise
        except BaseException as error:
            self._fail(batch, error)
            if not isinstance(error, Exception):
                raise
        finally:
            if self._is_used(instance):
                self._free.append(instance)
            self._work.set()

    async def _answered(self, batch: Sequence[_Pending], sizes: Sizes, instance: Instance) -> None:
        now = time.monotonic()
        parts = [pending.part for pending in batch]
        computed = await self._threads.call(self._compute, parts, sizes, instance)
        for pending in batch:
            pending.seconds = {"queue": now - pending.since, **computed.seconds}
        _settle(batch, computed.answers)
        self._count(computed, parts)

    def _choice(self) -> Choice:
        if not self.model.joins:
            return Choice((0,), self._queue[0].sizes)
        found = choose(self._queue, self.model.timings, time.monotonic(), passed=self._passed)
        self._passed = 0 if 0 in found.members else self._passed + 1
        return found

    def _drop_the_late(self) -> None:
        now = time.monotonic()
        late = [each for each in self._queue if each.deadline is not None and each.deadline <= now]
        for pending in late:
            self._queue.remove(pending)
            if not pending.answer.done():
                pending.answer.set_exception(_too_late(self.name))

    def _compute(self, parts: Sequence[Part], sizes: Sizes, instance: Instance) -> _Computed:
        """Answer a batch; if that fails, each of its requests alone. Runs in the thread."""
        try:
            return self._computed_together(parts, sizes, instance)
        except BaseException as error:  # Whatever a library raises: requests wait for an answer.
            if len(parts) == 1:
                _LOGGER.exception("a request of %s failed", self.name)
                failed = RequestError(ErrorKind.FAILED, f"{self.name} failed: {first_line(error)}")
                return _Computed([failed], {}, sizes)
        alone = self.model.timings.sizes_alone
        each = [self._compute([part], alone(part.sizes), instance) for part in parts]
        answers = [answer for one in each for answer in one.answers]
        seconds = {stage: sum(one.seconds.get(stage, 0.0) for one in each) for stage in _STAGES}
        return _Computed(answers, seconds, sizes)

    def _computed_together(
        self, parts: Sequence[Part], sizes: Sizes, instance: Instance
    ) -> _Computed:
        times = [time.perf_counter()]
        with instance.lock:  # Under it, nobody else calls the model.
            with self._calls.counted():
                answers = self.model.compute(
                    parts, sizes, lambda: times.append(time.perf_counter()), instance
                )
        took = (end - begin for begin, end in itertools.pairwise(times))
        return _Computed(answers, dict(zip(_STAGES, took, strict=True)), sizes)

    def _count(self, computed: _Computed, parts: Sequence[Part]) -> None:
        rows = sum(part.sizes[0] for part in parts)
        self._counts.rows += rows
        for stage, seconds in computed.seconds.items():
            self._metrics.stage(stage, seconds)
        known = self._counts.batches.get(rows, Duration())
        took = int(computed.seconds.get("compute_infer", 0.0) * 1e9)
        self._counts.batches[rows] = Duration(known.count + 1, known.ns + took)
        true = sum(math.prod(part.sizes) for part in parts)
        # By the sizes that were measured: others are as many as clients like.
        bucket = self.model.timings.measured(computed.sizes)
        self._metrics.batch(rows, bucket, math.prod(computed.sizes), true)
        self._metrics.calls(self._calls.new())

    def share(self, shared: bool) -> None:
        """Say whether others may call the same model: a load, or what it takes the place of.

        Their calls are left out of the count, for which calls are counted before each batch, too.
        """
        self._calls.share(shared)

    def statistics(self) -> ModelStatistics:
        """What the model has done so far."""
        counts = self._counts

        def spent(stage: str) -> Duration:
            return counts.durations.get(stage, Duration())

        return ModelStatistics(
            name=self.name,
            version=self.version,
            last_inference=counts.last_inference,
            inference_count=counts.rows,
            execution_count=sum(each.count for each in counts.batches.values()),
            success=spent("success"),
            fail=spent("fail"),
            queue=spent("queue"),
            compute_input=spent("compute_input"),
            compute_infer=spent("compute_infer"),
            compute_output=spent("compute_output"),
            batches=dict(sorted(counts.batches.items())),
        )

    async def drain(self, timeout_s: float | None) -> bool:
        """Wait until all requests are answered, and no call runs; whether that was in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._answering.ended()
                if self._computing:  # For clients that have gone.
                    await asyncio.wait(self._computing)
        except TimeoutError:
            return False
        return True

    def give_up(self) -> None:
        """Refuse all requests, and wait for none of the calls that are running."""
        self._closing = self._given_up = True
        self._work.set()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        for task in self._computing:
            task.cancel()

    async def close(self) -> None:
        """End the threads; what they compute is answered, and requests that still wait are refused.

        May be called again.
        """
        self._closing = True
        self._work.set()
        _settle(self._queue, [_unloaded(self.name) for _ in self._queue])
        self._queue.clear()
        await asyncio.wait([self._task, *self._computing])
        await self._answering.ended()
        self._aside_threads.shutdown(wait=False)
        if self._given_up:
            self._threads.shutdown(wait=False)
        else:
            await asyncio.to_thread(self._threads.shutdown, wait=True)


def _settle(batch: Sequence[_Pending], answers: Sequence[Tensors | Exception]) -> None:
    """Hand the answers out, but to clients that have gone."""
    for pending, answer in zip(batch, answers, strict=True):
        if pending.answer.done():
            continue
        if isinstance(answer, Exception):
            pending.answer.set_exception(answer)
        else:
            pending.answer.set_result(answer)


def _unloaded(name: str) -> RequestError:
    return RequestError(ErrorKind.UNAVAILABLE, f"The model {name} is being unloaded.")


def _too_late(name: str) -> RequestError:
    return RequestError(ErrorKind.TOO_LATE, f"{name} could not answer before the deadline.")


def _calls_of(call: Callable[..., Any]) -> Counter[str]:
    """How the calls of what answers went so far."""
    answerer = answerer_of(call)
    return Counter() if answerer is None else answerer.counts()


def device_memory() -> dict[str, int]:
    """Bytes that PyTorch holds on each GPU."""
    if not torch.cuda.is_initialized():
        return {}
    return {f"cuda:{i}": torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count())}


def devices_answer() -> bool:
    """Whether this process can still use its GPUs: after an illegal access, say, it never can."""
    try:
        for device, held in device_memory().items():
            if held:
                torch.cuda.current_stream(torch.device(device)).query()
    except RuntimeError:
        return False
    return True
