"""The pool that grows while its threads wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tensorplay.distributed.rpc import executor as module
from tensorplay.distributed.rpc.executor import Executor, blocked


@pytest.fixture
def pool() -> Iterator[Executor]:
    pool = Executor(2, "test")
    yield pool
    pool.close(timeout=5.0)


def test_tasks_run(pool: Executor) -> None:
    done = threading.Semaphore(0)
    for _ in range(100):
        pool.submit(done.release)
    for _ in range(100):
        assert done.acquire(timeout=10)


def test_no_more_tasks_run_at_a_time_than_asked_for(pool: Executor) -> None:
    started, go = threading.Semaphore(0), threading.Event()

    def task() -> None:
        started.release()
        go.wait(10)

    for _ in range(3):
        pool.submit(task)
    assert started.acquire(timeout=10)
    assert started.acquire(timeout=10)
    assert pool.size == 2
    assert pool.backlog == 1
    go.set()
    assert started.acquire(timeout=10)


def test_a_waiting_task_is_replaced(pool: Executor) -> None:
    """Nested to a depth far beyond the number of threads, each task waiting for the next."""
    depth = 50

    def nest(level: int, done: threading.Event) -> None:
        if level < depth:
            inner = threading.Event()
            pool.submit(nest, level + 1, inner)
            with blocked():
                assert inner.wait(10)
        done.set()

    done = threading.Event()
    pool.submit(nest, 0, done)
    assert done.wait(10)


def test_the_pool_shrinks_to_its_size_after_waits(pool: Executor) -> None:
    go = threading.Event()
    waiting = threading.Semaphore(0)

    def wait() -> None:
        with blocked():
            waiting.release()
            go.wait(10)

    for _ in range(10):
        pool.submit(wait)
    for _ in range(10):
        assert waiting.acquire(timeout=10)
    assert pool.size >= 10
    go.set()
    threads = [t for t in threading.enumerate() if t.name.startswith("test-")]
    finished = threading.Barrier(3)
    for _ in range(2):
        pool.submit(finished.wait, 10)
    finished.wait(10)
    for thread in threads:
        if pool.size <= 2:
            break
        thread.join(0.5)
    assert pool.size <= 2


def test_waits_that_the_pool_is_not_told_of_are_found(pool: Executor) -> None:
    lock = threading.Lock()
    lock.acquire()

    def wait() -> None:
        with lock:
            pass

    for _ in range(2):
        pool.submit(wait)
    done = threading.Event()
    pool.submit(done.set)
    for _ in range(50):
        pool.relieve()
        if done.wait(0.05):
            break
    assert done.is_set()
    lock.release()


def test_a_busy_pool_is_not_taken_for_a_waiting_one(pool: Executor) -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    for _ in range(3):
        pool.submit(spin)
    for _ in range(10):
        pool.relieve()
        stop.wait(0.02)
    assert pool.size == 2
    stop.set()


def test_tasks_that_wait_for_later_ones_do_not_stop_the_queue() -> None:
    """The pool is not told of these waits: whoever watches finds that the tasks are long."""
    pool = Executor(16, "meeting")
    meeting = threading.Barrier(17)
    for _ in range(20):
        for _ in range(16):
            pool.submit(meeting.wait, 10)
        meeting.wait(10)
    pool.close()
    assert pool.size == 0


def test_a_task_behind_a_long_one_is_not_delayed_much(pool: Executor) -> None:
    stop = threading.Event()
    for _ in range(20):
        stop.clear()
        pool.submit(stop.wait, 10)
        pool.submit(stop.set)
        assert stop.wait(5)


def test_short_tasks_stay_on_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than the usual, for a machine with much else to do.
    monkeypatch.setattr(module, "FIRST_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    pool = Executor(64, "short")
    done = threading.Semaphore(0)
    for _ in range(2000):
        pool.submit(done.release)
    for _ in range(2000):
        assert done.acquire(timeout=10)
    assert pool.size <= 4
    pool.close()


def test_no_task_is_forgotten(pool: Executor) -> None:
    """Threads come and go at every moment at which a task can come."""
    done = threading.Semaphore(0)

    def submit() -> None:
        for number in range(500):
            pool.submit(done.release)
            if number % 7 == 0:
                assert done.acquire(timeout=10)

    threads = [threading.Thread(target=submit, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for _ in range(3 * (500 - 72)):
        assert done.acquire(timeout=10)


def test_what_a_task_raises_is_logged_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Executor(1, "failing")  # one thread: what is logged comes before what follows

    def fail() -> None:
        raise SystemExit("boom")

    done = threading.Event()
    pool.submit(fail)
    pool.submit(done.set)
    assert done.wait(10)
    assert "boom" in caplog.text
    pool.close()


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
    pool = Executor(4, "idle")
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(10)
    for thread in [t for t in threading.enumerate() if t.name.startswith("idle-")]:
        thread.join(10)
    assert pool.size == 0
    done.clear()
    pool.submit(done.set)
    assert done.wait(10)
    pool.close()


def test_a_finished_task_is_not_kept_alive(pool: Executor) -> None:
    import weakref

    class Thing:
        pass

    thing = Thing()
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    pool.submit(lambda held: None, thing)
    del thing
    assert gone.wait(10)
