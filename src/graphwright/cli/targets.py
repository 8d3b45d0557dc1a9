"""Loading a model and its inputs from a TARGET on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import re
import socket
import sys
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.modules import should_be_in_eval_mode
from ..calls.options import nearest
from ..errors import TargetError, first_line, user_frame
from ..serving.model_config import ModelConfig

_RETURNS = "Return (model, args) or (model, args, kwargs), or give the inputs with --input."
_RETURNS_PROGRAM = "Return (program, calls) or (program, calls, run): calls is a list."
_EXAMPLE = "Write SHAPE:DTYPE, for example 8x128:float32 or 8x128:int64:30522."
_GUARD = 'Put what ends it under `if __name__ == "__main__":`.'


@dataclass(frozen=True)
class Target:
    """A model with sample inputs, the file it comes from, and what was done to get there.

    Attributes:
        lines: of Python that give the same, as `model` and the names in `arguments`.
        arguments: for the model and its inputs in a call of `tune`, after `model`.
    """

    name: str
    file: Path | None
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    arguments: str = "args"


@dataclass(frozen=True)
class Generative:
    """A model that generates, and what its prompts are made with.

    Attributes:
        tokenizer: None if TARGET gave none.
        inputs: of generate(), if TARGET gave some.
    """

    name: str
    file: Path | None
    model: Any
    tokenizer: Any
    inputs: dict[str, Any]
    device: torch.device


@dataclass(frozen=True)
class ProgramTarget:
    """A program with modules inside, and how it is called.

    Attributes:
        calls: a list of sample calls.
        run: calls the program; None for what `accelerate` does by default.
    """

    name: str
    file: Path | None
    program: Any
    calls: list[Any]
    run: Callable[[Any, Any], Any] | None = None


def load_generative(text: str, device: torch.device) -> Generative:
    """A model with its tokenizer or its inputs, or alone, as TARGET gives it.

    Raises:
        TargetError: as `load_target`.
    """
    found, name, file = _found(text)
    result, tokenizer = _result_of(text, found), None
    match result:
        case (nn.Module(), second) if _is_tokenizer(second):
            result, tokenizer = result
    model, args, kwargs = _parts(text, result)
    if isinstance(model, nn.Module):
        model.eval()
    model, args, kwargs = _put_on(device, text, model, args, kwargs)
    if len(args) > 1:
        raise TargetError(
            f"{text} gives {len(args)} inputs without names.",
            remedy="Name them: return (model, {'input_ids': ids, 'attention_mask': mask}).",
        )
    if args:
        kwargs = {"inputs": args[0]} | kwargs
    return Generative(name, file, model, tokenizer, kwargs, device)


def load_program(text: str) -> ProgramTarget:
    """A program with its calls, and what runs it, as TARGET gives them.

    Raises:
        TargetError: as `load_target`.
    """
    found, name, file = _found(text)
    result = _result_of(text, found)
    match result:
        case (program, list() | tuple() as calls):
            return ProgramTarget(name, file, program, list(calls))
        case (program, list() | tuple() as calls, run) if callable(run):
            return ProgramTarget(name, file, program, list(calls), run)
    raise TargetError(f"{text} returned {_listed(result)}.", remedy=_RETURNS_PROGRAM)


def _listed(result: Any) -> str:
    """What was returned, by its types."""
    if not isinstance(result, tuple):
        return _a(result)
    return f"a tuple of {', '.join(map(_a, result)) or 'nothing'}"


def _is_tokenizer(value: Any) -> bool:
    return callable(value) and callable(getattr(value, "decode", None))


def load_served(text: str, inputs: Sequence[str], device: torch.device) -> ModelConfig:
    """What to serve of TARGET: it may be a ModelConfig, or a function that returns one.

    Raises:
        TargetError: as `load_target`.
    """
    given = _found(text)[0]
    if isinstance(given, ModelConfig):
        return _moved(text, given, device)
    if callable(given) and not isinstance(given, nn.Module):
        result = _result_of(text, given)
        if isinstance(result, ModelConfig):
            return _moved(text, result, device)
    target = load_target(text, inputs, device)
    return ModelConfig(target.model, target.args, target.kwargs)


def _moved(text: str, config: ModelConfig, device: torch.device) -> ModelConfig:
    model, args, kwargs = _put_on(device, text, config.model, config.args, config.kwargs)
    return replace(config, model=model, args=args, kwargs=kwargs)


def load_target(
    text: str, inputs: Sequence[str], device: torch.device, *, inputs_needed: bool = True
) -> Target:
    """Import, call and check TARGET: `path/file.py:name` or `package.module:name`.

    The name is a function that returns a model with or without its inputs, a module class, or a
    module. Model and inputs are moved to the device, and the model is put in eval mode.

    Raises:
        TargetError: anything about it is wrong, in one sentence.
    """
    found, name, file = _found(text)
    given = tuple(parse_input(spec) for spec in inputs)
    result = _result_of(text, found)
    model, args, kwargs = _parts(text, result)
    lines, arguments = _in_python(name, found, result, inputs)
    if given:
        args, kwargs = given, {}
    elif inputs_needed and not args and not kwargs:
        raise TargetError(
            f"{text} gives a model and no inputs.",
            remedy="Give one --input SHAPE:DTYPE an argument, for example --input 8x128:float32.",
        )
    notes = []
    if isinstance(model, nn.Module) and should_be_in_eval_mode(model):
        model.eval()
        lines.append("model.eval()")
        notes.append(
            "The model was in training mode, and was tuned in eval mode: call model.eval() where "
            "you use it; to train it under graphs, see gw.graph_step()."
        )
    lines += _moves(device, model, arguments, args, kwargs)
    model, args, kwargs = _put_on(device, text, model, args, kwargs)
    return Target(name, file, model, args, kwargs, tuple(notes), tuple(lines), arguments)


def _put_on(
    device: torch.device,
    text: str,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A model, which is changed, and its inputs on a device."""
    try:
        if isinstance(model, nn.Module):
            model.to(device)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(device), (args, dict(kwargs))
        )
    except Exception as error:
        raise TargetError(
            f"{text} cannot be put on {device}: {first_line(error)}.", remedy=_movable(error)
        ) from error
    return model, args, dict(kwargs)


