"""The broker's web pages."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from tensorplay.broker import Broker, BrokerConfig
from tensorplay.broker.cli import main
from tensorplay.broker.http import STALE_SECONDS, Site, Snapshot
from tensorplay.errors import BrokerError, ConfigError
from tensorplay.protocol.messages import Heartbeat, Kind
from tests.broker.helpers import Dial

TOKEN = "a-token-of-some-length"


def get(url: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Returns status, text and headers of a page."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


@pytest.fixture
def broker() -> Iterator[Broker]:
    config = BrokerConfig(bind=("tcp://127.0.0.1:0",), heartbeat_interval=0.1, http="127.0.0.1:0")
    with Broker(config) as running:
        yield running


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(("127.0.0.1", 0), TOKEN)
    site.publish(b'{"peers": 0}', ready=True)
    site.start()
    yield site
    site.close()


def wait_status(broker: Broker, condition: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        status: dict[str, Any] = json.loads(get(f"{broker.url}/api/status")[1])
        if condition(status):
            return status
        time.sleep(0.05)
    raise AssertionError("the status did not come about")


def test_the_dashboard_is_self_contained(broker: Broker) -> None:
    code, page, headers = get(f"{broker.url}/")
    assert code == 200
    assert "<title>tensorplay broker</title>" in page
    assert "default-src 'none'" in headers["content-security-policy"]
    for name in ("dashboard.css", "dashboard.js", "plots.js", "traffic.js", "dom.js", "figures.js"):
        code, text, _ = get(f"{broker.url}/static/{name}")
        assert code == 200
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("HTTP", "")


def test_the_status_shows_who_comes(broker: Broker, dial: Dial) -> None:
    with dial(broker.address) as peer:
        peer.register("worker0", 5)
        status = wait_status(broker, lambda status: status["namespaces"])
        assert status["namespaces"]["default"]["peers"][0]["name"] == "worker0"
        assert status["samples"]


def test_metrics_are_what_prometheus_reads(broker: Broker, dial: Dial) -> None:
    with dial(broker.address) as peer, dial(broker.address) as other:
        peer.register("worker0", 5)
        other.register("worker1", 6)
        peer.send(
            Heartbeat(
                1.0,
                {
                    "calls_made": 7,
                    "made_seconds": 0.5,
                    "made_le_0.1": 6,
                    "made_le_10": 7,
                    "calls_failed": 2,
                    "modules": 3,
                },
            )
        )
        peer.route(Kind.REQUEST, 6, 1, b"payload")
        wait_status(
            broker,
            lambda status: any(
                peer["stats"].get("modules") and peer["received"]["bytes"]
                for peer in status["namespaces"].get("default", {"peers": []})["peers"]
            ),
        )
        code, text, headers = get(f"{broker.url}/metrics")
    assert code == 200
    assert headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    assert all(name.startswith("tensorplay_") for name in families)

    def value(name: str, **labels: str) -> float:
        family = next(f for f in families.values() if name.startswith(f.name))
        (found,) = [
            sample.value
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return float(found)

    worker = {"namespace": "default", "peer": "worker0"}
    assert families["tensorplay_broker_events"].type == "counter"
    assert value("tensorplay_broker_peers", namespace="default", role="worker") == 2
    assert value("tensorplay_broker_events_total", event="joined") == 2
    assert value("tensorplay_peer_up", **worker) == 1
    assert value("tensorplay_peer_received_bytes_total", **worker) == 7
    assert value("tensorplay_peer_calls_made_total", **worker) == 7
    assert value("tensorplay_peer_calls_failed_total", **worker) == 2
    assert value("tensorplay_peer_modules", **worker) == 3
    assert value("tensorplay_peer_call_duration_seconds_bucket", le="0.1", **worker) == 6
    assert value("tensorplay_peer_call_duration_seconds_bucket", le="+Inf", **worker) == 7
    assert value("tensorplay_peer_call_duration_seconds_sum", **worker) == 0.5
    assert value("tensorplay_broker_busy_ratio") <= 1


def test_health_checks_need_no_token_and_tell_nothing(site: Site) -> None:
    assert get(f"{site.url}/healthz")[:2] == (200, "well\n")
    assert get(f"{site.url}/readyz")[:2] == (200, "well\n")


def test_a_broker_that_ends_is_not_ready(site: Site) -> None:
    site.publish(b"{}", ready=False)
    assert get(f"{site.url}/healthz")[0] == 200
    assert get(f"{site.url}/readyz")[0] == 503


def test_a_loop_that_is_stuck_is_not_well(site: Site) -> None:
    site._snapshot = Snapshot(time.monotonic() - STALE_SECONDS - 1, b"{}", True)
    code, text, _ = get(f"{site.url}/healthz")
    assert code == 503
    assert "silent" in text


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/status", "/static/dashboard.js"])
def test_without_the_token_nothing_is_shown(site: Site, path: str) -> None:
    basic = base64.b64encode(b"me:wrong").decode()
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {basic}"},
        {"Authorization": "Basic ???"},
        {"Authorization": TOKEN},
    ):
        code, text, answer = get(site.url + path, **headers)
        assert code == 401
        assert answer["www-authenticate"].startswith("Basic")
        assert TOKEN not in text


def test_with_the_token_pages_are_shown(site: Site) -> None:
    basic = base64.b64encode(f"me:{TOKEN}".encode()).decode()
    for header in (f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Basic {basic}"):
        assert get(f"{site.url}/api/status", Authorization=header)[:2] == (200, '{"peers": 0}')


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:80", "10.1.2.3", ""])
def test_a_foreign_name_of_this_host_shows_nothing(broker: Broker, host: str) -> None:
    assert get(f"{broker.url}/api/status", Host=host)[0] in (400, 421)


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:9", "[::1]:9", "[::1]"])
def test_own_names_of_this_host_are_known(broker: Broker, host: str) -> None:
    assert get(f"{broker.url}/api/status", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"http": "0.0.0.0:8080"}, "token"),
        ({"http": "example.com:80"}, "token"),
        ({"http": "127.0.0.1"}, "host:port"),
        ({"http": ":80"}, "host:port"),
        ({"http": "127.0.0.1:x"}, "host:port"),
        ({"http": "127.0.0.1:80/path"}, "host:port"),
        ({"http": "127.0.0.1:80", "http_token": "short"}, "16 characters"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        BrokerConfig(**options)  # type: ignore[arg-type]


def test_the_token_is_in_no_text() -> None:
    config = BrokerConfig(http="0.0.0.0:0", http_token=TOKEN)
    assert TOKEN not in repr(config)
    assert "http_token" not in config.public()


def test_an_address_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        broker = Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",), http=f"127.0.0.1:{port}"))
        with pytest.raises(BrokerError, match=f"127.0.0.1:{port}"):
            broker.start()
        broker.close()


def test_a_token_file_that_is_not_there_is_wrong_usage() -> None:
    arguments = ["--http", "127.0.0.1:0", "--http-token-file", "/nowhere/token"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "/nowhere/token" in result.output


def test_without_http_nothing_of_it_is_imported() -> None:
    code = (
        "import sys\nfrom tensorplay.broker import Broker, BrokerConfig\n"
        "Broker(BrokerConfig(bind=('tcp://127.0.0.1:0',))).start().close()\n"
        "sys.exit(bool({'uvicorn', 'starlette', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
