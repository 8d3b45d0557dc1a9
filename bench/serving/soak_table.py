"""The result of scripts/bench soak as Markdown; soak.py needs packages that a table does not."""

from __future__ import annotations

from typing import Any

from ..common.rendering import machine, marked

# Kinds of requests as a reader knows them.
KINDS = {
    "right": "answered correctly",
    "refused": "malformed or too large, refused with a reason",
    "failed": "failed in the model, on purpose",
    "left": "abandoned by the client, on purpose",
    "wrong": "answered wrongly",
    "lost": "never answered",
}
PROCESS = {"rss_mib": "resident memory, MiB", "threads": "threads", "files": "open files"}


def to_markdown(found: dict[str, Any]) -> str:
    """What docs/results/serving.md shows."""
    requests = found["requests"]
    sent = [["requests", "how many"]]
    sent += [[words, f"{requests[kind]:,}"] for kind, words in KINDS.items()]
    held = [["the server's process", "after the warm-up", "at the end", "allowed growth"]]
    for key, name in PROCESS.items():
        held.append([name, *(f"{figure:.0f}" for figure in found["process"][key].values())])
    return "\n".join(
        [
            f"{found['clients']} clients for {found['seconds']:.0f} s, half over HTTP and half "
            f"over gRPC; the model was reloaded {requests['reloads']} times meanwhile. Memory is "
            "the median of a tenth of the time; threads and files are maxima.",
            "",
            *marked(sent),
            "",
            *marked(held),
            "",
            machine(found["environment"]),
            "",
        ]
    )
