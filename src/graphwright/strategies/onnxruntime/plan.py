"""How an exported model is called, as stored in `call.json` beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from ...calls.serialization import TreeTemplate
from ...errors import ArtifactError, StrategyFailed, first_line

MODEL, CALL = "model.onnx", "call.json"
# TensorProto.DataType; ONNX Runtime takes these also where NumPy has no such type.
ELEMENTS = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}


@dataclass(frozen=True)
class Result:
    """One output as eager gave it for the sample: `kind` of device, shape, strides and dtype."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Result:
        """Describe a tensor."""
        return cls(tensor.device.type, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def lay_out(self, value: torch.Tensor) -> torch.Tensor:
        """The same values with eager's strides; for another shape, in their order."""
        if value.shape == self.shape and value.stride() == self.stride:
            return value
        spread = [step == 0 and n > 1 for step, n in zip(self.stride, value.shape, strict=True)]
        base = value[tuple(slice(0, 1) if one else slice(None) for one in spread)]
        steps = list(self.stride)
        if value.shape != self.shape:
            step = 1
            for axis in sorted(range(value.dim()), key=lambda axis: (self.stride[axis], -axis)):
                steps[axis], step = step, step * base.shape[axis]
        if not any(spread) and value.stride() == tuple(steps):
            return value
        made = torch.empty_strided(base.shape, steps, dtype=value.dtype, device=value.device)
        return made.copy_(base).expand(value.shape)


@dataclass(frozen=True)
class Plan:
    """How the exported model is called: all that `call.json` holds.

    Attributes:
        slots: of the tensors among a call's leaves; the model's in0, in1, … in this order.
        out: the tree that it returns.
        results: the outputs that the model computes, by number.
        same: of the other outputs, which tensor they are: an input or an earlier output.
        dynamic: whether sizes change from call to call.
    """

    slots: tuple[int, ...]
    out: TreeTemplate
    results: dict[int, Result]
    same: dict[int, tuple[str, int]]
    dynamic: bool

    def text(self) -> str:
        """As JSON.

        Raises:
            StrategyFailed: the output has leaves or containers that JSON cannot hold.
        """
        try:
            out = self.out.written()
        except ArtifactError as error:
            raise StrategyFailed(error.what, remedy=error.remedy) from error
        results = {n: {**asdict(r), "dtype": str(r.dtype)} for n, r in self.results.items()}
        return json.dumps(
            {
                "inputs": self.slots,
                "outputs": out,
                "results": results,
                "same": self.same,
                "dynamic": self.dynamic,
            },
            indent=1,
        )

    @classmethod
    def read(cls, text: str) -> Plan:
        """Inverse of `text`.

        Raises:
            StrategyFailed: it is none, or a container's type is not known here.
        """
        dtypes = {str(dtype): dtype for dtype in ELEMENTS}
        try:
            saved = json.loads(text)
            return cls(
                tuple(saved["inputs"]),
                TreeTemplate.read(saved["outputs"]),
                {
                    int(n): Result(
                        r["kind"], dtypes[r["dtype"]], tuple(r["shape"]), tuple(r["stride"])
                    )
                    for n, r in saved["results"].items()
                },
                {int(n): (kind, which) for n, (kind, which) in saved["same"].items()},
                saved["dynamic"],
            )
        except (LookupError, TypeError, ValueError, NotImplementedError) as error:
            raise StrategyFailed(
                f"{CALL} cannot be read: {first_line(error)}",
                remedy="Import the module that registers the output's type before loading, or "
                "save anew.",
            ) from error
