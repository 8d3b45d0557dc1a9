"""What is right passes; each kind of wrong is named. The same tests on CPU and CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import planted
import pytest
import torch
from planted import Branching, Counting, Small
from torch import nn

from graphwright.calls.snapshots import Call, ModuleState, clone_leaves, same_bits
from graphwright.errors import ModelFailed, SignatureError, VerificationError
from graphwright.evaluation.reference import Reference, reference
from graphwright.evaluation.verification import Verification, agrees, verify


def made(model: nn.Module, *args: Any, **kwargs: Any) -> Reference:
    tolerance = kwargs.pop("tolerance", None)
    return reference(model, model, Call("the sample", args, kwargs), tolerance=tolerance)


def judge(
    make: Callable[[nn.Module], Callable[..., Any]], model: nn.Module, *args: Any
) -> Verification:
    return verify(make(model), made(model, *args))


def test_eager_itself_is_right(device: torch.device) -> None:
    model = Small().eval().to(device)
    verdict = judge(lambda m: m, model, torch.randn(4, 16, device=device))
    assert verdict.ok
    assert verdict.error is not None
    assert verdict.error.rms < 1e-5


def test_whether_results_agree_takes_a_call_a_case() -> None:
    model, calls = Small().eval(), []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return model(x)

    ref = made(model, torch.randn(4, 16))
    assert agrees(counted, ref)
    assert len(calls) == len(ref.cases)
    assert not agrees(lambda x: model(x) * 1.01, ref)


def test_whether_results_agree_leaves_the_module_as_it_was() -> None:
    model = Counting()
    ref = made(model, torch.randn(4))
    assert agrees(model, ref)
    assert model.count == 0


def test_another_order_of_summation_is_right(device: torch.device) -> None:
    """A candidate need not repeat eager's bits, only be about as close to float64."""
    model = nn.Linear(512, 8).eval().to(device)

    def halves(m: nn.Module) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return x[:, :99] @ m.weight[:, :99].t() + x[:, 99:] @ m.weight[:, 99:].t() + m.bias

        return call

    assert judge(halves, model, torch.randn(4, 512, device=device)).ok


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (planted.previous_output, "off by"),
        (planted.cached_by_address, "stale|overwritten"),
        (planted.aliases_input, "args\\[0\\] after the call|shares memory"),
        (planted.static_output, "overwritten by the next call"),
        (planted.off_by_one_per_cent, "off by 1.0e-02"),
        (planted.one_element_zeroed, "off by"),
        (planted.corrupts_weights, "parameter first.weight was changed"),
        (planted.float64_output, "dtype torch.float64"),
    ],
)
def test_planted_defects_are_named(make: Any, reason: str, device: torch.device) -> None:
    model = Small().eval().to(device)
    verdict = judge(make, model, torch.randn(4, 16, device=device))
    assert not verdict.ok
    assert re.search(reason, verdict.reason), verdict.reason


def test_one_wrong_element_in_many_is_wrong(device: torch.device) -> None:
    model = nn.ReLU().eval()
    x = torch.rand(2**22, device=device) + 0.5
    verdict = judge(planted.one_element_zeroed, model, x)
    assert not verdict.ok
    assert verdict.error is not None
    assert verdict.error.rms < 1e-3


def test_a_frozen_branch_is_found(device: torch.device) -> None:
    x = torch.randn(4, 16, device=device)
    for mask in (torch.ones(4, 16), torch.ones(4, 16, dtype=torch.bool)):
        verdict = judge(planted.frozen_branch, Branching().eval(), x, mask.to(device))
        assert not verdict.ok


def test_a_new_alias_of_an_input_is_wrong(device: torch.device) -> None:
    class Copy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    verdict = judge(planted.views_input, Copy().eval(), torch.randn(4, device=device))
    assert "shares memory with args[0]" in verdict.reason


def test_a_lost_alias_of_an_input_is_wrong(device: torch.device) -> None:
    class View(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1)

    model = View().eval()
    assert judge(lambda m: m, model, torch.randn(4, 4, device=device)).ok
    verdict = judge(lambda m: lambda x: m(x).clone(), model, torch.randn(4, 4, device=device))
    assert "no longer shares memory" in verdict.reason


