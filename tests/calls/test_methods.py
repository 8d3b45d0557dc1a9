"""Methods other than forward, called on what stands for a module."""

from __future__ import annotations

import abc
import asyncio
import copy
import gc
import inspect
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import graphwright as gw

pytestmark = pytest.mark.usefixtures("one_thread")


class Base(nn.Module):
    FACTOR = 3
    classes: ClassVar[list[type]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Base.classes.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU())])
        self.__hidden = 2

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * self.__hidden


class Model(Base, abc.ABC):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()

    # Those that call the module.

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """What calls the module."""
        return self(x) + 1

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).sigmoid()

    @torch.no_grad()
    def decorated(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * 3

    def by_another(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) * 5

    def by_a_closure(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda y: self(y))(x)

    def by_super(self, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(x)

    def in_turns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.stream(x)))

    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(2):
            x = self(x)
            yield x

    async def later(self, x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return self(x)

    def awaited(self, x: torch.Tensor) -> torch.Tensor:
        return asyncio.run(self.later(x))

    # Others.

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[1](self.parts[0](x))

    def count(self) -> int:
        return len(self.parts)

    def itself(self, other: Any) -> bool:
        return other is self

    def same_and_called(self, x: torch.Tensor, other: Any) -> torch.Tensor:
        return self(x) if other is self else self(x) * 0

    def returns_self(self) -> Any:
        self(torch.ones(1, 4))
        return self

    @classmethod
    def of_class(cls) -> type:
        return cls

    @staticmethod
    def static(x: int) -> int:
        return x + 1


CALLING = ["encode", "predict", "hidden", "decorated", "by_another", "by_a_closure", "by_super"]
CALLING += ["in_turns", "awaited"]


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def sample() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def tuned(module: nn.Module) -> Any:
    options: dict[str, Any] = {"isolate": False, "remember": False, "progress": False}
    return gw.tune(module, (sample(),), strategies=["torchscript"], **options)


def loaded(module: nn.Module, folder: Path) -> Any:
    gw.save(tuned(module), folder / "saved")
    return gw.load(folder / "saved", module, trust=True)


MAKERS: dict[str, Callable[[Any, Path], Any]] = {
    "graph": lambda module, _: gw.graph(module),
    "buckets": lambda module, _: gw.graph(module, buckets=gw.Buckets(batch=[2, 4])),
    "fuse": lambda module, _: gw.fuse(module),
    "tune": lambda module, _: tuned(module),
    "load": loaded,
    "graph_of_fuse": lambda module, _: gw.graph(gw.fuse(module)),
}


def answered(made: Any) -> int:
    """How many calls what was made has answered, and not the module."""
    if isinstance(made, gw.GraphedModule):
        return int(made.statistics.hits)
    return int(made.calls["fused"] + made.calls["tuned"])


@pytest.fixture(autouse=True)
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("maker", MAKERS)
def test_calls_of_a_method_of_its_own_module_are_answered(maker: str, tmp_path: Path) -> None:
    module, x = model(), sample()
    made = MAKERS[maker](module, tmp_path)
    for name in CALLING:
        before = answered(made)
        for _ in range(2):
            torch.testing.assert_close(getattr(made, name)(x), getattr(module, name)(x))
        assert answered(made) - before == (4 if name == "in_turns" else 2), name


def test_a_generator_and_a_coroutine_may_run_late() -> None:
    module, x = model(), sample()
    graphed = gw.graph(module)
    running = graphed.stream(x)
    first = next(running)
    module(x)
    torch.testing.assert_close([first, *running], list(module.stream(x)))
    assert graphed.statistics.hits == 2


def test_nothing_is_written_into_the_module() -> None:
    seen: list[Any] = []

    class Looking(Model):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            result = self(x)
            other = threading.Thread(target=lambda: seen.append(state(module)))
            other.start()
            other.join()
            return result

    def state(module: nn.Module) -> tuple[Any, ...]:
        return dict(vars(module)), type(module), module.forward, torch.equal(module(x), expected)

    module, x = Looking().eval(), sample()
    expected = module(x)
    before = state(module)
    graphed = gw.graph(module)
    for _ in range(3):
        graphed.encode(x)
    assert graphed.statistics.hits == 3  # The other thread's are not among them.
    for after in (*seen, state(module)):
        assert after[1:] == before[1:]
        assert after[0].keys() == before[0].keys()
        assert all(after[0][name] is value for name, value in before[0].items())


def test_a_module_is_pickled_the_same_before_and_after() -> None:
    module = model()
    before = pickle.dumps(module)
    graphed = gw.graph(module)
    graphed.encode(sample())
    assert pickle.dumps(module) == before


def test_what_a_method_does_with_self_is_done_with_the_module() -> None:
    class Doing(Model):
        __marks = 0

        @property
        def marks(self) -> int:
            return self.__marks

        @marks.setter
        def marks(self, value: int) -> None:
            self.__marks = value

        def work(self, x: torch.Tensor) -> dict[str, Any]:
            y = self(x)
            self.added, self.marks = y, self.marks + 1
            self.__dict__["raw"] = 1
            self.register_buffer("kept", y)
            self.train()
            self.other = nn.Linear(2, 2)
            del self.parts
            return {
                "factor": type(self).FACTOR,
                "instances": (isinstance(self, Model), isinstance(module, type(self))),
                "classes": (self.__class__, {Doing: True}.get(type(self))),
                "names": (type(self).__name__, type(self).__qualname__, type(self).__module__),
                "new": type(type(self)()),
                "equal": (self == module, module == self, self in {module: 1}, self == x),
                "copies": (type(copy.copy(self)), type(copy.deepcopy(self))),
                "replica": type(self._replicate_for_data_parallel()),  # type: ignore[no-untyped-call]
                "text": repr(self),
            }

    module = Doing().eval()
    graphed = gw.graph(module)
    found = graphed.work(sample())
    assert graphed.statistics.captures == 1
    assert found["factor"] == 3
    assert found["instances"] == (True, True)
    assert found["classes"] == (Doing, True)
    assert found["names"] == (Doing.__name__, Doing.__qualname__, Doing.__module__)
    assert found["new"] is Doing
    assert found["equal"] == (True, True, True, False)
    assert found["copies"] == (Doing, Doing)
    assert found["replica"] is Doing
    assert found["text"] == repr(module)
    assert (module.marks, module.raw, module.training) == (1, 1, True)
    assert module.added is module.kept
    assert module.other.in_features == 2
    assert not hasattr(module, "parts")


def test_self_is_pickled_as_the_module() -> None:
    class Pickling(Model):
        def stored(self, x: torch.Tensor) -> bytes:
            self(x)
            copied = self.__reduce_ex__(2)
            assert copied[0](*copied[1]) is module
            return pickle.dumps((self, module.layer, module.layer))

    module = model()
    module.__class__ = Pickling  # type: ignore[assignment]
    globals()["Pickling"] = Pickling
    Pickling.__qualname__ = "Pickling"
    stored = gw.graph(module).stored(sample())
    assert b"graphwright" not in stored
    again, layer, _ = pickle.loads(stored)
    assert type(again) is Pickling
    assert again.layer is layer


def test_classes_are_not_told_of_one_below_them() -> None:
    module, before = model(), len(Base.classes)
    gw.graph(module).encode(sample())
    assert len(Base.classes) == before


def test_the_end_of_what_stands_for_a_module_does_not_end_the_module() -> None:
    ended: list[int] = []

    class Ending(Model):
        def __del__(self) -> None:
            ended.append(1)

    module = Ending().eval()
    graphed = gw.graph(module)
    graphed.encode(sample())
    graphed.close()
    del graphed
    gc.collect()
    assert not ended


def test_a_method_that_returns_self_returns_the_module() -> None:
    module = model()
    graphed = gw.graph(module)
    assert graphed.returns_self() is module
    assert graphed.statistics.captures == 1


def test_methods_that_do_not_call_the_module_get_the_module_itself() -> None:
    module = model()
    graphed = gw.graph(module)
    assert graphed.itself(module)
    assert graphed.count() == 2
    assert graphed.of_class() is Model
    assert graphed.static(1) == 2


def test_methods_look_like_the_module_s() -> None:
    module = model()
    graphed = gw.graph(module)
    for _ in range(2):
        assert inspect.ismethod(graphed.encode)
        assert graphed.encode.__self__ is module
        assert graphed.encode.__doc__ == "What calls the module."
        assert inspect.signature(graphed.encode) == inspect.signature(module.encode)
        assert graphed.encode == graphed.encode
        graphed.encode(sample())
    with pytest.raises(AttributeError):
        _ = graphed.absent


@pytest.mark.parametrize("hook", ["of_the_module", "of_all"])
def test_forward_runs_no_hooks_where_a_method_calls_it(hook: str) -> None:
    module, x, ran = model(), sample(), []
    graphed = gw.graph(module)
    graphed.predict(x)
    register = nn.modules.module.register_module_forward_hook
    if hook == "of_the_module":
        register = module.register_forward_hook
    handle = register(lambda owner, _, result: ran.append(1) if owner is module else None)
    try:
        torch.testing.assert_close(graphed.predict(x), module.predict(x))
        assert not ran
        graphed.encode(x)
        assert ran
    finally:
        handle.remove()


def test_a_call_of_the_class_s_own_is_made_once() -> None:
    class OwnCall(Model):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 2

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) + self.forward(x)

    module, x = OwnCall().eval(), sample()
    graphed = gw.graph(module)
    for name in ("encode", "predict", "inner"):
        for _ in range(2):
            torch.testing.assert_close(getattr(graphed, name)(x), getattr(module, name)(x))


