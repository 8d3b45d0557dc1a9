"""The result of scripts/bench architectures in sentences, and as a page of docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Result = dict[str, Any]

WAYS = ("batch", "length", "both")
# Largest error that float32 and other kernels explain; see bench/architectures/run.py.
TOLERANCE = 1e-4
# What a reason says of an output -> what a reader should know, by the first pattern that is found.
SHORT = {
    r"draws random numbers": "draws random numbers, others for other sizes",
    r"(\S+) shares memory with another output": r"\1 is a view of another output",
    r"(\S+) changes by (\S+)": r"\1 depends on the padding: off by \2",
    r"answer a call that eager refuses": "eager refuses some of these sizes",
    r"shapes of its outputs follow no rule: (.*)": r"the outputs' shapes follow no rule: \1",
    r"padded from \d+ to \d+,? (.*)": r"\1",
}
# Why these are exact-only, as their code tells.
BECAUSE = {
    ("batch", "ViTMAEModel"): "it draws the patches that it leaves out",
    ("length", "ConvBertModel"): "its convolutions see the padding, which no mask takes out",
    ("length", "FNetModel"): "its Fourier transform mixes all positions, and there is no mask",
    ("length", "MoonshineModel"): "it normalizes over the length, and there is no mask",
    ("length", "SiglipModel"): "what stands for the text is its last position",
    ("length", "Speech2TextModel"): "its second convolution sees what the first makes of padding",
    ("length", "Wav2Vec2Model"): "it normalizes over the length before its mask counts",
    ("length", "HubertModel"): "it normalizes over the length before its mask counts",
    ("length", "SEWModel"): "it normalizes over the length before its mask counts",
}


def counts(result: Result) -> Iterator[str]:
    """How many take which buckets, as sentences."""
    rows = result["rows"]
    yield f"{_taken(rows, 'batch')} of {len(rows)} architectures take buckets of batches."
    for masked, words in ((True, "with a mask"), (False, "without one")):
        chosen = [row for row in rows if row["length"].get("masked") is masked]
        lengths, both = _taken(chosen, "length"), _taken(chosen, "both")
        yield (
            f"Of the {len(chosen)} with a sequence {words}, {lengths} take buckets of lengths, "
            f"{both} of batches and lengths together."
        )
    accepted = [row[way] for row in rows for way in WAYS if row[way]["verdict"] == "accepted"]
    calls = sum(found["padded_calls"] for found in accepted)
    wrong = sum(len(found["wrong"]) for found in accepted)
    worst = max((found["error"] for found in accepted), default=0.0)
    yield (
        f"{calls:,} padded calls gave eager's results, {wrong} did not; the largest "
        f"error is {worst:.0e} of an output's root mean square."
    )


def _taken(rows: list[Result], way: str) -> int:
    return sum(row[way]["verdict"] == "accepted" for row in rows)


def _short(reason: str) -> str:
    """A reason without the model, the sizes and the remedy."""
    reason = re.split("may not be (?:padded|filled up) to a bucket: ", reason)[-1].rstrip(".")
    for pattern, words in SHORT.items():
        if (match := re.search(pattern, reason)) is not None:
            reason = match.expand(words)
            break
    reason = re.sub(r"/\S+:\d+: ", "", reason)  # where PyTorch was built
    text = re.sub(r"output\['(\w+)'\]", r"`\1`", reason)
    return text if len(text) <= 160 else text[:159] + "…"


def _cell(row: Result, way: str) -> str:
    found = row[way]
    return {"accepted": "yes", "no sequence": "–"}.get(found["verdict"], found["verdict"])


def _exact(rows: list[Result]) -> Iterator[list[str]]:
    """Models by reason, those of one reason in one row."""
    for way in ("batch", "length"):
        models: dict[str, list[str]] = {}
        for row in rows:
            if row[way]["verdict"] == "exact-only":
                because = BECAUSE.get((way, row["model"]))
                reason = _short(row[way]["reason"])
                told = f"{because} ({reason})" if because else reason
                models.setdefault(told, []).append(_name(row))
        for told, names in models.items():
            yield [way, ", ".join(names), told]


def _name(row: Result) -> str:
    return row["model"].removesuffix("Model")


def _beside(rows: list[Result]) -> list[str]:
    """Models that are other than eager where a call's own mask has padding."""
    return [
        _name(row)
        for row in rows
        if any(row[way].get("error_at_padding", 0.0) > TOLERANCE for way in WAYS)
    ]


def to_markdown(result: Result, file: str) -> str:
    """The page of docs/."""
    rows, machine = result["rows"], result["environment"]
    lines = [
        "# Architectures that take buckets",
        "",
        *(f"- {sentence}" for sentence in counts(result)),
        "",
        "Each is an architecture of transformers, tiny and with random weights, that can be",
        "captured. It is prepared on the CPU for one bucket: a batch of "
        f"{result['buckets']['batch']}, a length of 16 (of",
        "sound: 40 frames or 2,400 samples), or both. Where that is accepted, "
        f"{result['calls']} calls of other sizes,",
        "size 1 among them, are padded, and compared with eager's results for the unpadded calls.",
        "*Exact-only* means that a graph answers only the size that was captured. Padding is",
        "declared as `pad={'attention_mask': 0}`; where a text ends at its largest id, or tokens",
        "have boxes, for these too.",
        "",
        "## Exact-only, and why",
        "",
        *_marked([["dimension", "models", "why"], *_exact(rows)]),
        "",
    ]
    if beside := _beside(rows):
        lines += [
            f"{', '.join(beside)}: right for every token that the call's own mask keeps. If a call",
            "itself has padding on the left, these tokens attend to nothing, and their attention",
            "spreads over the whole bucket: what these models return at such positions differs",
            "from eager.",
            "",
        ]
    table = [["model", "batch", "length", "both", "padding", "runs", "s"]]
    for row in rows:
        pad = ", ".join(f"{name}={value}" for name, value in (row["pad"] or {}).items())
        done = [row[way] for way in WAYS if "prepare_s" in row[way]]
        runs = sum(found["proof_runs"] for found in done)
        seconds = sum(found["prepare_s"] for found in done)
        cells = [_cell(row, way) for way in WAYS]
        table.append([row["model"], *cells, pad or "–", str(runs), f"{seconds:.1f}"])
    shown = ("processor", "threads", "torch", "transformers")
    lines += [
        "## All of them",
        "",
        "*Runs* is how often the model ran for the three proofs, *s* the seconds that they took,",
        "captures included. A dash: calls without a sequence.",
        "",
        *_marked(table),
        "",
        ", ".join(f"{key} {machine[key]}" for key in shown if key in machine) + ".",
    ]
    return "\n".join(lines) + "\n"


def _marked(table: list[list[str]]) -> list[str]:
    ruler = ["---"] * len(table[0])
    return ["| " + " | ".join(row) + " |" for row in (table[0], ruler, *table[1:])]
