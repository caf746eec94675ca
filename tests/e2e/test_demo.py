"""The demo: what it prints, what it proves, what it leaves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.demo import data, model, train
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer

COMMAND = [sys.executable, "-m", "tensorplay.demo"]


def test_the_whole_demo(tmp_path: Path) -> None:
    done = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"Accuracy on 359 held-out digits: ([\d.]+)%", done.stdout)
    assert found is not None
    assert float(found[1]) >= 97
    found = re.search(r"Largest difference from the losses of one process: (\S+)", done.stdout)
    assert found is not None
    assert float(found[1]) <= 1e-5
    assert (tmp_path / "demo-loss.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--epochs", "1000"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert demo.stdout is not None
        for text in demo.stdout:
            if "RemoteModule(worker1/cpu" in text:  # both workers are at work
                break
        started = psutil.Process(demo.pid).children(recursive=True)
        assert len(started) == 4
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        _, left = psutil.wait_procs(started, timeout=30)
        assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
    finally:
        demo.kill()
        demo.communicate()


def test_the_model_spread_over_workers_learns_what_the_local_one_does(
    cluster: LocalCluster,
) -> None:
    digits = data.load(seed=1)
    spread, alone = model.spread(1, cluster.workers), model.local(1)
    assert isinstance(spread.edges, RemoteModule)
    remote = train.train(
        spread,
        DistributedOptimizer(torch.optim.SGD, model.parameters(spread), lr=0.1),
        digits,
        epochs=1,
        seed=1,
    )
    local = train.train(
        alone, torch.optim.SGD(alone.parameters(), lr=0.1), digits, epochs=1, seed=1
    )
    assert remote == pytest.approx(local, abs=1e-5)
    assert train.accuracy(spread, digits) == train.accuracy(alone, digits)


def test_the_digits_are_split_without_overlap() -> None:
    digits = data.load(seed=0)
    assert digits.images.shape == (1438, 1, 8, 8)
    assert digits.held_out_images.shape == (359, 1, 8, 8)
    assert 0 <= digits.images.min() < digits.images.max() <= 1
    assert torch.equal(data.load(seed=0).labels, digits.labels)
    assert not torch.equal(data.load(seed=1).labels, digits.labels)
    batches = list(digits.batches(64, torch.Generator().manual_seed(0)))
    assert sum(len(labels) for _, labels in batches) == 1438
    assert len(batches) == train.steps(digits, epochs=1)
