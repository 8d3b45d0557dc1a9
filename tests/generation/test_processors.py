"""Logits processors as graphs run them, against those of transformers."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphwright.generation import processors
from graphwright.generation.processors import StaticProcessor, Tokens, static

transformers = pytest.importorskip("transformers")
from transformers.generation import logits_process as theirs  # noqa: E402 (behind importorskip)

ROOM, CASES, LENGTHS = 14, 20, 3
ODD = (math.inf, -math.inf, math.nan)


class Draw:
    """Parameters at random, often at their edges."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.batch = self.random.randint(1, 3)
        self.vocabulary = self.random.choice([6, 7, 12, 40])
        # Few different tokens repeat each other soon.
        self.words = self.random.choice([2, 4, self.vocabulary])
        self.length = self.random.randint(1, ROOM)

    def whole(self, most: int) -> int:
        return self.random.choice([0, most, self.random.randint(0, most)])

    def number(self, least: float, most: float, *edges: float) -> float:
        return self.random.choice([*edges, self.random.uniform(least, most)])

    def token(self) -> int:
        return self.random.randrange(self.words)

    def tokens(self, most: int = 3) -> list[int]:
        return [self.token() for _ in range(self.random.randint(1, most))]

    def ends(self) -> Any:
        return self.random.choice([self.token(), self.tokens(), torch.tensor(self.tokens())])

    def near(self) -> int:
        """A length at which something may happen."""
        return max(0, self.length + self.random.choice([-2, -1, 0, 0, 1]))

    def kept(self) -> dict[str, Any]:
        filler = self.random.choice([-math.inf, -50.0])
        return {"filter_value": filler, "min_tokens_to_keep": self.random.choice([1, 2, 5])}

    def encoder(self) -> torch.Tensor:
        rows, length = self.random.choice([1, self.batch]), self.random.randint(1, 9)
        return torch.tensor([[self.token() for _ in range(length)] for _ in range(rows)])

    def sequences(self) -> list[list[int]]:
        found = {tuple(self.tokens(5)) for _ in range(self.random.randint(1, 6))}
        return [*map(list, found), [self.token()] * (ROOM + 2)]


def bias(d: Draw) -> dict[tuple[int, ...], float]:
    return {tuple(each): d.number(-3, 3, -math.inf) for each in d.sequences()}


def whisper(d: Draw) -> Any:
    first = d.random.randint(2, d.vocabulary - 2)
    config = SimpleNamespace(
        no_timestamps_token_id=first - 1,
        eos_token_id=d.random.randint(1, first - 1),
        bos_token_id=None,
        max_initial_timestamp_index=d.random.choice([None, 0, 2]),
        _detect_timestamp_from_logprob=d.random.choice([True, False]),
    )
    return theirs.WhisperTimeStampLogitsProcessor(config, begin_index=d.near())