def test_a_forward_set_on_the_module_is_the_one_that_runs() -> None:
    module, x = model(), sample()
    graphed = gw.graph(module)
    module.forward = lambda x: x + 7
    for name in ("encode", "predict"):
        for _ in range(2):
            torch.testing.assert_close(getattr(graphed, name)(x), getattr(module, name)(x))


def test_a_parametrized_module_is_followed() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) + self.weight

    module, x = Weighted().eval(), sample()
    graphed = gw.graph(module)
    graphed.encode(x)
    nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    for _ in range(2):
        torch.testing.assert_close(graphed.encode(x), x * 2 + 2)


class Slotted(Model):
    __slots__ = ("extra",)


class Looked(Model):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Comparing(Model):
    def encode(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        return self(x) * (1 if other is self else 2)


@pytest.mark.parametrize("kind", [Slotted, Looked, Comparing])
def test_a_method_in_doubt_runs_the_module_and_says_so(kind: type[Model]) -> None:
    module, x = kind().eval(), sample()
    graphed = gw.graph(module)
    with pytest.warns(gw.errors.FallbackWarning, match=rf"^encode\(\) of {kind.__name__}") as told:
        result = graphed.encode(x)
    torch.testing.assert_close(result, module.encode(x))
    assert graphed.statistics.hits == 0
    assert "Write model.forward = graphwright.graph(model.forward)." in str(told[0].message)
    module.forward = gw.graph(module.forward)
    torch.testing.assert_close(graphed.encode(x), result)
    assert module.forward.statistics.hits == 1


@pytest.mark.parametrize("configured", [True, False])
def test_generate_of_transformers_is_sent_to_what_makes_its_steps_graphs(configured: bool) -> None:
    class Generating(Slotted):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)

    module = Generating().eval()
    if configured:
        module.generation_config = None
    with pytest.warns(gw.errors.FallbackWarning, match=r"^generate\(\) of Generating") as told:
        gw.graph(module).generate(sample())
    line = "graphwright.graph_generate(model).generate(...)"
    assert (line in str(told[0].message)) == configured


