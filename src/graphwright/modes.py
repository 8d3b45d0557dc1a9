"""Seeing the operations that a block of code runs, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """A dispatch mode: inside of its block it runs the operations in PyTorch's place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch is to have TorchDynamo leave this alone.

        It would import that for more than a second, though nobody may ever need it.
        """
        return not hasattr(eval_frame, "set_code_exec_strategy")

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of ATen; `kwargs` may be changed."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.run(func, args, dict(kwargs or {}))


if not OperationMode._should_skip_dynamo():
    # What `torch._dynamo.disable` comes to, for this function and for all that it calls.
    _skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(
        OperationMode.__torch_dispatch__.__code__, eval_frame._FrameExecStrategy(_skip, _skip)
    )