MAKE: dict[str, Callable[[Draw], Any]] = {
    "AlternatingCodebooksLogitsProcessor": lambda d: theirs.AlternatingCodebooksLogitsProcessor(
        d.near(), 2, d.random.choice([1, 3])
    ),
    "BarkEosPrioritizerLogitsProcessor": lambda d: theirs.BarkEosPrioritizerLogitsProcessor(
        d.ends(), d.number(0.01, 0.5, None)
    ),
    "EncoderNoRepeatNGramLogitsProcessor": lambda d: theirs.EncoderNoRepeatNGramLogitsProcessor(
        d.random.randint(1, 4), d.encoder()
    ),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda d: (
        theirs.EncoderRepetitionPenaltyLogitsProcessor(d.number(0.2, 4, 1.0), d.encoder())
    ),
    "EpsilonLogitsWarper": lambda d: theirs.EpsilonLogitsWarper(
        d.number(0.001, 0.5, 1e-9, 0.999), **d.kept()
    ),
    "EtaLogitsWarper": lambda d: theirs.EtaLogitsWarper(
        d.number(0.001, 0.5, 1e-9, 0.999), **d.kept()
    ),
    "ExponentialDecayLengthPenalty": lambda d: theirs.ExponentialDecayLengthPenalty(
        (d.random.choice([0, 1, 3]), d.number(0.5, 1.5, 1.0)), d.ends(), d.near()
    ),
    "ForcedBOSTokenLogitsProcessor": lambda d: theirs.ForcedBOSTokenLogitsProcessor(d.token()),
    "ForcedEOSTokenLogitsProcessor": lambda d: theirs.ForcedEOSTokenLogitsProcessor(
        d.near() + 1, d.ends()
    ),
    "InfNanRemoveLogitsProcessor": lambda d: theirs.InfNanRemoveLogitsProcessor(),
    "LogitNormalization": lambda d: theirs.LogitNormalization(),
    "MinLengthLogitsProcessor": lambda d: theirs.MinLengthLogitsProcessor(d.near(), d.ends()),
    "MinNewTokensLengthLogitsProcessor": lambda d: theirs.MinNewTokensLengthLogitsProcessor(
        d.near(), d.random.choice([0, 1, 2]), d.ends()
    ),
    "MinPLogitsWarper": lambda d: theirs.MinPLogitsWarper(d.number(0, 1, 0.0, 1.0), **d.kept()),
    "NoBadWordsLogitsProcessor": lambda d: theirs.NoBadWordsLogitsProcessor(
        d.sequences(), d.random.choice([None, d.token()])
    ),
    "NoRepeatNGramLogitsProcessor": lambda d: theirs.NoRepeatNGramLogitsProcessor(
        d.random.choice([1, 2, 3, ROOM, ROOM + 3])
    ),
    "RepetitionPenaltyLogitsProcessor": lambda d: theirs.RepetitionPenaltyLogitsProcessor(
        d.number(0.2, 4, 1.0), d.random.choice([None, 0, d.near(), ROOM + 3])
    ),
    "SequenceBiasLogitsProcessor": lambda d: theirs.SequenceBiasLogitsProcessor(bias(d)),
    "SuppressTokensAtBeginLogitsProcessor": lambda d: theirs.SuppressTokensAtBeginLogitsProcessor(
        d.tokens(), d.near()
    ),
    "SuppressTokensLogitsProcessor": lambda d: theirs.SuppressTokensLogitsProcessor(
        d.random.choice([[], d.tokens(), [-1, d.vocabulary, 10**6, d.token()]])
    ),
    "TemperatureLogitsWarper": lambda d: theirs.TemperatureLogitsWarper(d.number(0.1, 3, 1e-6)),
    "TopHLogitsWarper": lambda d: theirs.TopHLogitsWarper(
        d.number(0.1, 1, 1.0, 1e-6), filter_value=d.kept()["filter_value"]
    ),
    "TopKLogitsWarper": lambda d: theirs.TopKLogitsWarper(
        d.random.choice([1, 2, 5, 1000]), **d.kept()
    ),
    "TopPLogitsWarper": lambda d: theirs.TopPLogitsWarper(d.number(0, 1, 0.0, 1.0), **d.kept()),
    "TypicalLogitsWarper": lambda d: theirs.TypicalLogitsWarper(
        d.number(0.01, 0.99, 1e-6), **d.kept()
    ),
    "WhisperTimeStampLogitsProcessor": whisper,
}

# Those that transformers chooses tokens with, outside of the graph, and why.
OUTSIDE = {
    "ClassifierFreeGuidanceLogitsProcessor": "halves the batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "halves the batch",
    "DiaEOSChannelFilterLogitsProcessor": "scores of several channels",
    "DiaEOSDelayPatternLogitsProcessor": "keeps what it has seen",
    "PrefixConstrainedLogitsProcessor": "asks a function of the caller's on the host",
    "SynthIDTextWatermarkLogitsProcessor": "keeps what it has seen",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "runs the model, with a cache of its own",
    "WatermarkLogitsProcessor": "seeds a generator on the host with each token",
    "WhisperNoSpeechDetection": "keeps a probability for its caller",
}

# Powers in double precision may round otherwise than the host's.
ROUNDED = {"ExponentialDecayLengthPenalty": 2e-7}
# transformers itself refuses scores that are no distribution.
ALL_NUMBERS = ("EtaLogitsWarper", "TopHLogitsWarper")


def drawn_scores(d: Draw, name: str) -> torch.Tensor:
    scores = torch.randn(d.batch, d.vocabulary) * 3
    if d.random.random() < 0.3:
        scores = scores.round()  # with ties
    for value in ODD[1:2] if name in ALL_NUMBERS else ODD:
        if d.random.random() < 0.3:
            scores[torch.rand_like(scores) < 0.2] = value
    scores[:, d.vocabulary - 1] = 0.5
    return scores


