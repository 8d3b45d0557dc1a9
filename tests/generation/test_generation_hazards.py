"""What goes wrong with graphs of decode steps, each seen to fail with its protection off."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from generating import LENGTH, agree, gpt2, mistral, prompts, varied
from torch import nn

import graphwright as gw
from graphwright.generation import decode_steps, static_cache
from graphwright.generation.generator import GraphedGenerator

ASKED = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="module")
def shared() -> tuple[Any, gw.GraphedGenerator]:
    model = gpt2()
    return model, gw.graph_generate(model, steps_per_launch=2)


@pytest.fixture(params=[False, True], ids=["protected", "unprotected"])
def off(request: pytest.FixtureRequest) -> bool:
    """Whether the protection is off, and the test has to fail."""
    return bool(request.param)


@contextlib.contextmanager
def fails(off: bool) -> Iterator[None]:
    if not off:
        yield
        return
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        yield


# ------------------------------------------------------------ the cache


def not_cleared(layer: Any, filled: Any, length: int) -> None:
    for mine, its in ((layer.keys, filled.keys), (layer.values, filled.values)):
        mine[:, :, length - its.shape[2] : length].copy_(its)


def test_what_an_earlier_call_left_in_the_cache(monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)
    agree(model, generator, prompts(2) | ASKED)
    if off:
        monkeypatch.setattr(static_cache.PositionedLayer, "read", not_cleared)
    # An earlier text whose numbers overflowed: a weight of zero does not hide a NaN.
    (kept,) = generator._kept.values()
    for layer in kept.decoder.cache._own:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    with fails(off):
        agree(model, generator, prompts(2, 5) | ASKED)


def test_a_window_that_fills_inside_of_a_launch(monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    model = mistral()
    generator = gw.graph_generate(model, steps_per_launch=8)
    if off:
        # As if the window were as long as the text: nothing is hidden.
        whole = transformers.masking_utils.sliding_window_causal_mask_function
        monkeypatch.setattr(
            transformers.masking_utils,
            "sliding_window_causal_mask_function",
            lambda size: whole(size + (1000 if generator._busy and generator._kept else 0)),
        )
        monkeypatch.setattr(decode_steps, "_difference", lambda *args: None)
    with fails(off):
        for length in (4, 9, 15):
            agree(model, generator, prompts(2, length) | {"max_new_tokens": 24, "do_sample": False})
        assert generator.statistics.eager == {}


def test_a_prompt_of_zeros_under_a_mask(shared: Any) -> None:
    model, generator = shared
    ids = torch.zeros(3, 8, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[2, :3] = 0
    agree(model, generator, {"input_ids": ids, "attention_mask": mask} | ASKED)


def test_a_static_step_that_computes_something_else_is_never_used(
    monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    """A planted model that counts on its own kind of cache."""

    class Counting(transformers.GPT2LMHeadModel):
        def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            found = super().forward(*args, past_key_values=past_key_values, **kwargs)
            if not isinstance(past_key_values, transformers.DynamicCache):
                found.logits = found.logits.roll(1, -1)
            return found

    source = gpt2()
    model: Any = Counting(source.config).eval()
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    generator = gw.graph_generate(model)
    if off:
        monkeypatch.setattr(decode_steps, "_difference", lambda *args: None)
    with warnings.catch_warnings(), fails(off):
        warnings.simplefilter("ignore", gw.FallbackWarning)
        for _ in range(2):
            agree(model, generator, prompts(2) | ASKED)
        (reason,) = generator.statistics.eager
        assert "its step differs with a static cache" in reason
        assert generator.statistics.calls == 0


# ------------------------------------------------------------ the end


def test_the_end_is_seen_late_and_costs_no_token(
    shared: Any, monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    model, generator = shared
    free = model.generate(**prompts(2), **ASKED)[:, LENGTH:]
    if off:
        monkeypatch.setattr(
            decode_steps._Progress, "valid", lambda self: self.start + min(self.done, self._steps)
        )
    with fails(off):
        for at in range(0, 18, 3):
            ends = [int(free[0, at]), int(free[1, at])]
            agree(model, generator, prompts(2) | ASKED | {"eos_token_id": ends})


def test_an_end_in_the_first_token(shared: Any) -> None:
    model, generator = shared
    free = model.generate(**prompts(1), **ASKED)[:, LENGTH:]
    made = agree(model, generator, prompts(1) | ASKED | {"eos_token_id": int(free[0, 0])})
    assert made.shape[1] == LENGTH + 1


# ------------------------------------------------------------ the model changes


def test_weights_change_between_two_calls(shared: Any) -> None:
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)

    def in_place() -> None:
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight.neg_()

    def new_data() -> None:
        weight = model.transformer.h[1].mlp.c_fc.weight
        weight.data = weight.data * -1.5

    def assigned() -> None:
        state = {name: tensor.flip(-1) for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.tie_weights()

    def another_module() -> None:
        model.transformer.h[0] = type(model.transformer.h[0])(model.config, layer_idx=0).eval()

    before = agree(model, generator, prompts(2) | ASKED)
    for change in (in_place, new_data, assigned, another_module):
        change()
        after = agree(model, generator, prompts(2) | ASKED)
        assert not torch.equal(before, after), change.__name__
        before = after


def test_an_adapter_is_switched_on_and_off() -> None:
    peft = pytest.importorskip("peft")
    model = gpt2()
    config = peft.LoraConfig(
        r=4, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True
    )
    adapted = peft.get_peft_model(model, config, adapter_name="one")
    adapted.add_adapter("two", config)
    adapted.eval()
    generator = gw.graph_generate(adapted.base_model.model, steps_per_launch=2)
    found = set()
    for name in ("one", "two", "one", "two"):
        adapted.set_adapter(name)
        made = agree(adapted.base_model.model, generator, prompts(2) | ASKED)
        found.add(tuple(made.flatten().tolist()))
    with adapted.disable_adapter():
        made = agree(adapted.base_model.model, generator, prompts(2) | ASKED)
        found.add(tuple(made.flatten().tolist()))
    assert len(found) == 3


# ------------------------------------------------------------ several at once


def test_two_generators_share_a_pool_at_once() -> None:
    pool = gw.MemoryPool()
    models = [gpt2(), mistral()]
    generators = [gw.graph_generate(m, pool=pool, steps_per_launch=2) for m in models]
    asked = [prompts(1 + index) | ASKED for index in range(3)]
    wanted = [[model.generate(**each) for each in asked] for model in models]
    found: dict[tuple[int, int], torch.Tensor] = {}

    def call(which: int, index: int) -> None:
        found[which, index] = generators[which].generate(**asked[index])

    run_all([lambda w=which, i=index: call(w, i) for which in (0, 1) for index in range(3)])
    for (which, index), made in found.items():
        assert torch.equal(made, wanted[which][index])
    assert len(found) == 6


def test_calls_of_one_generator_from_threads(shared: Any) -> None:
    model, generator = shared
    asked = [prompts(2, 4 + index) | ASKED for index in range(5)]
    wanted = [model.generate(**each) for each in asked]
    found: dict[int, torch.Tensor] = {}

    def call(index: int) -> None:
        found[index] = generator.generate(**asked[index])

    run_all([lambda i=index: call(i) for index in range(5)])
    for index, made in found.items():
        assert torch.equal(made, wanted[index])
    assert len(found) == 5


def run_all(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Calling:
    """A processor that generates while it is asked for the next token."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.depth, self.results = call, 0, []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.depth and ids.shape[1] % 6 == 0:
            self.depth += 1
            self.results.append(self.call())
            self.depth -= 1
        return scores