def test_identity_is_compared_with_the_module() -> None:
    module, x = model(), sample()
    with pytest.warns(gw.errors.FallbackWarning, match=r"^same_and_called\(\)"):
        torch.testing.assert_close(gw.graph(module).same_and_called(x, module), module(x))


def test_a_type_that_is_compared_by_identity_is_the_module_s() -> None:
    class Typed(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        def compares(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) if type(self) is Typed else x

        def compares_later(self, x: torch.Tensor) -> torch.Tensor:
            kind = type(self)
            return self(x) if Typed is kind else x

        def names(self, x: torch.Tensor) -> torch.Tensor:
            assert type(self).__name__ == "Typed"
            return self(x) if x is not None else x

    module, x = Typed().eval(), sample()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", gw.errors.FallbackWarning)
        graphed: Any = gw.graph(module)
        torch.testing.assert_close(graphed.compares(x), module(x))
        torch.testing.assert_close(graphed.compares_later(x), module(x))
        torch.testing.assert_close(graphed.names(x), module(x))
    assert graphed.statistics.hits == 1


LINES = {
    "graph": "model.parts[1] = graphwright.graph(model.parts[1])",
    "fuse": "model.parts[1] = graphwright.fuse(model.parts[1])",
    "tune": "model.parts[1] = graphwright.tune(model.parts[1], (x,))",
}


@pytest.mark.parametrize("maker", LINES)
def test_a_method_that_calls_parts_alone_names_the_line_to_write(
    maker: str, tmp_path: Path
) -> None:
    module, x = model(), sample()
    made = MAKERS[maker](module, tmp_path)
    with pytest.warns(gw.errors.FallbackWarning, match=r"^decode\(\) of Model runs eag") as told:
        result = made.decode(x)
    torch.testing.assert_close(result, module.decode(x))
    assert [warning.filename for warning in told] == [__file__]
    text = str(told[0].message)
    assert "calls parts of the model (parts.0, parts.1) and not the model itself" in text
    assert f"which is what {maker}() answers." in text
    assert text.endswith(f"Write {LINES[maker]}.")
    made.decode(x)
    gw.graph(module).decode(x)  # It was told of this module.
    if maker == "graph":
        exec(LINES[maker], {"model": module, "graphwright": gw})
        torch.testing.assert_close(gw.graph(module).decode(x), result)
        assert module.parts[1].statistics.hits == 1


def test_a_method_that_reaches_a_graph_of_a_part_is_not_told_of() -> None:
    module, x = model(), sample()
    module.parts[1] = gw.graph(module.parts[1])
    gw.graph(module).decode(x)
    assert module.parts[1].statistics.hits == 1


def test_a_method_is_watched_until_it_runs_something() -> None:
    class Lazy(Model):
        def maybe(self, x: torch.Tensor, runs: bool) -> torch.Tensor:
            return self.layer(x) if runs else x

    module, x = Lazy().eval(), sample()
    graphed = gw.graph(module)
    graphed.maybe(x, False)
    with pytest.warns(gw.errors.FallbackWarning, match=r"model\.layer = "):
        graphed.maybe(x, True)


def test_a_method_that_trains_is_not_told_of() -> None:
    module, x = model().train(), sample()
    with torch.enable_grad():
        gw.graph(module).decode(x).sum().backward()
    assert module.parts[0].weight.grad is not None


def test_gradients_flow_through_methods_of_a_module_in_training() -> None:
    module, x = model().train(), sample()
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gw.errors.FallbackWarning)
        gw.graph(module).encode(x).sum().backward()
    assert module.layer.weight.grad is not None