def drawn_ids(d: Draw) -> torch.Tensor:
    """A buffer with anything behind the last token, even what is no token."""
    ids = torch.randint(-9, 10**6, (d.batch, ROOM))
    ids[:, : d.length] = torch.randint(0, d.words, (d.batch, d.length))
    return ids


def form_of(processor: Any) -> StaticProcessor:
    found = static(processor)
    assert found is not None
    return found


def check(
    form: StaticProcessor, processor: Any, d: Draw, device: torch.device | str = "cpu"
) -> None:
    """That a form, given a processor's numbers, computes what this processor does, step by step."""
    name = type(processor).__name__
    ids, room = drawn_ids(d).to(device), ROOM
    numbers = torch.tensor(form_of(processor).numbers, dtype=torch.float64, device=device)
    count = torch.tensor(d.length, device=device)
    for length in range(d.length, min(d.length + LENGTHS, room + 1)):
        ids[:, length - 1] = torch.randint(0, d.words, (d.batch,))
        count.fill_(length)
        scores = drawn_scores(d, name).to(device)
        before = scores.clone(), ids.clone()
        mine = form.apply(Tokens(ids, count), scores, numbers)
        torch.testing.assert_close((scores, ids), before, rtol=0, atol=0, equal_nan=True)
        its = processor(ids[:, :length], scores)
        rounding = ROUNDED.get(name, 0)
        torch.testing.assert_close(mine, its, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("name", MAKE)
def test_computes_what_the_processor_does(name: str, device: torch.device) -> None:
    for seed in range(CASES):
        torch.manual_seed(seed)
        d = Draw(seed)
        processor = MAKE[name](d)
        on_device(processor, device)
        check(form_of(processor), processor, d, device)


def on_device(processor: Any, device: torch.device) -> None:
    for name, value in vars(processor).items():
        if isinstance(value, torch.Tensor):
            setattr(processor, name, value.to(device))


def exchanged(name: str) -> int:
    """Check each pair of processors that may share a graph; gives how many there are."""
    made: dict[Any, StaticProcessor] = {}
    shared = 0
    for seed in range(2 * CASES):
        torch.manual_seed(seed)
        d = Draw(seed)
        processor = MAKE[name](d)
        form = form_of(processor)
        first = made.setdefault(form.key, form)
        if first is not form:
            check(first, processor, d)
            shared += 1
    return shared


@pytest.mark.parametrize("name", MAKE)
def test_processors_with_an_equal_key_share_a_graph(name: str) -> None:
    assert exchanged(name) > 2


@pytest.mark.parametrize(
    ("name", "forgetful"),
    [
        ("TopKLogitsWarper", processors._scores_alone("filter_value")),
        ("TopPLogitsWarper", processors._scores_alone("filter_value", numbers=["top_p"])),
        ("MinPLogitsWarper", processors._scores_alone("filter_value", "min_tokens_to_keep")),
    ],
)
def test_a_constant_that_the_key_lacks_is_found(
    name: str, forgetful: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(processors._STATIC, name, forgetful)
    with pytest.raises(AssertionError):
        exchanged(name)


def test_numbers_need_no_other_graph() -> None:
    ends = [1, 2]
    for one, other in (
        (theirs.TemperatureLogitsWarper(0.5), theirs.TemperatureLogitsWarper(2.0)),
        (theirs.TopPLogitsWarper(0.5), theirs.TopPLogitsWarper(0.9)),
        (theirs.MinLengthLogitsProcessor(3, ends), theirs.MinLengthLogitsProcessor(5, [3, 4])),
        (theirs.NoBadWordsLogitsProcessor([[1, 2]]), theirs.NoBadWordsLogitsProcessor([[3, 1]])),
        (
            theirs.RepetitionPenaltyLogitsProcessor(1.5, 3),
            theirs.RepetitionPenaltyLogitsProcessor(2.0, 9),
        ),
    ):
        assert form_of(one).key == form_of(other).key
        assert form_of(one).numbers != form_of(other).numbers


def test_longer_lists_need_another_graph() -> None:
    one = form_of(theirs.SuppressTokensLogitsProcessor([1, 2]))
    other = form_of(theirs.SuppressTokensLogitsProcessor([1, 2, 3]))
    assert one.key != other.key


def test_every_processor_of_transformers_is_known() -> None:
    found = {
        name
        for name, value in vars(theirs).items()
        if inspect.isclass(value)
        and issubclass(value, theirs.LogitsProcessor)
        and value is not theirs.LogitsProcessor
        and value.__module__ == theirs.__name__
    }
    assert set(MAKE) == set(processors._STATIC)
    # Older versions of transformers lack some.
    assert found <= {*MAKE, *OUTSIDE}
    assert not set(MAKE) & set(OUTSIDE)


@pytest.mark.parametrize("name", MAKE)
def test_a_form_stays_when_its_processor_changes(name: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        d = Draw(seed)
        processor, same = MAKE[name](Draw(seed)), MAKE[name](d)
        form = form_of(processor)
        for attribute in vars(processor):
            setattr(processor, attribute, None)
        check(form, same, d)


class Recorded(TorchDispatchMode):
    """The operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # A number that is assigned to a slice becomes a tensor too, but fills it on the device.
        if name != "lift_fresh" or result.ndim:
            self.names.add(name)
        return result


# A GPU's form of these copies between host and device, or has the host wait for a size or a value.
WAITING = {
    *("_local_scalar_dense", "item", "equal", "is_nonzero", "_is_all_true", "lift_fresh"),
    *("nonzero", "isin", "_unique2", "masked_select", "unique_consecutive", "bincount"),
}


@pytest.mark.parametrize("name", MAKE)
def test_no_form_has_the_host_wait(name: str) -> None:
    for seed in range(CASES // 2):
        d = Draw(seed)
        form = form_of(MAKE[name](d))
        numbers = torch.tensor(form.numbers, dtype=torch.float64)
        tokens, scores = Tokens(drawn_ids(d), torch.tensor(d.length)), drawn_scores(d, name)
        with Recorded() as recorded:
            form.apply(tokens, scores, numbers)
        assert not recorded.names & WAITING


@pytest.mark.parametrize(
    ("processor", "waits"),
    [
        (theirs.SuppressTokensLogitsProcessor([1]), "isin"),
        (theirs.EtaLogitsWarper(0.1), "_local_scalar_dense"),
        (theirs.SequenceBiasLogitsProcessor({(1, 2): 1.0}), "lift_fresh"),
    ],
)
def test_waiting_is_seen(processor: Any, waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where torch.compile was used before in this process, distributions check nothing.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with Recorded() as recorded:
        processor(torch.ones(1, 2), torch.zeros(1, 3))
    assert waits in recorded.names & WAITING


def test_an_end_that_may_not_come_yet_is_no_nan() -> None:
    """A least length puts the end at -inf, before a penalty for it begins to decay."""
    form = form_of(theirs.ExponentialDecayLengthPenalty((5, 1.1), [1], 0))
    scores = torch.tensor([[0.0, -math.inf, 1.0]])
    numbers = torch.tensor(form.numbers, dtype=torch.float64)
    tokens = Tokens(torch.zeros(1, 9, dtype=torch.int64), torch.tensor(5))
    assert torch.equal(form.apply(tokens, scores, numbers), scores)


def test_a_class_that_only_bears_the_name_has_no_form() -> None:
    class TopKLogitsWarper(theirs.TopKLogitsWarper):  # type: ignore[name-defined]
        pass

    assert static(TopKLogitsWarper(3)) is None
    assert static(lambda ids, scores: scores) is None
    assert static(theirs.TopKLogitsWarper(3)) is not None


def test_whispers_lists_of_ends_have_no_form() -> None:
    processor = whisper(Draw(0))
    processor.eos_token_id = [1, 2]
    assert static(processor) is None


def test_a_row_of_the_encoder_without_an_ngram_bans_nothing() -> None:
    processor = theirs.EncoderNoRepeatNGramLogitsProcessor(3, torch.tensor([[1, 2]]))
    form = form_of(processor)
    for batch, length in itertools.product((1, 2), (1, 2, 5)):
        d = Draw(0)
        d.batch, d.length, d.words = batch, length, 3
        check(form, processor, d)
