"""The dashboard in a real browser: a worker joins, works and is killed, and the page shows it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tests.browser.browser import PHONE, browser, missing

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser"),
    # selenium's own, at the end of its connections
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the page does not show it"
        time.sleep(0.1)
    return found


@pytest.fixture
def cluster(own_cluster: Callable[..., LocalCluster], free_port: int) -> LocalCluster:
    options = ("--http", f"127.0.0.1:{free_port}", "--heartbeat-interval", "0.5")
    return own_cluster(workers=1, broker_options=options)


@pytest.fixture
def page(cluster: LocalCluster, free_port: int) -> Iterator[Chrome]:
    with browser() as driver:
        driver.get(f"http://127.0.0.1:{free_port}")
        yield driver
        errors = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert not errors


def rows(page: Chrome) -> dict[str, str]:
    """Returns the rows of the table of peers: the text of each by the peer's name."""
    found: dict[str, str] = page.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('#peers tbody tr')]"
        ".map(row => [row.children[0].textContent, row.innerText]))"
    )
    return found


def text(page: Chrome, selector: str) -> str:
    return str(
        page.execute_script(f"return document.querySelector({selector!r})?.textContent ?? ''")
    )


def test_a_worker_joins_works_and_is_killed(cluster: LocalCluster, page: Chrome) -> None:
    until(lambda: set(rows(page)) == {"worker0", "client"})
    assert text(page, "#link") == "live"

    cluster.start_worker("late")
    until(lambda: "late" in rows(page))
    until(lambda: "late" in text(page, "#traffic svg"))

    def works() -> bool:
        for _ in range(50):
            rpc.rpc_sync("late", max, args=(1, 2))
        calls = page.execute_script(
            "return [...document.querySelectorAll('#peers tbody tr')]"
            ".find(row => row.children[0].textContent === 'late')?.children[11].textContent"
        )
        return calls not in (None, "", "0")

    until(works)
    until(
        lambda: works() and page.execute_script("return !!document.querySelector('.flow.moving')")
    )
    until(lambda: text(page, "#tile-calls") not in ("", "0"))

    cluster.kill("late")
    until(lambda: "late" not in rows(page))
    until(lambda: "lost" in text(page, "#events") and "late" in text(page, "#events"))
    until(lambda: "1 peer was lost" in text(page, "#warnings"))


def test_the_page_says_when_the_broker_is_gone(cluster: LocalCluster, page: Chrome) -> None:
    until(lambda: text(page, "#link") == "live")
    # The broker itself is stopped, not ended: it comes back, as after a long pause.
    os.kill(cluster.broker_pid, signal.SIGSTOP)
    try:
        until(lambda: text(page, "#link") == "broker does not answer")
    finally:
        os.kill(cluster.broker_pid, signal.SIGCONT)
    until(lambda: text(page, "#link") == "live")
    page.get_log("browser")  # the failed requests are no mistakes of the page


def test_light_and_dark(cluster: LocalCluster, page: Chrome) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    until(lambda: rows(page))
    before = page.execute_script(background)
    page.execute_script("document.getElementById('theme').click()")
    assert page.execute_script(background) != before
    page.refresh()
    until(lambda: rows(page))
    assert page.execute_script(background) != before, "the choice is kept"


def test_a_phone_needs_no_sideways_scrolling(cluster: LocalCluster, free_port: int) -> None:
    with browser(PHONE) as driver:
        driver.get(f"http://127.0.0.1:{free_port}")
        until(lambda: "worker0" in rows(driver))
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= PHONE[0]


def test_screen_readers_have_names_for_everything(cluster: LocalCluster, page: Chrome) -> None:
    until(lambda: rows(page) and text(page, "#traffic svg"))
    unnamed = page.execute_script(
        "return [...document.querySelectorAll('svg[role=img], button, section, select, table')]"
        ".filter(node => !(node.ariaLabel || node.getAttribute('aria-labelledby')"
        " || node.labels?.length || node.caption || node.id === 'pairs'))"
        ".map(node => node.outerHTML)"
    )
    assert unnamed == []
    live = page.execute_script(
        "return [...document.querySelectorAll('[aria-live]')].map(n => n.id)"
    )
    assert set(live) == {"warnings", "events"}
    assert page.execute_script("return document.documentElement.lang") == "en"
    for row in page.execute_script(
        "return [...document.querySelectorAll('#peers tbody tr')].map(r => r.children[0].scope)"
    ):
        assert row == "row"