def test_somebody_else_s_profile_is_left_alone() -> None:
    module, x, seen = model(), sample(), []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is Model.decode.__code__:
            seen.append(sys.getprofile())

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        gw.graph(module).decode(x)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert seen == [profile]


def test_errors_keep_their_traceback_and_end_the_watch() -> None:
    class Failing(Model):
        def decode(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("inside")

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) + self.decode(x)

    before = sys.getprofile()
    graphed = gw.graph(Failing().eval())
    for name in ("decode", "encode"):
        with pytest.raises(KeyError, match="inside") as caught:
            getattr(graphed, name)(sample())
        assert sys.getprofile() is before
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "decode"


def test_methods_are_captured_and_compiled_as_others() -> None:
    module, x = model(), sample()
    graphed = gw.graph(module)
    expected = module.encode(x)
    of_method, around = gw.graph(graphed.encode), gw.graph(lambda x: graphed.encode(x))
    for made in (of_method, around):
        for _ in range(2):
            torch.testing.assert_close(made(x), expected)
        assert made.statistics.hits == 2
    compiled = torch.compile(lambda x: graphed.encode(x), backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    module.layer.weight.mul_(2)
    for made in (of_method, around, compiled):
        torch.testing.assert_close(made(x), module.encode(x))


def test_threads_call_methods_at_once() -> None:
    module, x, results = model(), sample(), []
    graphed = gw.graph(module)
    graphed.encode(x)

    def work() -> None:
        with torch.no_grad():
            results.extend(graphed.encode(x) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    expected = module.encode(x)
    assert len(results) == 60
    assert all(torch.allclose(result, expected) for result in results)
    assert graphed.statistics.hits == 61