def test_a_mutated_input_belongs_to_the_result(device: torch.device) -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return x + 1

    model = InPlace().eval()
    x = torch.randn(4, 4, device=device)
    kept = x.clone()
    assert judge(lambda m: m, model, x).ok
    assert same_bits(x, kept)
    verdict = judge(lambda m: lambda x: x * 2 + 1, model, x)
    assert verdict.reason.endswith("and 0.0e+00") or "args[0] after the call" in verdict.reason


def test_buffers_that_calls_change_belong_to_the_result(device: torch.device) -> None:
    model = Counting().eval().to(device)
    x = torch.randn(4, device=device)
    assert judge(lambda m: m, model, x).ok
    assert float(model.count) == 0
    verdict = judge(lambda m: lambda x: x * 1, model, x)
    assert "buffer count after the call: not changed" in verdict.reason


def test_nan_and_inf_must_stay_where_eager_has_them(device: torch.device) -> None:
    model = nn.ReLU().eval()
    x = torch.tensor([1.0, float("nan"), float("inf"), -2.0], device=device)
    assert judge(lambda m: m, model, x).ok
    verdict = judge(lambda m: lambda x: m(x).nan_to_num(), model, x)
    assert "NaN or Inf" in verdict.reason


def test_every_leaf_counts_integers_exactly() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"values": x * 2, "best": x.argmax(-1), "name": "several", "none": None}

    model = Several().eval()
    x = torch.randn(8, 5)
    assert judge(lambda m: m, model, x).ok
    wrong = judge(lambda m: lambda x: {**m(x), "best": m(x)["best"] + 1}, model, x)
    assert "output['best']" in wrong.reason
    renamed = judge(lambda m: lambda x: {**m(x), "name": "other"}, model, x)
    assert "output['name'] is 'other'" in renamed.reason
    missing = judge(lambda m: lambda x: {"values": x * 2}, model, x)
    assert "structure" in missing.reason


def test_half_precision_is_judged_by_eager_s_own_error(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()).eval()
    model = model.to(device, torch.bfloat16)
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    ref = made(model, x)
    assert 1e-4 < ref.eager_error["output"].rms < 2e-2
    assert verify(model, ref).ok

    def better(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            y = nn.functional.linear(x.float(), model[0].weight.float(), model[0].bias.float())
            y = nn.functional.layer_norm(y, (64,), model[1].weight.float(), model[1].bias.float())
            return nn.functional.gelu(y).to(torch.bfloat16)

    assert verify(better, ref).ok
    assert not verify(lambda x: better(x) * 1.1, ref).ok


def test_precision_written_into_the_model_does_not_reach_the_reference() -> None:
    class Narrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).to(torch.bfloat16).float()

    ref = made(Narrows().eval(), torch.randn(8, 64))
    assert ref.notes == []
    assert ref.eager_error["output"].rms > 1e-4


def test_recurrent_layers_have_a_float64_reference(device: torch.device) -> None:
    model = nn.LSTM(8, 8).eval().to(device)
    ref = made(model, torch.randn(5, 2, 8, device=device))
    assert not any("no float64" in note for note in ref.notes)
    assert ref.eager_error["output[0]"].rms < 1e-2


def test_disagreeing_eager_calls_are_refused() -> None:
    class Drops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x)

    with pytest.raises(VerificationError, match="disagree: output"):
        made(Drops().eval(), torch.randn(64))


@pytest.mark.gpu
def test_tf32_is_accepted_where_the_switches_permit_it() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten()).eval().cuda()
    x = torch.randn(4, 8, 12, 12, device="cuda")

    def narrow(x: torch.Tensor) -> torch.Tensor:
        rounded = (x.view(torch.int32) + 4096 & ~0x1FFF).view(torch.float32)
        with torch.no_grad():
            return model(rounded)

    with torch.backends.cudnn.flags(allow_tf32=False):
        strict = made(model, x)
        assert not strict.tf32
        assert not verify(narrow, strict).ok
    with torch.backends.cudnn.flags(allow_tf32=True):
        permitted = made(model, x)
        assert permitted.tf32
        assert verify(narrow, permitted).ok
        assert not verify(lambda x: narrow(x) * 1.01, permitted).ok