def _found(text: str) -> tuple[Any, str, Path | None]:
    """What TARGET names, its name, and the file that it comes from."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise TargetError(f"TARGET {text!r} names no function.", remedy=_functions_in(text))
    module = _import(place)
    file = getattr(module, "__file__", None)
    if file is None and hasattr(module, "__path__"):  # Any folder is a namespace package.
        raise _folder(place)
    try:
        return getattr(module, name), name, file and Path(file)
    except AttributeError:
        own = _callables(module)
        hints = [nearest(name, own), f"It has: {', '.join(own) or 'nothing to call'}."]
        raise TargetError(
            f"{place} has no {name!r}.", remedy=" ".join(filter(None, hints))
        ) from None


def _callables(module: ModuleType) -> list[str]:
    """Names of what a module defines itself and what can be called."""
    public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    return [n for n in public if getattr(vars(module)[n], "__module__", "") == module.__name__]


def _functions_in(text: str) -> str:
    """What to write for a TARGET without a function: one that its file has, if that is found."""
    form = "Write path/to/file.py:function or package.module:function."
    place = text.removesuffix(":")
    if not place.removesuffix(".py").strip(":"):
        return form
    try:
        found = _callables(_import(place))
    except TargetError:
        return form
    if not found:
        return f"{form} {place} has nothing to call."
    return f"Write {place}:{found[0]}. {place} has: {', '.join(found)}."


def _movable(error: Exception) -> str | None:
    """What would let a model be moved."""
    if isinstance(error, NotImplementedError):
        return "Give the model its weights first: on the meta device it has none."
    if isinstance(error, torch.OutOfMemoryError):
        return "Free memory there, or choose another device with --device."
    return None


def _import(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            path = Path(place)
            if not path.is_file():
                raise TargetError(f"There is no file {place}.", remedy="Check the path of TARGET.")
            # The name differs from any package's, and the file's own folder can be imported from.
            spec = importlib.util.spec_from_file_location(f"_target_{path.stem}", path)
            if spec is None or spec.loader is None:
                raise TargetError(f"{place} cannot be imported as Python.")
            sys.path.insert(0, str(path.resolve().parent))
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return module
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    except TargetError:
        raise
    except SystemExit as error:
        raise _ended(f"The import of {place}", error) from error
    except Exception as error:
        path = Path(place)
        if path.is_dir():
            raise _folder(place) from error
        remedy = None
        if path.is_file() or os.sep in place:
            remedy = "The path of a Python file ends in .py: path/to/file.py:function."
        raise TargetError(
            f"{place} cannot be imported: {first_line(error)}.",
            where=user_frame(error),
            remedy=remedy,
        ) from error


def _folder(place: str) -> TargetError:
    return TargetError(
        f"{place} is a folder.", remedy=f"Name a file in it: {Path(place)}/file.py:function."
    )


def _ended(what: str, error: SystemExit) -> TargetError:
    """Somebody's sys.exit, which is not to end this command, and with its code."""
    code = "" if error.code is None else repr(error.code)
    return TargetError(
        f"{what} ends with sys.exit({code}).", where=user_frame(error), remedy=_GUARD
    )


