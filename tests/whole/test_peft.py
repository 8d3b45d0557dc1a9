"""LoRA and DoRA of the peft package: whatever is done to adapters, answers stay eager's.

A model that graphwright runs goes through each change step by step, and so does an eager twin.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from agreement import difference
from chosen import choosing
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import DoraCaching, rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import graphwright as gw
from graphwright.strategies.base import AVAILABLE
from graphwright.strategies.runners import GRAPH

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = 50
SIZES = {
    "vocab_size": WORDS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "use_cache": False,
    "loss_type": "ForCausalLMLoss",
}
# By how much another answer is off at least: far above rounding.
FAR = 1e-2


# The models.


def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **SIZES,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, **SIZES))


TARGETS = {
    LlamaForCausalLM: ["q_proj", "v_proj", "down_proj"],
    GPT2LMHeadModel: ["c_attn", "c_proj"],  # Conv1D, whose weight lies the other way
}


def adapter(base: nn.Module, *, rank: int, dora: bool) -> LoraConfig:
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.1,
        target_modules=TARGETS[type(base)],
        fan_in_fan_out=isinstance(base, GPT2LMHeadModel),
        use_dora=dora,
    )


def matter(model: PeftModel, name: str) -> None:
    """Give an adapter weights other than zero."""
    with torch.no_grad():
        for layer in layers(model):
            layer.lora_B[name].weight.normal_(std=0.5)


def layers(model: PeftModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def adapted(make: Callable[[], nn.Module], *, dora: bool, device: torch.device) -> PeftModel:
    """A transformer with the adapters `first`, which is active, and `second`."""
    base = make().to(device)
    model = get_peft_model(base, adapter(base, rank=4, dora=dora), adapter_name="first")
    model.add_adapter("second", adapter(base, rank=2, dora=dora))
    for name in ("first", "second"):
        matter(model, name)
    model.set_adapter("first")  # PEFT begins with a list of one, and never has it again.
    return model.eval()


KINDS = {
    "LoRA": (llama, False),
    "DoRA": (llama, True),
    "LoRA of Conv1D": (gpt2, False),
    "DoRA of Conv1D": (gpt2, True),
}


def model_of(kind: str, device: torch.device) -> PeftModel:
    make, dora = KINDS[kind]
    return adapted(make, dora=dora, device=device)


def tokens(device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (2, 7), generator=generator).to(device)


# What is done to them. After each step the answer is the first one, but for rounding, or is not.

FIRST, ANOTHER = True, False
Change = Callable[[PeftModel], Iterator[bool]]
CHANGES: list[Change] = []


def change(fn: Change) -> Change:
    CHANGES.append(fn)
    return fn


@change
def merged_and_unmerged(model: PeftModel) -> Iterator[bool]:
    model.merge_adapter()
    yield FIRST
    model.unmerge_adapter()
    yield FIRST


@change
def merged_safely_and_unmerged(model: PeftModel) -> Iterator[bool]:
    model.merge_adapter(safe_merge=True)  # into other memory
    yield FIRST
    model.unmerge_adapter()
    yield FIRST


@change
def the_other_one_merged(model: PeftModel) -> Iterator[bool]:
    model.merge_adapter(adapter_names=["second"])
    yield ANOTHER
    model.unmerge_adapter()
    yield FIRST


@change
def merged_then_switched(model: PeftModel) -> Iterator[bool]:
    model.merge_adapter()
    yield FIRST
    model.base_model.set_adapter("second")  # unmerges
    yield ANOTHER
    model.base_model.set_adapter("first")
    yield FIRST


@change
def merged_then_disabled(model: PeftModel) -> Iterator[bool]:
    model.merge_adapter()
    yield FIRST
    with model.disable_adapter():
        yield ANOTHER  # It is the call that unmerges.
    yield FIRST


@change
def switched_and_back(model: PeftModel) -> Iterator[bool]:
    model.set_adapter("second")
    yield ANOTHER
    model.set_adapter("first")
    yield FIRST


@change
def both_active_and_back(model: PeftModel) -> Iterator[bool]:
    model.base_model.set_adapter(["first", "second"])
    yield ANOTHER
    model.base_model.set_adapter("first")
    yield FIRST


@change
def disabled_in_a_block(model: PeftModel) -> Iterator[bool]:
    for _ in range(2):
        with model.disable_adapter():
            yield ANOTHER
        yield FIRST


@change
def disabled_and_enabled(model: PeftModel) -> Iterator[bool]:
    model.base_model.disable_adapter_layers()
    yield ANOTHER
    model.base_model.enable_adapter_layers()
    yield FIRST


@change
def disabled_in_one_layer(model: PeftModel) -> Iterator[bool]:
    layers(model)[0].enable_adapters(False)
    yield ANOTHER
    layers(model)[0].enable_adapters(True)
    yield FIRST


@change
def scaled_by_hand(model: PeftModel) -> Iterator[bool]:
    for layer in layers(model):
        layer.scaling["first"] = 3.0
    yield ANOTHER
    for layer in layers(model):
        layer.scaling["first"] = 2.0
    yield FIRST
    layers(model)[-1].scaling["first"] = 5.0
    yield ANOTHER


@change
def scaled_by_its_methods(model: PeftModel) -> Iterator[bool]:
    for layer in layers(model):
        layer.set_scale("first", 0.25)
    yield ANOTHER
    for layer in layers(model):
        layer.scale_layer(16.0)
    yield ANOTHER
    for layer in layers(model):
        layer.unscale_layer()
    yield FIRST


@change
def scaled_in_a_block(model: PeftModel) -> Iterator[bool]:
    with rescale_adapter_scale(model, 0.25):
        yield ANOTHER
    yield FIRST


@change
def the_idle_one_deleted(model: PeftModel) -> Iterator[bool]:
    model.delete_adapter("second")
    yield FIRST


@change
def the_active_one_deleted(model: PeftModel) -> Iterator[bool]:
    model.set_adapter("second")
    yield ANOTHER
    model.delete_adapter("second")  # The first is active then.
    yield FIRST


@change
def another_one_added(model: PeftModel) -> Iterator[bool]:
    base = model.get_base_model()
    torch.manual_seed(3)
    model.add_adapter("third", adapter(base, rank=3, dora=layers(model)[0].use_dora["first"]))
    matter(model, "third")
    model.eval()
    yield FIRST
    model.set_adapter("third")
    yield ANOTHER
    model.set_adapter("first")
    yield FIRST
    model.delete_adapter("third")
    yield FIRST


@change
def merged_and_unloaded(model: PeftModel) -> Iterator[bool]:
    model.merge_and_unload()
    yield FIRST


@change
def unloaded(model: PeftModel) -> Iterator[bool]:
    model.unload()
    yield ANOTHER


@change
def weights_written(model: PeftModel) -> Iterator[bool]:
    with torch.no_grad():
        for layer in layers(model):
            layer.lora_B["first"].weight.mul_(-2)
    yield ANOTHER


@change
def weights_loaded(model: PeftModel) -> Iterator[bool]:
    kept = get_peft_model_state_dict(model, adapter_name="first")
    other = {name: weight * 2 for name, weight in kept.items()}
    kept = copy.deepcopy(kept)
    set_peft_model_state_dict(model, other, adapter_name="first")
    yield ANOTHER
    set_peft_model_state_dict(model, kept, adapter_name="first")
    yield FIRST


@change
def weights_written_unseen(model: PeftModel) -> Iterator[bool]:
    for layer in layers(model):
        layer.lora_B["first"].weight.data.mul_(-2)
    yield ANOTHER


# Those that everything goes through.
MAIN_CHANGES = [
    merged_and_unmerged,
    switched_and_back,
    disabled_in_a_block,
    scaled_by_hand,
    the_active_one_deleted,
    weights_written_unseen,
]


def each_change(*firsts: Any, main_of: Sequence[Any], quick: int = 1, others: int = 1) -> list[Any]:
    """First parameters (kinds of adapters, strategies) with each of the changes.

    Of `main_of`, one in `quick` of the main changes is quick and one in `others` of the rest slow.
    Each other first parameter has a third of the main changes, slow, and the next has the next.
    """

    def marks(turn: int, change: Change) -> Any:
        main = MAIN_CHANGES.index(change) if change in MAIN_CHANGES else None
        if firsts[turn] not in main_of:
            due = main is not None and (main + turn) % 3 == 0
        elif main is None:
            due = CHANGES.index(change) % others == 0
        elif main % quick == 0:
            return ()
        else:
            due = True
        return pytest.mark.slow if due else pytest.mark.exhaustive

    return [
        pytest.param(first, change, id=f"{first}-{change.__name__}", marks=marks(turn, change))
        for turn, first in enumerate(firsts)
        for change in CHANGES
    ]


# What runs them, and how many calls it has answered itself.

Part = Callable[..., Any]


def audited(fn: Callable[..., Any]) -> dict[str, Any]:
    """Have each call look at the weights themselves: merging writes to them unseen."""
    return {"audit": 1} if "audit" in inspect.signature(fn).parameters else {}


def fused(model: nn.Module, x: torch.Tensor) -> gw.FusedModule:
    return gw.fuse(model, (), {"input_ids": x}, verify=False, **audited(gw.fuse))


def tuned(model: nn.Module, x: torch.Tensor, strategy: str) -> gw.TunedModule:
    # Graphs on the CPU are for tests: tune() does not offer them.
    probed = {(id(GRAPH), x.device.type): (GRAPH, AVAILABLE)}
    with choosing(strategy), mock.patch("graphwright.strategies.base._probed", probed):
        part = gw.tune(
            model,
            (),
            {"input_ids": x},
            strategies=[strategy],
            isolate=False,
            remember=False,
            progress=False,
            **audited(gw.tune),
        )
    assert part.report.chosen == strategy
    return part


def answered(part: Any) -> int:
    """Calls that a part has answered, and not the module."""
    if isinstance(part, gw.GraphedModule):
        return part.statistics.hits
    return int(part.calls["fused" if isinstance(part, gw.FusedModule) else "tuned"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What peft has to say (already unmerged, another adapter is active) is not tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def goes_through(change: Change, part: Part, model: PeftModel, x: torch.Tensor) -> None:
    """Each step of a change leaves the part, and the model itself, with the answers of a twin."""
    other, twin = tokens(x.device, 1), copy.deepcopy(model)
    with torch.no_grad():
        first = twin(input_ids=x)
        for given in (x, other):
            assert difference(part(input_ids=given), twin(input_ids=given)) is None
        assert answered(part) >= 2
        mine, theirs = change(model), change(twin)
        for step in range(100):
            with quiet():
                alike, asked = next(theirs, None), next(mine, None)
            if asked is None:
                return
            with warnings.catch_warnings():
                if change is merged_then_disabled:  # A call that unmerges cannot be captured.
                    warnings.simplefilter("ignore", RuntimeWarning)
                found = [part(input_ids=given) for given in (x, x, other)]
            wrong = [
                difference(each, twin(input_ids=given))
                for each, given in zip(found, (x, x, other), strict=True)
            ]
            wrong += [difference(model(input_ids=x), twin(input_ids=x), "the model's own output")]
            assert [what for what in wrong if what] == [], f"after step {step}"
            now = twin(input_ids=x)
            if alike:
                assert difference(now, first) is None
            else:
                assert float((now.logits - first.logits).abs().max()) > FAR


def holds_copies(strategy: str) -> bool:
    return strategy in ("fused", "torchscript:freeze")


def noticed(change: Change, fn: Callable[..., Any]) -> None:
    """Skip what only an audit of the weights can notice, where there is none."""
    if change is weights_written_unseen and not audited(fn):
        pytest.skip(f"{fn.__name__} has no audit of the weights that it holds copies of")


# graph()


@pytest.mark.parametrize(("kind", "change"), each_change(*KINDS, main_of=["LoRA"], quick=2))
def test_graphs_follow_adapters(kind: str, change: Change, device: torch.device) -> None:
    model, x = model_of(kind, device), tokens(device)
    part = gw.graph(model)
    goes_through(change, part, model, x)
    # Graphs have answered after each step too.
    assert part.statistics.eager == {} or change is merged_then_disabled


def test_graphs_wait_for_their_adapter_to_come_back(device: torch.device) -> None:
    model, x = model_of("LoRA", device), tokens(device)
    part = gw.graph(model)
    with torch.no_grad():
        for _ in range(3):
            for name in ("first", "second"):
                model.set_adapter(name)
                assert difference(part(input_ids=x), model(input_ids=x)) is None
    assert part.statistics.captures == 2
    assert part.statistics.hits == 6


def test_graphs_follow_an_adapter_for_each_row(device: torch.device) -> None:
    model, x = model_of("LoRA", device), tokens(device)
    twin, part = copy.deepcopy(model), gw.graph(model)
    answers = []
    with torch.no_grad(), quiet():
        for names in (["first"] * 2, ["first", "second"], ["__base__", "first"], ["first"] * 2):
            for _ in range(2):
                found = part(input_ids=x, adapter_names=names)
                expected = twin(input_ids=x, adapter_names=names)
                assert difference(found, expected) is None
                assert difference(part(input_ids=x), twin(input_ids=x)) is None
            answers.append(expected.logits)
    assert all(float((a - b).abs().max()) > FAR for a, b in itertools.pairwise(answers))
    assert part.statistics.hits > 2


def test_graphs_follow_what_dora_keeps_between_calls(device: torch.device) -> None:
    model, x = model_of("DoRA", device), tokens(device)
    twin, part = copy.deepcopy(model), gw.graph(model)
    answers = []
    with torch.no_grad(), DoraCaching():
        for write in (False, True, False):
            for each in (model, twin):
                if write:
                    layers(each)[0].lora_B["first"].weight.mul_(-2)  # Kept norms hide this.
                else:
                    each.train().eval()  # forgets them
            for _ in range(3):
                expected = twin(input_ids=x)
                assert difference(part(input_ids=x), expected) is None
            answers.append(expected)
    assert answered(part) > 2
    assert difference(answers[1], answers[2]) is not None


# fuse()


@pytest.mark.parametrize(("kind", "change"), each_change(*KINDS, main_of=["LoRA"], quick=3))
def test_fused_modules_follow_adapters(kind: str, change: Change, device: torch.device) -> None:
    noticed(change, gw.fuse)
    model, x = model_of(kind, device), tokens(device)
    goes_through(change, fused(model, x), model, x)


def test_a_fused_module_answers_again_when_its_adapter_is_back(device: torch.device) -> None:
    model, x = model_of("LoRA", device), tokens(device)
    part = fused(model, x)
    for change in (switched_and_back, disabled_in_a_block, scaled_in_a_block):
        before = answered(part)
        goes_through(change, part, model, x)
        assert answered(part) > before + 2


# tune()

STRATEGIES = ["eager+graph", "torchscript:freeze", "fused"]
QUICK = "torchscript:freeze"  # It has the weights as constants.


# How graphs and fused modules follow all of these changes is tested above.
TUNED = [
    pytest.param(kind, *each.values, id=f"{kind}-{each.id}", marks=each.marks)
    for kind, main_of in (("LoRA", [QUICK]), ("DoRA", []))
    for each in each_change(*STRATEGIES, main_of=main_of, quick=6, others=5)
]


@pytest.mark.parametrize(("kind", "strategy", "change"), TUNED)
def test_tuned_modules_follow_adapters(
    kind: str, strategy: str, change: Change, device: torch.device
) -> None:
    if holds_copies(strategy):
        noticed(change, gw.tune)
    model, x = model_of(kind, device), tokens(device)
    goes_through(change, tuned(model, x, strategy), model, x)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=() if s == QUICK else pytest.mark.exhaustive) for s in STRATEGIES],
)
def test_a_winner_answers_again_when_its_adapter_is_back(
    strategy: str, device: torch.device
) -> None:
    model, x = model_of("DoRA", device), tokens(device)
    part = tuned(model, x, strategy)
    for change in (switched_and_back, disabled_in_a_block, scaled_in_a_block):
        before = answered(part)
        goes_through(change, part, model, x)
        assert answered(part) > before + 2


# A model that gets its adapters later.


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["graph", "fuse", "tune"])
def test_adapters_that_come_later_are_used(way: str, dora: bool, device: torch.device) -> None:
    base, x = llama().to(device).eval(), tokens(device)
    make = {"graph": lambda: gw.graph(base), "fuse": lambda: fused(base, x)}
    part: Any = make.get(way, lambda: tuned(base, x, "eager+graph"))()
    with torch.no_grad():
        for _ in range(2):
            bare = base(input_ids=x)
            assert difference(part(input_ids=x), bare) is None
        assert answered(part) >= 2
        model = get_peft_model(base, adapter(base, rank=4, dora=dora), adapter_name="first")
        matter(model, "first")
        model.eval()
        for _ in range(2):
            assert difference(part(input_ids=x), model(input_ids=x)) is None
        assert float((model(input_ids=x).logits - bare.logits).abs().max()) > FAR
        model.unload()
        assert difference(part(input_ids=x), bare) is None


# graph_step()


class Training:
    """Steps over the adapters and one norm, which learns when no adapter does."""

    def __init__(self, kind: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = model_of(kind, device).train()
        norm = self.model.get_base_model().model.norm.weight.requires_grad_()
        self.learning = {
            name: weight
            for name, weight in self.model.named_parameters()
            if "lora_" in name or weight is norm
        }
        self.optimizer = torch.optim.AdamW(self.learning.values(), lr=1e-2, fused=True)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(input_ids=x, labels=x).loss
        loss.backward()
        self.optimizer.step()
        return loss


def trains_alike(part: Part, mine: Training, theirs: Training, device: torch.device) -> None:
    for seed in range(3):
        x = tokens(device, seed)
        torch.manual_seed(seed)  # Both drop out the same.
        expected = theirs.step(x).detach()
        torch.manual_seed(seed)
        found = part(x)
        assert difference(found, expected, "the loss") is None
        for name, weight in theirs.learning.items():
            assert difference(mine.learning[name].detach(), weight.detach(), name) is None


@pytest.mark.parametrize(
    ("kind", "change"), each_change("LoRA", "DoRA", main_of=["LoRA"], quick=3, others=2)
)
def test_steps_follow_adapters(kind: str, change: Change, device: torch.device) -> None:
    mine, theirs = Training(kind, device), Training(kind, device)
    x = tokens(device)
    part = gw.graph_step(mine.step, (x,), optimizer=mine.optimizer)
    trains_alike(part, mine, theirs, device)
    replays = part.statistics.replays
    assert replays >= 2
    ours, eager_s = change(mine.model), change(theirs.model)
    for _ in range(100):
        with quiet():
            if next(ours, None) is None:
                break
            next(eager_s)
            mine.model.train()
            theirs.model.train()
        with warnings.catch_warnings():
            if change is merged_then_disabled:  # A step that unmerges cannot be captured.
                warnings.simplefilter("ignore", RuntimeWarning)
            trains_alike(part, mine, theirs, device)
    assert part.statistics.replays > replays


def test_steps_move_the_active_adapter_alone(device: torch.device) -> None:
    mine, theirs = Training("LoRA", device), Training("LoRA", device)
    part = gw.graph_step(mine.step, (tokens(device),), optimizer=mine.optimizer)
    for name in ("first", "second", "first"):
        for training in (mine, theirs):
            training.model.set_adapter(name)
        before = {key: weight.detach().clone() for key, weight in mine.learning.items()}
        trains_alike(part, mine, theirs, device)
        moved = {key for key, old in before.items() if not torch.equal(old, mine.learning[key])}
        assert moved == {key for key in before if name in key or "norm" in key}
