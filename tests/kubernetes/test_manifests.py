"""The manifests of Kubernetes: valid, consistent, and what their pods would run works."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorplay.cli import main
from tests.following import Follower

pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

import yaml  # noqa: E402

from tests.kubernetes import rendering  # noqa: E402
from tests.kubernetes.rendering import MANIFESTS, OVERLAYS, Document  # noqa: E402

needs_kustomize = pytest.mark.skipif(
    rendering.kustomize() is None, reason="neither kustomize nor kubectl is installed"
)
FILES = [path for path in sorted(MANIFESTS.rglob("*.yaml")) if path.name != "kustomization.yaml"]
#: The oldest with the label of a pod's ordinal, and the newest that the schemas have.
VERSIONS = ("1.28", kubernetes_validate.latest_version())


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifests with keys."""
    folder = tmp_path_factory.mktemp("kubernetes") / "manifests"
    shutil.copytree(MANIFESTS, folder)
    rendering.make_keys(folder / "base" / "keys")
    return folder


@pytest.fixture(scope="module")
def demo(copy: Path) -> list[Document]:
    return rendering.render(copy, "demo")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_is_valid(path: Path, version: str) -> None:
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        kubernetes_validate.validate(document, version, strict=True)


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_rendered_is_valid(copy: Path, overlay: str) -> None:
    documents = rendering.render(copy, overlay)
    for document in documents:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "tensorplay"
    kinds = {document["kind"] for document in documents}
    assert {"Deployment", "Service", "StatefulSet", "PodDisruptionBudget", "Secret"} <= kinds
    assert ("HorizontalPodAutoscaler" in kinds) == (overlay == "autoscaling")


@needs_kustomize
def test_selectors_find_what_they_are_for(demo: list[Document]) -> None:
    for kind, name in (("Deployment", "tensorplay-broker"), ("StatefulSet", "tensorplay-worker")):
        template = rendering.find(demo, kind, name)["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        assert rendering.find(demo, kind, name)["spec"]["selector"]["matchLabels"].items() <= labels
        assert rendering.find(demo, "Service", name)["spec"]["selector"].items() <= labels
        policy = rendering.find(demo, "NetworkPolicy", name)
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    job = rendering.find(demo, "Job", "tensorplay-demo")["spec"]["template"]
    broker = rendering.find(demo, "NetworkPolicy", "tensorplay-broker")
    (peer,) = broker["spec"]["ingress"][0]["from"]
    assert peer["podSelector"]["matchLabels"].items() <= job["metadata"]["labels"].items()


@needs_kustomize
@pytest.mark.parametrize(
    ("kind", "name", "command"),
    [
        ("Deployment", "tensorplay-broker", "broker"),
        ("StatefulSet", "tensorplay-worker", "worker"),
        ("Job", "tensorplay-demo", None),
    ],
)
def test_a_pod_is_confined_and_its_variables_are_known(
    demo: list[Document], kind: str, name: str, command: str | None
) -> None:
    document = rendering.find(demo, kind, name)
    pod = document["spec"]["template"]["spec"]
    container = rendering.container(document)
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["image"].startswith("localhost/tensorplay-")
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    if command is not None:
        help_text = CliRunner().invoke(main, [command, "--help"]).output
        for variable in rendering.environment(document, 0):
            assert variable in help_text


@needs_kustomize
def test_a_worker_has_time_to_finish(demo: list[Document]) -> None:
    document = rendering.find(demo, "StatefulSet", "tensorplay-worker")
    drain = float(rendering.environment(document, 0)["TENSORPLAY_DRAIN_TIMEOUT"])
    assert document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain + 5


class Pods:
    """Runs on this machine what the pods would run, with their variables and secrets."""

    def __init__(self, documents: list[Document], folder: Path, address: str, http: int) -> None:
        self.http = http
        self._documents = documents
        self._folder = folder
        self._address = address
        self._followers: list[Follower] = []

    def run(self, kind: str, name: str, *command: str, ordinal: int = 0) -> Follower:
        document = rendering.find(self._documents, kind, name)
        keys = self._folder / f"{name}-{ordinal}"
        rendering.mount_keys(self._documents, document, keys)
        variables = rendering.environment(document, ordinal)
        variables["TENSORPLAY_CURVE_DIR"] = str(keys)
        if "TENSORPLAY_BROKER" in variables:
            assert variables["TENSORPLAY_BROKER"] == "tcp://tensorplay-broker:5555"
            variables["TENSORPLAY_BROKER"] = self._address
        if "TENSORPLAY_HTTP_TOKEN_FILE" in variables:
            variables["TENSORPLAY_HTTP"] = f"127.0.0.1:{self.http}"
            variables["TENSORPLAY_HTTP_TOKEN_FILE"] = str(keys / "http_token")
        common = {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(self._folder)}
        follower = Follower([sys.executable, *command], {**os.environ, **common, **variables})
        self._followers.append(follower)
        return follower

    def close(self) -> None:
        for follower in reversed(self._followers):
            follower.close()


@pytest.fixture
def pods(demo: list[Document], tmp_path: Path, free_port: int) -> Iterator[Pods]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        http = int(probe.getsockname()[1])
    running = Pods(demo, tmp_path, f"tcp://127.0.0.1:{free_port}", http)
    yield running
    running.close()


@needs_kustomize
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own secrets that a group may read")
def test_the_pods_find_each_other_and_train(
    pods: Pods, demo: list[Document], free_port: int, tmp_path: Path
) -> None:
    broker = ("Deployment", "tensorplay-broker")
    running = pods.run(*broker, "-m", "tensorplay.broker", "--bind", f"tcp://127.0.0.1:{free_port}")
    running.expect("ready")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = rendering.container(rendering.find(demo, *broker))[probe]["httpGet"]
        with urllib.request.urlopen(
            f"http://127.0.0.1:{pods.http}{get['path']}", timeout=20
        ) as answer:
            assert answer.status == 200
    for ordinal in range(2):
        pods.run("StatefulSet", "tensorplay-worker", "-m", "tensorplay.worker", ordinal=ordinal)
    job = ("Job", "tensorplay-demo")
    _, *command = rendering.container(rendering.find(demo, *job))["command"]
    command[command.index("/tmp/demo-loss.png")] = str(tmp_path / "demo-loss.png")
    trainer = pods.run(*job, *command, "--epochs", "1")
    assert trainer.end() == 0, trainer.output
    assert "Largest difference from the losses of one process" in trainer.output