def _result_of(text: str, found: Any) -> Any:
    """What a target gives: the model itself, or what is returned."""
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise TargetError(f"{text} is {_a(found)}.", remedy=_RETURNS)
    try:
        return found()
    except SystemExit as error:
        raise _ended(f"{text}()", error) from error
    except Exception as error:
        raise TargetError(
            f"{text}() fails: {first_line(error)}.",
            where=user_frame(error),
            remedy=_remedy_of(error, found),
        ) from error


def _remedy_of(error: Exception, function: Callable[..., Any]) -> str:
    """What to do about an error of a target: it may be the call's, the machine's or its own."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return "It is called without arguments; wrap it in a function that gives them."
    except ValueError:  # It has no signature.
        pass
    if _wants_network(error):
        return (
            "There seems to be no network: load the weights from a local folder, or download them "
            "once on a machine that has one, and copy its cache."
        )
    if isinstance(error, OSError):
        return f"Relative paths begin in {Path.cwd()}, where the command runs."
    if not torch.cuda.is_available() and ("CUDA" in str(error) or "NVIDIA" in str(error)):
        return "There is no CUDA device here: make the model on the CPU. It is moved to --device."
    return "Call it by itself in Python first: it is called here without arguments."


def _wants_network(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is that of a connection."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ConnectionError | socket.gaierror | urllib.error.URLError):
            return True
        # Those of requests, httpx and huggingface_hub are of classes of their own.
        if "connect" in type(error).__name__.lower() or "couldn't connect to" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _parts(text: str, result: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    if isinstance(result, nn.Module):
        return result, (), {}
    if not isinstance(result, tuple):
        raise TargetError(f"{text} returned {_a(result)}.", remedy=_RETURNS)
    if not 2 <= len(result) <= 3 or not callable(result[0]):
        types = ", ".join(type(part).__name__ for part in result)
        lacks = "" if 2 <= len(result) <= 3 else ", not of 2 or 3"
        if result and not callable(result[0]):
            lacks += ", which does not begin with a model"
        raise TargetError(
            f"{text} returned a tuple of {len(result)} ({types}){lacks}.", remedy=_RETURNS
        )
    model, args, *rest = result
    kwargs: Any = rest[0] if rest else {}
    if isinstance(args, Mapping) and not rest:
        args, kwargs = (), args
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise TargetError(
            f"{text} returned inputs that are no tuple or dictionary.", remedy=_RETURNS
        )
    return model, tuple(args), dict(kwargs)


def _in_python(name: str, found: Any, result: Any, inputs: Sequence[str]) -> tuple[list[str], str]:
    """Lines of Python that take apart what a target gives, and the arguments of `tune` then."""
    what = name if found is result else f"{name}()"
    if inputs:
        tensors = ", ".join(map(input_in_python, inputs))
        names = "model" if isinstance(result, nn.Module) else "model, *_"
        return ["import torch", f"{names} = {what}", f"args = ({tensors},)"], "args"
    match result:
        case (_, Mapping()):
            names, arguments = "model, inputs", "kwargs=inputs"
        case (_, torch.Tensor()):
            names, arguments = "model, x", "(x,)"
        case (_, torch.Tensor(), _):
            names, arguments = "model, x, kwargs", "(x,), kwargs"
        case (_, _, _):
            names, arguments = "model, args, kwargs", "args, kwargs"
        case _:
            names, arguments = "model, args", "args"
    return [f"{names} = {what}"], arguments


def _moves(
    device: torch.device,
    model: Any,
    arguments: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[str]:
    """Lines of Python that put a model and its inputs on a device, where they are on another."""
    lines = []
    if isinstance(model, nn.Module):
        owned = [*model.parameters(), *model.buffers()]
        lines += [f"model.to({str(device)!r})"] * any(not _is_on(device, t) for t in owned)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(not _is_on(device, leaf) for leaf in leaves):
        lines += ["import torch", "from torch.utils._pytree import tree_map_only"]
        for name in re.findall(r"\b(?:args|kwargs(?!=)|inputs|x)\b", arguments):
            move = f"lambda t: t.to({str(device)!r})"
            lines.append(f"{name} = tree_map_only(torch.Tensor, {move}, {name})")
    return lines


def _is_on(device: torch.device, tensor: torch.Tensor) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def parse_input(spec: str) -> torch.Tensor:
    """A random CPU tensor from `SHAPE:DTYPE` or `SHAPE:DTYPE:HIGH`, such as `8x128:int64:30522`.

    Floating-point values are normal; integers lie in 0 … HIGH - 1 (HIGH is 2 unless given).

    Raises:
        TargetError: the text does not parse, or the tensor would be larger than 16 GiB.
    """
    shape, dtype, high = _parsed(spec)
    if math.prod(shape) * dtype.itemsize > 16 * 2**30:
        raise TargetError(f"--input {spec!r} is larger than 16 GiB.", remedy="Check the shape.")
    try:
        return _random(shape, dtype, high)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise TargetError(
            f"--input {spec!r} cannot be made: {first_line(error, 120)}.", remedy=_EXAMPLE
        ) from error


def input_in_python(spec: str) -> str:
    """An expression for a tensor as `parse_input` makes it."""
    shape, dtype, high = _parsed(spec)
    if dtype is torch.bool:
        return f"torch.rand({shape}) < 0.5"
    if dtype.is_floating_point or dtype.is_complex:
        made, usual = f"torch.randn({shape})", torch.float32
    else:
        made, usual = f"torch.randint({high}, {shape})", torch.int64
    return made if dtype is usual else f"{made}.to({dtype})"


def _parsed(spec: str) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Shape, dtype and range of an input."""
    shape_text, _, rest = spec.partition(":")
    dtype_text, _, high_text = (rest or "float32").partition(":")
    try:
        shape = tuple(int(part) for part in shape_text.split("x"))
        high = int(high_text) if high_text else 2
    except ValueError:
        raise TargetError(
            f"--input {spec!r} has no such shape or range.", remedy=_EXAMPLE
        ) from None
    dtype = getattr(torch, dtype_text, None)
    if not isinstance(dtype, torch.dtype):
        raise TargetError(f"--input {spec!r}: {dtype_text!r} is no dtype.", remedy=_EXAMPLE)
    if any(size < 0 for size in shape) or high < 1:
        raise TargetError(f"--input {spec!r}: sizes and range must be positive.", remedy=_EXAMPLE)
    return shape, dtype, high


def _random(shape: tuple[int, ...], dtype: torch.dtype, high: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, dtype=dtype if dtype.itemsize >= 4 else wide).to(dtype)
    if high - 1 > torch.iinfo(dtype).max:
        raise ValueError(f"{high - 1} does not fit {dtype}")
    return torch.randint(0, high, shape).to(dtype)
