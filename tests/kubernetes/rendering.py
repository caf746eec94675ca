"""The manifests as kustomize renders them, with keys as the documentation has them made."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
#: What may be applied.
OVERLAYS = ("base", "autoscaling", "demo")
_TENSORPLAY = [sys.executable, "-c", "from tensorplay.cli import main; main()"]
#: The commands of docs/kubernetes.md, a test of which compares them.
KEY_COMMANDS = """\
tensorplay keys new broker
tensorplay keys new worker
tensorplay keys new trainer
tensorplay keys allow worker --name 'worker*'
tensorplay keys allow trainer --name 'trainer*' --name demo --role call
"""
TOKEN_COMMAND = (
    "python3 -c 'import secrets; print(secrets.token_urlsafe())' >"
    '"$TENSORPLAY_CURVE_DIR/http_token"\n'
)


def kustomize() -> list[str] | None:
    """Returns the command that renders a folder, if there is one."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


def make_keys(folder: Path) -> None:
    """Makes the keys that the manifests take from ``keys/``."""
    for line in KEY_COMMANDS.splitlines():
        arguments = [word.strip("'") for word in line.split()[1:]]
        subprocess.run(
            [*_TENSORPLAY, *arguments, "--dir", str(folder)],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )
    subprocess.run(
        ["sh", "-c", TOKEN_COMMAND],
        check=True,
        env={**os.environ, "TENSORPLAY_CURVE_DIR": str(folder)},
        timeout=60,
    )


def render(copy: Path, overlay: str) -> list[Document]:
    """Returns the documents of an overlay in a copy of the manifests."""
    command = kustomize()
    assert command is not None
    done = subprocess.run(
        [*command, str(copy / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def find(documents: list[Document], kind: str, name: str) -> Document:
    """Returns the document of a kind whose name is, or begins with, ``name``."""
    (found,) = [
        document
        for document in documents
        if document["kind"] == kind
        and re.fullmatch(rf"{name}(-[a-z0-9]{{10}})?", document["metadata"]["name"])
    ]
    return found


def container(document: Document) -> dict[str, Any]:
    """Returns the only container of a Deployment, StatefulSet or Job."""
    (found,) = document["spec"]["template"]["spec"]["containers"]
    result: dict[str, Any] = found
    return result


def environment(document: Document, ordinal: int) -> dict[str, str]:
    """Returns the variables of the container in the pod with an ordinal, as Kubernetes would."""
    fields = {"metadata.labels['apps.kubernetes.io/pod-index']": str(ordinal)}
    variables: dict[str, str] = {}
    for entry in container(document).get("env", []):
        if "valueFrom" in entry:
            value = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], entry["value"])
        variables[entry["name"]] = value
    return variables


def mount_keys(documents: list[Document], document: Document, folder: Path) -> None:
    """Writes the secret volume of a pod to a folder, as Kubernetes would."""
    (volume,) = [
        volume
        for volume in document["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "keys"
    ]
    secret = find(documents, "Secret", volume["secret"]["secretName"].rpartition("-")[0])
    assert secret["metadata"]["name"] == volume["secret"]["secretName"]
    items = volume["secret"].get("items") or [{"key": key, "path": key} for key in secret["data"]]
    for item in items:
        path = folder / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(secret["data"][item["key"]]))
        path.chmod(volume["secret"]["defaultMode"])
