"""A language model whose embedding table and decoder live on a parameter server.

They are the parts whose size grows with the vocabulary. The recurrent part in between is local.
The whole is an ordinary ``nn.Module``: parameters on both sides are clipped together and
stepped by one optimizer.

The text is made up: a token is followed by one of few others. A model that knows nothing has
a loss of ``log(vocabulary)``, one that knows the rule a loss of ``log(followers)``.

    python examples/rnn_embedding_server.py [--epochs 4] [--vocabulary 40]

on this machine, or with ``worker0`` that runs elsewhere:

    python examples/rnn_embedding_server.py --broker tcp://HOST:PORT
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

import tensorplay
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule, all_parameters, clip_grad_norm_
from tensorplay.distributed.optim import DistributedOptimizer

FOLLOWERS = 2
SEQUENCES, STEPS = 16, 12

State: TypeAlias = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Embeds, remembers and decodes; the first and the last on a server."""

    def __init__(self, server: str, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = RemoteModule(server, nn.Embedding, (vocabulary, width))
        self.memory = nn.LSTM(width, width)
        self.decoder = RemoteModule(server, nn.Linear, (width, vocabulary))

    def forward(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Maps int64 tokens of shape (T, N) to logits of shape (T, N, vocabulary)."""
        hidden, state = self.memory(self.embedding(tokens), state)
        return self.decoder(hidden), state


def make_text(vocabulary: int, length: int) -> Tensor:
    """Returns int64 tokens of shape (length, SEQUENCES)."""
    followers = torch.stack([torch.randperm(vocabulary)[:FOLLOWERS] for _ in range(vocabulary)])
    token = torch.randint(vocabulary, (SEQUENCES,))
    tokens = [token]
    for _ in range(length - 1):
        token = followers[token, torch.randint(FOLLOWERS, (SEQUENCES,))]
        tokens.append(token)
    return torch.stack(tokens)


def train_epoch(model: LanguageModel, optimizer: DistributedOptimizer, text: Tensor) -> float:
    """Goes once through the text, a piece at a time; returns the mean loss of a token."""
    parameters = list(all_parameters(model))
    state: State | None = None
    losses = []
    for start in range(0, len(text) - STEPS, STEPS):
        piece = text[start : start + STEPS + 1]
        if state is not None:  # goes on from the last piece, but the gradient does not
            state = (state[0].detach(), state[1].detach())
        optimizer.zero_grad()
        logits, state = model(piece[:-1], state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), piece[1:].flatten())
        loss.backward()
        clip_grad_norm_(parameters, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@contextmanager
def joined(broker: str | None, names: list[str]) -> Iterator[None]:
    """Makes this process a client of the named workers, which it starts if there is no broker."""
    if broker is None:
        with tensorplay.local_cluster(names):
            yield
        return
    rpc.init_rpc("trainer", broker=broker)
    try:
        rpc.wait_for_workers(names, timeout=60)
        yield
    finally:
        rpc.shutdown(graceful=False)


def main(broker: str | None, epochs: int, vocabulary: int) -> None:
    """Trains and prints the loss of each epoch."""
    torch.manual_seed(0)
    text = make_text(vocabulary, length=20 * STEPS + 1)
    with joined(broker, ["worker0"]):
        model = LanguageModel("worker0", vocabulary, width=32)
        optimizer = DistributedOptimizer(torch.optim.Adam, all_parameters(model), lr=0.02)
        losses = [train_epoch(model, optimizer, text) for _ in range(epochs)]
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch}: loss {loss:.3f}")
    print(f"loss that knows nothing {math.log(vocabulary):.3f}, the rule {math.log(FOLLOWERS):.3f}")
    print(f"loss at first {losses[0]:.3f}, in the end {losses[-1]:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", metavar="ADDRESS", help="use running workers at this broker")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=40)
    arguments = parser.parse_args()
    main(arguments.broker, arguments.epochs, arguments.vocabulary)
