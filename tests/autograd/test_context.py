"""Distributed autograd contexts: gradients per context and process, as torch has them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorplay.distributed import autograd, rpc
from tensorplay.distributed.rpc import RRef
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.waiting import until
from tests.autograd.ways import WAYS, Way, assert_equal

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


def gradients_in(context_id: int, module: RRef[nn.Module]) -> list[Tensor | None]:
    found = autograd.get_gradients(context_id)
    return [found.get(parameter) for parameter in module.local_value().parameters()]


def has_context(context_id: int) -> bool:
    return autograd._is_valid_context(context_id)


def what_is_kept() -> tuple[int, int]:
    """Returns the numbers of graphs and of contexts."""
    return autograd.live_graphs(), int(autograd._get_debug_info()["num_autograd_contexts"])


def keeps(worker: str, *, contexts: int, graphs: int | None = None) -> bool:
    """Whether a worker has so many contexts and, if that matters, graphs."""
    found = rpc.rpc_sync(worker, what_is_kept)
    return found[1] == contexts and graphs in (None, found[0])


def lacks_context(worker: str, id: int) -> bool:
    return not rpc.rpc_sync(worker, has_context, (id,))


def id_of_context() -> int:
    return autograd._current_context()._context_id()


def id_by_way_of(worker: str) -> int:
    return rpc.rpc_sync(worker, id_of_context)


def step(module: RRef[nn.Module], context_id: int) -> None:
    with torch.no_grad():
        for parameter, gradient in autograd.get_gradients(context_id).items():
            if any(parameter is own for own in module.local_value().parameters()):
                parameter -= 0.1 * gradient


def there(way: Way, module: Any, function: Any, context_id: int) -> Any:
    """Has a function see a module where it is, outside of any context."""
    rref = module if isinstance(module, RRef) else module.get_module_rref()
    return rpc.rpc_sync(rref.owner(), function, (context_id, rref))


def train_in_context(x: Tensor, worker: str) -> list[float]:
    y = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(worker, modules.scaled, (x + 2 * y,)).sum()
        autograd.backward(context_id, [loss])
        (gradient,) = autograd.get_gradients(context_id).values()
    return gradient.tolist()


@every_way
def test_gradients_are_kept_in_the_context(way: Way) -> None:
    module = way.module(modules.Net)
    front = modules.make(nn.Linear, (3, 3))
    x = numbers(5, 3, requires_grad=True)
    with autograd.context() as context_id:
        loss = way.call(module, front(x)).square().sum()
        autograd.backward(context_id, [loss])
        here = autograd.get_gradients(context_id)
        remote = there(way, module, gradients_in, context_id)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in front.parameters())
    assert way.gradients(module) == [None] * 4

    twin, twin_front = modules.make(modules.Net), modules.make(nn.Linear, (3, 3))
    y = numbers(5, 3, requires_grad=True)
    twin(twin_front(y)).square().sum().backward()
    assert_equal(remote, [parameter.grad for parameter in twin.parameters()])
    assert_equal(
        [here[leaf] for leaf in (x, *front.parameters())],
        [leaf.grad for leaf in (y, *twin_front.parameters())],
    )
    assert len(here) == 3


def test_existing_gradients_stay() -> None:
    x = numbers(3, requires_grad=True)
    x.grad = torch.full_like(x, 7.0)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", modules.scaled, (x,)).sum()
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0] * 3
    assert x.grad.tolist() == [7.0] * 3


def test_several_backwards_of_a_context_accumulate() -> None:
    x = numbers(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", modules.scaled, (x,)).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, (x,))])
        assert autograd.get_gradients(context_id)[x].tolist() == [5.0] * 3


def test_several_roots() -> None:
    x = numbers(3, requires_grad=True)
    with autograd.context() as context_id:
        losses = [rpc.rpc_sync(f"worker{n}", modules.scaled, (x,)).sum() for n in range(3)]
        autograd.backward(context_id, losses)
        assert autograd.get_gradients(context_id)[x].tolist() == [6.0] * 3


def test_a_second_backward_without_retain_graph() -> None:
    x = numbers(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", modules.scaled, (x,)).sum()
        autograd.backward(context_id, [loss])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            autograd.backward(context_id, [loss])


def test_contexts_are_apart_from_each_other() -> None:
    """Also while their passes run over the same leaves at the same time."""
    net = rpc.remote("worker0", modules.make, (modules.Net,))
    twin = modules.make(modules.Net)
    x = numbers(5, 3, requires_grad=True)
    begin = threading.Barrier(4)

    def train(seed: int) -> tuple[Tensor, list[Tensor | None]]:
        scale = float(seed + 1)
        begin.wait(20)
        with autograd.context() as context_id:
            for _ in range(3):
                loss = rpc.rpc_sync("worker0", modules.place, (net, x * scale)).square().sum()
                autograd.backward(context_id, [loss])
            remote = rpc.rpc_sync("worker0", gradients_in, (context_id, net))
            return autograd.get_gradients(context_id)[x], remote

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(train, range(4)))
    for seed, (input_gradient, remote) in enumerate(results):
        y = numbers(5, 3, requires_grad=True)
        twin.zero_grad()
        for _ in range(3):
            twin(y * float(seed + 1)).square().sum().backward()
        torch.testing.assert_close(input_gradient, y.grad)
        assert_equal(remote, [parameter.grad for parameter in twin.parameters()])


def test_training_with_the_gradients_of_a_context() -> None:
    net = rpc.remote("worker0", modules.make, (modules.Net,))
    twin = modules.make(modules.Net)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for seed in range(5):
        x = numbers(5, 3, seed=seed)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker0", modules.place, (net, x)).square().sum()
            autograd.backward(context_id, [loss])
            rpc.rpc_sync("worker0", step, (net, context_id))
        optimizer.zero_grad()
        expected = twin(x).square().sum()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected)


def test_a_callee_that_calls_further_workers() -> None:
    last = rpc.remote("worker1", modules.make, (nn.Linear, (3, 3)))
    first = rpc.remote("worker0", modules.make, (modules.Relay, (last,)))
    x = numbers(5, 3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", modules.place, (first, x)).square().sum()
        autograd.backward(context_id, [loss])
        remote = [
            rpc.rpc_sync(module.owner(), gradients_in, (context_id, module))
            for module in (first, last)
        ]
        here = autograd.get_gradients(context_id)[x]

    twin_last = modules.make(nn.Linear, (3, 3))
    twin_first = modules.make(modules.Relay, (twin_last,))
    y = numbers(5, 3, requires_grad=True)
    twin_first(y).square().sum().backward()
    torch.testing.assert_close(here, y.grad)
    for gradients, twin in zip(remote, (twin_first, twin_last), strict=True):
        assert_equal(gradients, [parameter.grad for parameter in twin.parameters()])


def test_a_value_that_is_kept_and_fetched_by_a_third_worker() -> None:
    """The gradient finds its way back through all of them, though no result was sent here."""
    x = numbers(3, requires_grad=True)
    with autograd.context() as context_id:
        kept = rpc.remote("worker0", modules.scaled, (x,))
        further = rpc.remote("worker1", modules.fetched, (kept,))
        loss = rpc.rpc_sync("worker2", modules.fetched, (further,)).exp().sum()
        autograd.backward(context_id, [loss])
        gradient = autograd.get_gradients(context_id)[x]
    torch.testing.assert_close(gradient, 8 * (8 * x.detach()).exp())


def test_a_kept_value_that_two_calls_use() -> None:
    x = numbers(3, requires_grad=True)
    with autograd.context() as context_id:
        kept = rpc.remote("worker0", modules.scaled, (x,))
        losses = [
            rpc.rpc_sync(worker, modules.fetched, (kept,)).square().sum()
            for worker in ("worker0", "worker1")
        ]
        autograd.backward(context_id, [sum(losses[1:], losses[0])])
        gradient = autograd.get_gradients(context_id)[x]
    torch.testing.assert_close(gradient, 2 * 32 * x.detach())


def test_sparse_gradients() -> None:
    embedding = rpc.remote(
        "worker0", modules.make, (nn.Embedding, (5, 2, None, None, 2.0, False, True))
    )
    with autograd.context() as context_id:
        for _ in range(2):
            rows = rpc.rpc_sync("worker0", modules.place, (embedding, torch.tensor([1, 3, 1])))
            autograd.backward(context_id, [rows.sum()])
        (gradient,) = rpc.rpc_sync("worker0", gradients_in, (context_id, embedding))
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.to_dense().sum(1).tolist() == [0.0, 8.0, 0.0, 4.0, 0.0]


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_share_no_memory(sparse: bool) -> None:
    """Two leaves may get the same one; each is written to by itself, as clipping does."""
    x, y, z = (numbers(3, 2, requires_grad=True, seed=seed) for seed in range(3))
    with autograd.context() as context_id:
        if sparse:
            rows = nn.functional.embedding(torch.tensor([1, 1]), x + y + z, sparse=True)
            loss = rpc.rpc_sync("worker0", torch.sum, (rows,))
        else:
            loss = rpc.rpc_sync("worker0", torch.add, (x + y, z)).sum()
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
        found[x].mul_(0)
        found[y].mul_(3)
        sums = [found[leaf].sum().item() for leaf in (x, y, z)]
    assert sums == ([0.0, 12.0, 4.0] if sparse else [0.0, 18.0, 6.0])


def test_hooks_on_leaves_run_and_see_no_gradient_of_others() -> None:
    x = numbers(3, requires_grad=True)
    x.grad = torch.ones_like(x)
    seen = []
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
    x.register_hook(lambda gradient: gradient * 10)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", modules.scaled, (x,)).sum()
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [20.0] * 3
    assert [gradient.tolist() for gradient in seen] == [[20.0] * 3]
    assert x.grad.tolist() == [1.0] * 3


def test_what_was_sent_outside_of_a_context_is_no_part_of_it() -> None:
    """A trainer that is called without a context begins one of its own."""
    x = numbers(3, requires_grad=True)
    found = rpc.rpc_sync("worker0", train_in_context, (x, "worker1"))
    assert found == [4.0] * 3
    assert x.grad is None
    for worker in ("worker0", "worker1", "client"):
        assert until(partial(keeps, worker, contexts=0))


def test_the_context_goes_along_with_calls() -> None:
    with autograd.context() as context_id:
        assert id_of_context() == context_id
        assert rpc.rpc_sync("worker0", id_of_context) == context_id
        assert rpc.rpc_sync("worker0", id_by_way_of, ("worker1",)) == context_id
        assert rpc.remote("worker2", id_of_context).to_here() == context_id
        # torch ids of workers are their ranks
        peers = {rpc.get_worker_info(f"worker{n}").id for n in range(3)}
        assert autograd._retrieve_context(context_id)._known_worker_ids() <= peers
    for worker in ("worker0", "client"):
        with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
            rpc.rpc_sync(worker, id_of_context)


def test_the_end_of_a_context_ends_it_everywhere() -> None:
    with autograd.context() as context_id:
        rpc.rpc_sync("worker0", id_by_way_of, ("worker1",))
        with torch.no_grad():
            rpc.rpc_sync("worker2", torch.ones, (3,))
        assert has_context(context_id)
        assert rpc.rpc_sync("worker1", has_context, (context_id,))
    assert not has_context(context_id)
    for worker in ("worker0", "worker1", "worker2"):
        assert until(partial(lacks_context, worker, context_id))
    with pytest.raises(
        RuntimeError, match=f"Could not find autograd context with id: {context_id}"
    ):
        autograd.get_gradients(context_id)


def test_the_graphs_of_a_context_end_with_it() -> None:
    x = numbers(3, requires_grad=True)
    with autograd.context() as context_id:
        kept = rpc.remote("worker0", modules.scaled, (x,))
        loss = rpc.rpc_sync("worker1", modules.fetched, (kept,)).sum()
        autograd.backward(context_id, [loss])
    del kept, loss
    for worker in ("worker0", "worker1", "client"):
        assert until(partial(keeps, worker, contexts=0, graphs=0))


def test_contexts_do_not_nest() -> None:
    with autograd.context() as context_id:
        with (
            pytest.raises(RuntimeError, match="Already have an autograd context"),
            autograd.context(),
        ):
            pass
        assert id_of_context() == context_id


@pytest.mark.parametrize(
    ("roots", "message"),
    [
        ([], "No tensors provided"),
        ([torch.ones(())], "requires_grad not set"),
        ([torch.ones((), requires_grad=True)], "valid gradient function"),
        ([torch.ones(2, requires_grad=True) * 1], "all roots need to be scalar"),
    ],
)
def test_roots_that_are_none(roots: list[Tensor], message: str) -> None:
    with autograd.context() as context_id, pytest.raises(RuntimeError, match=message):
        autograd.backward(context_id, roots)


def test_arguments_of_other_types() -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        autograd.backward("1", [torch.ones(())])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="incompatible function arguments"):
        autograd.backward(1, torch.ones(()))  # type: ignore[arg-type]


def test_a_context_that_there_is_not() -> None:
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 12345"):
        autograd.backward(12345, [numbers(1, requires_grad=True).sum()])


@pytest.mark.parametrize("worker", ["worker0", "client"])
def test_an_error_in_the_backward_names_the_process(worker: str) -> None:
    x = numbers(3, requires_grad=True)
    id = rpc.get_worker_info(worker).id
    with autograd.context() as context_id:
        y = rpc.rpc_sync(worker, modules.fail_in_backward, (x,))
        with pytest.raises(RuntimeError, match=f"Error on Node {id}: no gradient today"):
            autograd.backward(context_id, [y.sum()])


def test_is_available() -> None:
    assert autograd.is_available()