def test_a_stated_tolerance_takes_the_rule_s_place() -> None:
    model = Small().eval()
    ref = made(model, torch.randn(4, 16), tolerance=0.05)
    assert verify(planted.off_by_one_per_cent(model), ref).ok
    assert not verify(lambda x: model(x) * 1.2, ref).ok


def test_a_failing_model_is_named_with_its_line() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("boom")

    with pytest.raises(ModelFailed, match=r"RuntimeError: boom.*test_verification.py:\d+"):
        made(Fails().eval(), torch.randn(4))


def test_outputs_that_cannot_be_compared_are_refused() -> None:
    class Opaque(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"cache": object(), "x": x}

    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> str:
            return "done"

    with pytest.raises(SignatureError, match=r"output\['cache'\] is an object"):
        made(Opaque().eval(), torch.randn(4))
    with pytest.raises(SignatureError, match="no tensor"):
        made(Nothing().eval(), torch.randn(4))


def test_ids_stay_valid_ids(device: torch.device) -> None:
    model = nn.Embedding(10, 4).eval().to(device)
    ref = made(model, torch.tensor([[3, 9, 0], [1, 1, 2]], device=device))
    assert ref.notes == []
    assert all(0 <= int(c.call.args[0].min()) <= int(c.call.args[0].max()) < 10 for c in ref.cases)
    assert len(ref.cases) >= 3


def test_clones_keep_strides_overlaps_and_aliases() -> None:
    base = torch.arange(12.0)
    leaves = [base[2:8].view(2, 3).t(), base, base[:1].expand(5), 3, base]
    a, b, c, d, e = clone_leaves(leaves)
    assert a.stride() == (1, 3)
    assert a.storage_offset() == 2
    assert c.stride() == (0,)
    assert d == 3
    assert b is e
    b[2] = 99
    assert a[0, 0] == 99
    assert base[2] == 2


def test_state_is_put_back_and_corruption_is_seen() -> None:
    model = Small().eval()
    state = ModuleState(model)
    kept = model.offset.clone()
    model.offset.add_(1)
    assert list(state.changes()) == ["buffer offset after the call"]
    state.restore()
    assert same_bits(model.offset, kept)
    assert state.corrupted() is None
    with torch.no_grad():
        model.second.bias[0] += 1e-6
    assert state.corrupted() == "second.bias"
    assert state.corrupted() is None


def test_a_constant_that_is_handed_out_is_wrong() -> None:
    class WithConstant(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, torch.arange(3.0)

    constant = torch.arange(3.0)
    verdict = judge(lambda m: lambda x: (x + 1, constant), WithConstant().eval(), torch.randn(4))
    assert "after its output was written to" in verdict.reason


def test_outputs_share_memory_exactly_where_eager_s_do(device: torch.device) -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x * 2).chunk(2)

    model, x = Halves().eval(), torch.randn(4, device=device)
    assert judge(lambda m: m, model, x).ok
    verdict = judge(lambda m: lambda x: tuple(t.clone() for t in m(x)), model, x)
    assert "output[1] no longer shares memory" in verdict.reason


def test_other_strides_are_wrong(device: torch.device) -> None:
    verdict = judge(
        lambda m: lambda x: m(x).t().contiguous().t(), nn.ReLU().eval(), torch.randn(4, 6)
    )
    assert "strides" in verdict.reason


