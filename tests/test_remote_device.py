from __future__ import annotations

import pytest
import torch

from tensorplay.distributed.remote_device import _remote_device

FORMS = [
    ("worker0/cpu", "worker0", None, "cpu"),
    ("worker0/cuda:1", "worker0", None, "cuda:1"),
    ("worker0", "worker0", None, "cpu"),
    ("rank:0/cpu", None, 0, "cpu"),
    ("rank:12/cuda:0", None, 12, "cuda:0"),
    ("rank:3", None, 3, "cpu"),
    ("cpu", None, None, "cpu"),
    ("cuda:2", None, None, "cuda:2"),
    (torch.device("cuda:2"), None, None, "cuda:2"),
]


@pytest.mark.parametrize(("given", "name", "rank", "device"), FORMS)
def test_forms(given: str | torch.device, name: str | None, rank: int | None, device: str) -> None:
    place = _remote_device(given)
    assert (place.worker_name(), place.rank(), place.device()) == (name, rank, torch.device(device))


@pytest.mark.parametrize("given", [form[0] for form in FORMS])
def test_text_reads_back_as_an_equal_place(given: str | torch.device) -> None:
    place = _remote_device(given)
    assert repr(place) == str(place)
    assert _remote_device(str(place)) == place
    assert hash(_remote_device(str(place))) == hash(place)


def test_equality_tells_worker_rank_and_device_apart() -> None:
    places = {_remote_device(text) for text in ("a/cpu", "b/cpu", "a/cuda:0", "rank:0/cpu", "cpu")}
    assert len(places) == 5
    assert _remote_device("a") == _remote_device("a/cpu")
    assert _remote_device("a") != "a/cpu"


@pytest.mark.parametrize(
    "text",
    ["", "/", "/cpu", "a/cuda:0/cuda:1", "rank:x/cpu", "rank:/cpu", "rank:-1/cpu", "a:b/cpu"],
)
def test_a_text_of_no_form_names_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="Could not parse remote_device") as caught:
        _remote_device(text)
    assert "'<workername>/<device>'" in str(caught.value)


@pytest.mark.parametrize("device", ["foo", "cpu2", ""])
def test_a_device_unknown_to_torch_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=f"{device!r} is no device that torch knows"):
        _remote_device(f"worker0/{device}")


def test_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"str or a torch.device"):
        _remote_device(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["worker0/cuda:1", "worker0", "rank:3/cpu", "rank:3", "cpu"])
def test_reads_valid_texts_as_torch_does(text: str) -> None:
    from torch.distributed.remote_device import _remote_device as torch_remote_device

    ours, theirs = _remote_device(text), torch_remote_device(text)
    assert (ours.worker_name(), ours.rank(), ours.device(), repr(ours)) == (
        theirs.worker_name(),
        theirs.rank(),
        theirs.device(),
        repr(theirs),
    )