def test_a_call_inside_of_a_call(shared: Any, monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    model, generator = shared
    inner = prompts(2, 6) | ASKED
    wanted = model.generate(**inner)
    if off:
        monkeypatch.setattr(GraphedGenerator, "_busy", False, raising=False)
        monkeypatch.setattr(GraphedGenerator, "__setattr__", ignoring("_busy"))
        monkeypatch.delitem(vars(generator), "_busy", raising=False)
    calling = Calling(lambda: generator.generate(**inner))
    with warnings.catch_warnings(), fails(off):
        warnings.simplefilter("ignore", gw.FallbackWarning)
        asked = prompts(2) | ASKED
        made = generator.generate(**asked, logits_processor=[calling])
        assert torch.equal(made, model.generate(**asked))
        assert len(calling.results) >= 2
        assert all(torch.equal(each, wanted) for each in calling.results)


def ignoring(name: str) -> Callable[..., None]:
    def setattr_(self: Any, key: str, value: Any) -> None:
        if key != name:
            object.__setattr__(self, key, value)

    return setattr_


def test_a_captured_step_inside_of_another_generation(shared: Any) -> None:
    model, generator = shared
    other = mistral()
    others = gw.graph_generate(other, steps_per_launch=2)
    inner = prompts(1) | ASKED
    calling = Calling(lambda: others.generate(**inner))
    asked = prompts(2) | ASKED
    made = generator.generate(**asked, logits_processor=[calling])
    assert torch.equal(made, model.generate(**asked))
    wanted = other.generate(**inner)
    assert len(calling.results) >= 2
    assert all(torch.equal(each, wanted) for each in calling.results)
    assert others.statistics.eager == {}


# ------------------------------------------------------------ what breaks off


class Breaking:
    """A streamer that fails at some token."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def put(self, tokens: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self) -> None:
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the streamer")])
@pytest.mark.parametrize("at", [0, 2, 9])
def test_the_call_after_one_that_broke_off(shared: Any, error: BaseException, at: int) -> None:
    model, generator = shared
    for _ in range(2):
        with pytest.raises(type(error)):
            generator.generate(**prompts(1), **ASKED, streamer=Breaking(at, error))
    before = generator.statistics.calls
    agree(model, generator, prompts(1, 7) | ASKED)
    assert generator.statistics.calls == before + 1


def test_results_of_earlier_calls_stay(shared: Any) -> None:
    _, generator = shared
    asked = prompts(2) | ASKED | {"return_dict_in_generate": True}
    one = generator.generate(**asked)
    kept = one.sequences.clone(), one.past_key_values.layers[0].keys.clone()
    generator.generate(**(prompts(2, 5) | ASKED))
    assert torch.equal(one.sequences, kept[0])
    assert torch.equal(one.past_key_values.layers[0].keys, kept[1])


def test_inference_mode_and_no_grad_by_turns(shared: Any) -> None:
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()) * 2:
        with mode:
            agree(model, generator, prompts(2) | ASKED)
    assert generator.statistics.calls == 6


def test_a_model_in_training_mode_generates_as_ever() -> None:
    model: nn.Module = gpt2().train()
    generator = gw.graph_generate(model)
    with pytest.warns(gw.FallbackWarning, match="the model is in training mode"):
        agree(model, generator, prompts(2) | ASKED)


@pytest.mark.parametrize("ends", [False, True])
def test_random_numbers_go_on_as_after_the_model_s_own_call(ends: bool) -> None:
    """A launch that goes beyond the end draws numbers that nobody sees; they are given back."""
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)
    asked = prompts(2) | {"do_sample": True, "max_new_tokens": 11}
    if ends:
        asked["eos_token_id"] = list(range(20))
    for seed in range(3):
        found = []
        for each in (model, generator):
            torch.manual_seed(seed)
            found.append((each.generate(**asked), each.generate(**asked), torch.rand(3)))
        for its, mine in zip(*found, strict=True):
            assert torch.equal(its, mine)


def test_what_is_no_distribution_is_refused_as_the_model_refuses_it() -> None:
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)
    # No end yet, and the likelier an end the longer the text: infinity times zero.
    asked = prompts(2) | {
        "do_sample": True, "max_new_tokens": 8, "min_new_tokens": 6, "eos_token_id": 3,
        "exponential_decay_length_penalty": (1, 1.5),
    }  # fmt: skip
    for each in (model, generator):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            each.generate(**asked)
    # The next call is as ever.
    agree(model, generator, prompts(2) | ASKED)


# ------------------------------------------------------------ models of their own kind


def gpt_neo() -> Any:
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, window_size=80,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return varied(transformers.GPTNeoForCausalLM(config).eval(), 8)


def test_a_window_that_hangs_on_the_end_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    """GPT-Neo slices its mask by the cache's length: only a longer bucket shows it."""
    model = gpt_neo()
    generator = gw.graph_generate(model, steps_per_launch=2)
    if off:
        monkeypatch.setattr(
            decode_steps.DecodeSteps,
            "_buckets",
            lambda self, positions: [self._visible(positions)],
        )
    with warnings.catch_warnings(), fails(off):
        warnings.simplefilter("ignore", gw.FallbackWarning)
        agree(model, generator, prompts(1, 20) | {"max_new_tokens": 80, "do_sample": False})
        (reason,) = generator.statistics.eager
        assert "its step differs with a static cache" in reason


class Replying(transformers.LlamaForCausalLM):
    """Takes a word of a reply in each step, and hands on the rest."""

    def forward(self, *args: Any, reply: torch.Tensor | None = None, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if reply is not None and reply.shape[1]:
            found.logits = found.logits.roll(int(reply.shape[1]), -1)
        return found

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: Any, **kwargs: Any
    ) -> Any:
        found = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        if found.get("reply") is not None:
            found["reply"] = found["reply"][:, 1:]
        return found


class Choosing(transformers.LlamaForCausalLM):
    """Chooses tokens in a way of its own."""

    def _sample(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.cat([input_ids, input_ids + 1], dim=1)


def llama(cls: Any = transformers.LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return varied(cls(config).eval(), 8)


def test_what_a_model_hands_from_step_to_step(monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    model = llama(Replying)
    generator = gw.graph_generate(model, steps_per_launch=2)
    asked = prompts(2) | ASKED | {"reply": torch.arange(12).repeat(2, 1)}
    if off:
        monkeypatch.setattr(decode_steps, "_handed_on", lambda *args: None)
    with warnings.catch_warnings(), fails(off):
        warnings.simplefilter("ignore", gw.FallbackWarning)
        agree(model, generator, asked)
        assert "hands reply to the next one" in next(iter(generator.statistics.eager))


def test_a_model_s_own_way_to_choose() -> None:
    model = llama(Choosing)
    generator = gw.graph_generate(model)
    with pytest.warns(gw.FallbackWarning, match="the model has a loop of its own"):
        made = agree(model, generator, prompts(2) | ASKED)
    assert made.shape[1] == 2 * LENGTH


def test_a_generate_that_takes_no_other_loop() -> None:
    class Strict(transformers.LlamaForCausalLM):
        def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            unknown = kwargs.keys() & {"custom_generate"}
            if unknown:
                raise ValueError(f"these `model_kwargs` are not used: {sorted(unknown)}")
            return super().generate(input_ids, **kwargs)

    model = llama(Strict)
    generator = gw.graph_generate(model)
    with pytest.warns(gw.FallbackWarning, match="takes no other loop"):
        agree(model, generator, prompts(2) | ASKED)


def agree_but_for_ties(model: Any, generator: gw.GraphedGenerator, asked: dict[str, Any]) -> None:
    """Tokens are equal up to one that eager itself chooses by the last digit of bfloat16."""
    wanted = model.generate(**asked, output_logits=True, return_dict_in_generate=True)
    made = generator.generate(**asked)
    length = asked["input_ids"].shape[1]
    for row, (tokens, others) in enumerate(zip(wanted.sequences, made, strict=True)):
        differ = (tokens != others).nonzero()
        if differ.numel():
            first = int(differ[0])
            logits = wanted.logits[first - length][row].float()
            gap = logits[tokens[first]] - logits[others[first]]
            assert gap <= logits.abs().max() * torch.finfo(torch.bfloat16).eps


def test_another_precision_and_autocast_by_turns() -> None:
    model = llama()
    generator = gw.graph_generate(model, steps_per_launch=2)
    agree(model, generator, prompts(2) | ASKED)
    with torch.autocast("cpu", torch.bfloat16):
        agree_but_for_ties(model, generator, prompts(2) | ASKED)
    agree(model, generator, prompts(2) | ASKED)
    assert generator.statistics.eager == {}
    model.double()
    agree(model, generator, prompts(2) | ASKED)
    assert generator.statistics.eager == {}


def test_positions_that_a_decoder_has_learned_are_not_overrun() -> None:
    config = transformers.WhisperConfig(
        vocab_size=120, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=50, max_target_positions=40, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = varied(transformers.WhisperForConditionalGeneration(config).eval(), 4)
    generator = gw.graph_generate(model, steps_per_launch=8)
    asked = {"input_features": torch.randn(1, 8, 100), "max_new_tokens": 39, "do_sample": False}
    agree(model, generator, asked)
    assert generator.statistics.eager == {}


def test_all_tokens_of_a_call_that_runs_out_of_time_are_streamed() -> None:
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)
    agree(model, generator, prompts(1) | ASKED)
    seen: list[int] = []

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            seen.extend(tokens.reshape(-1).tolist())

        def end(self) -> None:
            pass

    made = generator.generate(**prompts(1), **ASKED, max_time=1e-9, streamer=Streamer())
    assert made[0].tolist() == seen


def test_few_ways_to_choose_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_steps, "_MOST_CHOICES", 3)
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)
    for k in range(2, decode_steps._MOST_CHOICES + 5):
        options = {"do_sample": True, "max_new_tokens": 4, "top_k": k}
        agree(model, generator, prompts(1) | options)
    (kept,) = generator._kept.values()
    assert len(kept._choices) == len(kept._graphs) == decode_steps._MOST_CHOICES
    assert generator.statistics.captures == decode_steps._MOST_CHOICES + 3


class Leaving:
    """A streamer that closes or releases what it streams of."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self.leave = leave

    def put(self, tokens: torch.Tensor) -> None:
        self.leave()

    def end(self) -> None:
        pass


def test_released_and_closed_inside_of_a_call() -> None:
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)
    for leave in (generator.release, generator.close):
        made = generator.generate(**prompts(1), **ASKED, streamer=Leaving(leave))
        assert torch.equal(made, model.generate(**prompts(1), **ASKED))
        assert generator.pool.in_use == 0
    assert generator.statistics.calls == 2
    with pytest.warns(gw.FallbackWarning, match="the generator is closed"):
        agree(model, generator, prompts(1) | ASKED)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_generates_by_graphs_of_its_own(made: Callable[[Any], Any]) -> None:
    model = gpt2()
    generator = gw.graph_generate(model, steps_per_launch=2)
    other = made(generator)
    assert other.model is not model
    agree(model, other, prompts(1) | ASKED)
    assert other.statistics.calls == 1
    assert generator.statistics.calls == 0