class Reassigns(nn.Module):
    """Replaces a buffer in every call in place of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + 1
        self.calls += 1
        return x * self.total


def test_buffers_that_calls_replace_are_put_back_and_compared() -> None:
    model = Reassigns().eval()
    total, x = model.total, torch.randn(4)
    assert judge(lambda m: m, model, x).ok
    assert model.total is total
    assert float(total) == 1
    assert model.calls == 0
    verdict = judge(lambda m: lambda x: x * 2, model, x)
    assert "buffer total after the call: not changed" in verdict.reason


def test_buffers_carry_no_gradient_history_away() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("cache", torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache[:] = self.linear(x)
            return self.cache * 2

    model = Cache().eval()
    made(model, torch.randn(2, 4))
    assert not model.cache.requires_grad
    assert float(model.cache.abs().sum()) == 0


def test_permuted_weights_are_seen_and_put_back() -> None:
    model = Small().eval()
    kept = model.first.weight.detach().clone()

    def rolls(m: nn.Module) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = m(x)
                m.first.weight.copy_(m.first.weight.roll(1, 0))
            return y

        return call

    assert "parameter first.weight" in judge(rolls, model, torch.randn(4, 16)).reason
    assert torch.equal(model.first.weight, kept)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.fft.rfft(x),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.complex(x, x).conj().resolve_conj() * 2,
    ],
)
def test_complex_and_narrow_outputs_can_be_judged(function: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    model = Model().eval()
    assert judge(lambda m: m, model, torch.randn(8, 16)).ok
    wrong = judge(lambda m: lambda x: m(x * 1.5), model, torch.randn(8, 16))
    assert not wrong.ok


def test_complex_inputs_keep_their_imaginary_part() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2 + 1j)

    x = torch.randn(8, 8, dtype=torch.complex64)
    assert judge(lambda m: m, Scale().eval(), x).ok
    assert not judge(lambda m: lambda x: m(x).real + 0j, Scale().eval(), x).ok


def test_one_element_outputs_are_not_held_to_eager_s_luck() -> None:
    for seed in range(12):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)).eval()

        def reordered(x: torch.Tensor, model: nn.Sequential = model) -> torch.Tensor:
            with torch.no_grad():
                y = nn.functional.gelu(model[0](x)).flip(1)
                return y @ model[2].weight.flip(1).t() + model[2].bias

        ref = made(model, torch.randn(1, 256))
        assert verify(reordered, ref).ok
        assert not verify(lambda x, m=model: m(x) * 1.01, ref).ok


@pytest.mark.parametrize("value", [torch.tensor(1), torch.tensor(5), torch.ones(3).long()])
def test_values_that_are_all_equal_are_varied(value: torch.Tensor) -> None:
    class Times(nn.Module):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return x * t.reshape(-1)[0].item()

    frozen = float(value.reshape(-1)[0])
    verdict = judge(lambda m: lambda x, t: x * frozen, Times().eval(), torch.randn(16, 8), value)
    assert not verdict.ok
    given, lowered = {0: ("5", "4"), 1: ("1", "0")}[int(frozen == 1)]
    hint = f"wrong for args[1] of {lowered}, tried because yours is {given}: output is off by"
    if value.numel() > 1:
        hint = (
            "wrong for args[1] of zeros, tried because yours is all ones; give one with both "
            "values: output is off by"
        )
    assert verdict.reason.startswith(hint)


def test_integers_are_the_sample_s_own() -> None:
    ref = made(nn.Embedding(10, 4).eval(), torch.tensor([3, 7, 9, 7]))
    assert all(set(c.call.args[0].tolist()) <= {3, 7, 9} for c in ref.cases)


def test_a_call_that_writes_what_was_there_is_not_pure() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            if which == "input":
                x.clamp_(max=1e6)
            elif which == "buffer":
                self.n.add_(0)
            elif which == "replaced":
                self.n = self.n.clone()
            elif which == "the same":
                self.n = self.n.detach()
            return x * 2

    found = {}
    for which in ("nothing", "input", "buffer", "replaced", "the same"):
        model = Writes().eval()
        ref = reference(model, model, Call("the sample", (torch.randn(4), which), {}))
        found[which] = (ref.pure, set(ref.written))
    assert found == {
        "nothing": (True, set()),
        "input": (False, set()),
        "buffer": (False, {"n"}),
        "replaced": (False, {"n"}),
        "the same": (True, set()),
    }
