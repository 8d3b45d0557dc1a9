"""ModelRunner: the queue of a model, the thread that computes it, and what it has done."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from ..artifacts.tuned_module import TunedModule
from ..dispatch.graphed_callable import GraphedCallable
from ..dispatch.graphed_module import GraphedModule
from ..errors import first_line
from ..shapes.padding import Sizes
from .batching import Choice, choose
from .joining import Part
from .metrics import Metrics, ModelMetrics
from .model import PreparedModel, Tensors
from .protocol import (
    Duration,
    InferRequest,
    InferResponse,
    Kind,
    ModelMetadata,
    ModelStatistics,
    RequestError,
    Value,
)

_LOGGER = logging.getLogger("graphwright.serving")
PLATFORM = "graphwright_pytorch"
_STAGES = ("compute_input", "compute_infer", "compute_output")


@dataclass(eq=False)
class _Pending:
    """A request in the queue.

    Attributes:
        part: its share of a call.
        deadline: until when it is of use.
        answer: to be set.
        since: when it was put there, on the clock of `time.monotonic`.
    """

    part: Part
    deadline: float | None
    answer: asyncio.Future[Tensors]
    since: float

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

    def add(self, stage: str, seconds: float, count: int = 1) -> None:
        known = self.durations.get(stage, Duration())
        self.durations[stage] = Duration(known.count + count, known.ns + int(seconds * 1e9))


class ModelRunner:
    """Answers requests of one model, joined into batches.

    Args:
        name: of the model.
        version: of the model.
        model: it.
        max_queue: how many requests may wait.
        metrics: of the server.
    """

    def __init__(
        self, name: str, version: str, model: PreparedModel, *, max_queue: int, metrics: Metrics
    ) -> None:
        self.name, self.version, self.model = name, version, model
        self._max_queue = max_queue
        self._metrics: ModelMetrics = metrics.of_model(name, version)
        self._counts = _Counts()
        self._queue: list[_Pending] = []
        self._work: asyncio.Event = asyncio.Event()
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._answering = 0
        # A thread of its own: graphs are replayed one after the other.
        self._thread = ThreadPoolExecutor(1, f"graphwright-serve-{name}")
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"serve {name}")
        self._counted: Counter[str] = Counter()

    @property
    def metadata(self) -> ModelMetadata:
        """What the model takes and gives."""
        return ModelMetadata(
            self.name, (self.version,), PLATFORM, self.model.inputs, self.model.outputs
        )

    def is_running(self) -> bool:
        """Whether batches are computed; they are until `close()`, unless that failed for good."""
        return not self._task.done()

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request, joined with others.

        Raises:
            RequestError: it is malformed, comes while too many wait, is too late, or fails.
        """
        begin = request.received or time.monotonic()
        self._answering += 1
        self._idle.clear()
        try:
            response = await self._answer(request)
        except BaseException as error:
            took = time.monotonic() - begin
            self._counts.add("fail", took)
            kind = error.kind.value if isinstance(error, RequestError) else Kind.CANCELLED.value
            self._metrics.failed(kind, took)
            raise
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()
        took = time.monotonic() - begin
        self._counts.add("success", took)
        self._counts.last_inference = time.time_ns() // 1_000_000
        self._metrics.answered(took)
        return response

    async def _answer(self, request: InferRequest) -> InferResponse:
        config = self.model.config
        wanted = request.outputs
        known = [each.name for each in self.model.outputs]
        for name in wanted:
            if name not in known:
                raise RequestError(
                    Kind.INVALID, f"The model has no output {name!r}; it gives {', '.join(known)}."
                )
        inputs: Mapping[str, Any] = request.inputs
        if config.preprocess is not None:
            inputs = await self._aside("preprocess", config.preprocess, inputs)
        try:
            part = self.model.joiner.part(inputs)
        except RequestError:
            if config.preprocess is None:
                raise
            _LOGGER.exception("what preprocess made of a request is not what %s takes", self.name)
            raise RequestError(Kind.FAILED, "The server's preprocessing failed.") from None
        outputs: Mapping[str, Value] = await self._computed(part, request.deadline)
        if config.postprocess is not None:
            outputs = await self._aside("postprocess", config.postprocess, outputs)
        return InferResponse(
            self.name,
            self.version,
            request.id,
            {name: outputs[name] for name in wanted or known if name in outputs},
        )

    async def _aside(self, stage: str, function: Callable[[Any], Any], values: Any) -> Any:
        """Run the user's function in a thread; its own RequestErrors and ValueErrors are kept."""
        begin = time.monotonic()
        try:
            return await asyncio.to_thread(function, values)
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(Kind.INVALID, first_line(error)) from error
        except Exception as error:
            _LOGGER.exception("%s of %s failed", stage, self.name)
            raise RequestError(Kind.FAILED, f"The server's {stage}ing failed.") from error
        finally:
            self._metrics.stage(stage, time.monotonic() - begin)

    async def _computed(self, part: Part, deadline: float | None) -> Tensors:
        if self._task.done():
            raise RequestError(Kind.UNAVAILABLE, f"The model {self.name} is being unloaded.")
        if len(self._queue) >= self._max_queue:
            share = self.model.timings.share
            wait = sum(share(each.sizes) for each in self._queue)
            raise RequestError(
                Kind.OVERLOADED,
                f"{len(self._queue)} requests wait for {self.name}, as many as may.",
                remedy="Ask again later.",
                retry_after_s=wait,
            )
        answer: asyncio.Future[Tensors] = asyncio.get_running_loop().create_future()
        pending = _Pending(part, deadline, answer, time.monotonic())
        self._queue.append(pending)
        self._metrics.waiting(len(self._queue))
        self._work.set()
        try:
            if deadline is None:
                return await answer
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await answer
        except TimeoutError:
            raise _too_late(self.name) from None
        finally:
            if pending in self._queue:  # Cancelled, or too late.
                self._queue.remove(pending)

    async def _run(self) -> None:
        """Compute batch after batch, for as long as the runner lives."""
        while True:
            await self._work.wait()
            self._drop_the_late()
            if not self._queue:
                self._work.clear()
                continue
            batch = list(self._queue)
            try:
                choice = self._choice()
                batch = [batch[index] for index in choice.members]
                await self._answer_batch(batch, choice.sizes)
            except Exception as error:
                # A defect of ours: other requests are answered all the same.
                _LOGGER.exception("a batch of %s failed", self.name)
                failed = RequestError(Kind.FAILED, f"{self.name} failed: {first_line(error)}")
                _settle(batch, [failed] * len(batch))
            finally:
                self._queue = [each for each in self._queue if not each.answer.done()]

    async def _answer_batch(self, batch: Sequence[_Pending], sizes: Sizes) -> None:
        """Take requests out of the queue, compute them together, and answer each."""
        chosen = {id(pending) for pending in batch}
        self._queue = [each for each in self._queue if id(each) not in chosen]
        now = time.monotonic()
        for pending in batch:
            self._counts.add("queue", now - pending.since)
            self._metrics.stage("queue", now - pending.since)
        self._metrics.waiting(len(self._queue))
        parts = [pending.part for pending in batch]
        loop = asyncio.get_running_loop()
        computed = await loop.run_in_executor(self._thread, self._compute, parts, sizes)
        _settle(batch, computed.answers)
        self._count(computed, parts)

    def _choice(self) -> Choice:
        if not self.model.joins:
            return Choice((0,), self._queue[0].sizes)
        return choose(self._queue, self.model.timings, time.monotonic())

    def _drop_the_late(self) -> None:
        now = time.monotonic()
        late = [each for each in self._queue if each.deadline is not None and each.deadline <= now]
        for pending in late:
            self._queue.remove(pending)
            if not pending.answer.done():
                pending.answer.set_exception(_too_late(self.name))

    def _compute(self, parts: Sequence[Part], sizes: Sizes) -> _Computed:
        """Answer a batch; if that fails, each of its requests alone. Runs in the thread."""
        try:
            return self._computed_together(parts, sizes)
        except Exception as error:
            if len(parts) == 1:
                _LOGGER.exception("a request of %s failed", self.name)
                failed = RequestError(Kind.FAILED, f"{self.name} failed: {first_line(error)}")
                return _Computed([failed], {}, sizes)
        alone = self.model.timings.sizes_alone
        each = [self._compute([part], alone(part.sizes)) for part in parts]
        answers = [answer for one in each for answer in one.answers]
        seconds = {stage: sum(one.seconds.get(stage, 0.0) for one in each) for stage in _STAGES}
        return _Computed(answers, seconds, sizes)

    def _computed_together(self, parts: Sequence[Part], sizes: Sizes) -> _Computed:
        joiner = self.model.joiner
        times = [time.perf_counter()]
        args, kwargs = joiner.join(parts, sizes)
        times.append(time.perf_counter())
        results = self.model.run(args, kwargs)
        times.append(time.perf_counter())
        answers = joiner.cut(results, parts)
        times.append(time.perf_counter())
        took = (end - begin for begin, end in itertools.pairwise(times))
        return _Computed(answers, dict(zip(_STAGES, took, strict=True)), sizes)

    def _count(self, computed: _Computed, parts: Sequence[Part]) -> None:
        rows = sum(part.sizes[0] for part in parts)
        self._counts.rows += rows
        for stage, seconds in computed.seconds.items():
            self._counts.add(stage, seconds, len(parts))
            self._metrics.stage(stage, seconds)
        known = self._counts.batches.get(rows, Duration())
        took = int(computed.seconds.get("compute_infer", 0.0) * 1e9)
        self._counts.batches[rows] = Duration(known.count + 1, known.ns + took)
        true = sum(math.prod(part.sizes) for part in parts)
        self._metrics.batch(rows, computed.sizes, math.prod(computed.sizes), true)
        self._metrics.calls(self._new_calls())

    def _new_calls(self) -> Mapping[str, int]:
        """How the calls since the last time went: by graph, tuned, or eagerly and why."""
        now = _calls_of(self.model.call)
        new = now - self._counted
        self._counted = now
        return new

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
        """Wait until all requests are answered; whether that was in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End the thread; requests that still wait are refused."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for pending in self._queue:
            if not pending.answer.done():
                pending.answer.set_exception(
                    RequestError(Kind.UNAVAILABLE, f"The model {self.name} is being unloaded.")
                )
        self._queue.clear()
        await asyncio.to_thread(self._thread.shutdown)


def _settle(batch: Sequence[_Pending], answers: Sequence[Tensors | Exception]) -> None:
    """Hand the answers out, but to clients that have gone."""
    for pending, answer in zip(batch, answers, strict=True):
        if pending.answer.done():
            continue
        if isinstance(answer, Exception):
            pending.answer.set_exception(answer)
        else:
            pending.answer.set_result(answer)


def _too_late(name: str) -> RequestError:
    return RequestError(Kind.TOO_LATE, f"{name} could not answer before the deadline.")


def _calls_of(call: Callable[..., Any]) -> Counter[str]:
    """How the calls of what answers went so far."""
    if isinstance(call, TunedModule):
        return Counter(call.calls)
    if isinstance(call, GraphedModule | GraphedCallable):
        now = call.statistics
        eager = Counter({f"eager: {why}": count for why, count in now.eager.items()})
        return eager + Counter({"graph": now.hits})
    return Counter()


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
