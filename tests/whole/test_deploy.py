"""examples/deploy: the container and the manifest say what the server really has."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import yaml

from graphwright.cli.main import serve

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
OPTIONS = {name for each in serve.params if isinstance(each, click.Option) for name in each.opts}
INSTRUCTIONS = [
    "FROM",
    "RUN",
    "COPY",
    "USER",
    "EXPOSE",
    "STOPSIGNAL",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
    "ENV",
    "WORKDIR",
    "ARG",
    "LABEL",
]


def manifests() -> list[dict[str, Any]]:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(word, rest) for word, rest in found]


def test_the_dockerfile_has_known_instructions_and_real_options() -> None:
    found = instructions()
    assert found[0][0] == "FROM"
    assert {word for word, _ in found} <= {*INSTRUCTIONS}
    command = yaml.safe_load(dict(found)["ENTRYPOINT"])
    words = shlex.split(command[2])
    assert words[1:3] == ["graphwright", "serve"]
    assert {word for word in words if word.startswith("--")} <= OPTIONS
    ports = {str(each.default) for each in serve.params if each.name in ("http_port", "grpc_port")}
    assert {*dict(found)["EXPOSE"].split()} == ports


def test_the_manifest_agrees_with_the_server_and_with_itself() -> None:
    deployment, service = manifests()
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert {word for word in container["args"] if word.startswith("--")} <= OPTIONS
    drain = float(container["args"][container["args"].index("--drain") + 1].removesuffix("s"))
    assert spec["terminationGracePeriodSeconds"] > drain
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    defaults = {each.name: each.default for each in serve.params}
    assert ports == {"http": defaults["http_port"], "grpc": defaults["grpc_port"]}
    assert {each["targetPort"] for each in service["spec"]["ports"]} == {*ports}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")}
    assert probes == {"/v2/health/ready"}
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in spec["volumes"]
    }
