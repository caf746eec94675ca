"""Policy gradient with one agent and several observers.

The agent lives in this process: it owns the policy and its optimizer. The observers live on two
workers, each with an environment of its own: a pole that is kept upright by pushes from the
left and the right. In each round all observers play an episode at the same time and ask the
agent, by calls back through its reference, for every action. Then the agent learns.

It shows references in both directions (``rpc.remote`` makes the observers, ``RRef(agent)`` is
sent to them), calls that are answered by further calls, and futures.

    python examples/reinforcement_learning.py [--rounds 20] [--observers 4]

on this machine, or with ``worker0`` and ``worker1`` that run elsewhere:

    python examples/reinforcement_learning.py --broker tcp://HOST:PORT
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import tensorplay
from tensorplay.distributed import rpc

MAX_STEPS = 80


class Pole:
    """A pole in a plane, to be kept upright by pushes at its foot.

    Its state is a float32 tensor of shape (2,): the angle and how fast it changes.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.angle = self.speed = 0.0

    def reset(self) -> Tensor:
        """Stands the pole up, not quite straight, and returns its state."""
        start = torch.rand(2, generator=self.generator).sub(0.5).mul(0.1)
        self.angle, self.speed = start.tolist()
        return self.state()

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        """Pushes to the left (0) or right (1); returns state, reward and whether it fell."""
        self.speed += 0.1 * (2.0 * self.angle - (1.0 if action else -1.0))
        self.angle += 0.1 * self.speed
        fell = abs(self.angle) > 0.5
        return self.state(), -1.0 if fell else 1.0 - 2.0 * abs(self.angle), fell

    def state(self) -> Tensor:
        """Returns the state, in units of a quarter."""
        return torch.tensor([self.angle, self.speed]).mul(4.0)


class Observer:
    """Plays in an environment of its own; lives on a worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.environment = Pole(seed=number)

    def run_episode(self, agent: rpc.RRef[Agent], max_steps: int) -> list[float]:
        """Plays one episode and returns the reward of each step."""
        state = self.environment.reset()
        rewards: list[float] = []
        fell = False
        while not fell and len(rewards) < max_steps:
            action = agent.rpc_sync().select_action(self.number, state)
            state, reward, fell = self.environment.step(action)
            rewards.append(reward)
        return rewards


class Agent:
    """Chooses actions for all observers and learns from their rewards."""

    def __init__(self, workers: list[str], observers: int) -> None:
        self.observers = [
            rpc.remote(workers[number % len(workers)], Observer, args=(number,))
            for number in range(observers)
        ]
        self.policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        # Every observer is served by a thread of its own: it has its own list and generator.
        self.log_probabilities: list[list[Tensor]] = [[] for _ in range(observers)]
        self.generators = [torch.Generator().manual_seed(number) for number in range(observers)]

    def select_action(self, observer: int, state: Tensor) -> int:
        """Called by the observers: draws an action and keeps the gradient's way to it."""
        log_probabilities = self.policy(state).log_softmax(-1)
        choice = torch.multinomial(
            log_probabilities.detach().exp(), 1, generator=self.generators[observer]
        )
        self.log_probabilities[observer].append(log_probabilities[choice])
        return int(choice)

    def play(self, max_steps: int) -> list[list[float]]:
        """Has every observer play an episode; returns the rewards of each."""
        me = rpc.RRef(self)
        futures = [observer.rpc_async().run_episode(me, max_steps) for observer in self.observers]
        episodes: list[list[float]] = torch.futures.wait_all(futures)
        return episodes

    def learn(self, episodes: list[list[float]], discount: float = 0.95) -> None:
        """Makes actions likelier after which rewards were above the average of the round."""
        returns = torch.cat([discounted(rewards, discount) for rewards in episodes])
        log_probabilities = torch.cat([x for row in self.log_probabilities for x in row])
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        self.optimizer.zero_grad()
        (-log_probabilities * advantages).mean().backward()
        self.optimizer.step()
        for row in self.log_probabilities:
            row.clear()


def discounted(rewards: list[float], discount: float) -> Tensor:
    """Returns, for each step, the sum of all later rewards, the further the less."""
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
        returns.append(total)
    return torch.tensor(returns[::-1])


@contextmanager
def joined(broker: str | None, names: list[str]) -> Iterator[None]:
    """Makes this process a client of the named workers, which it starts if there is no broker."""
    if broker is None:
        with tensorplay.local_cluster(names):
            yield
        return
    rpc.init_rpc("agent", broker=broker)
    try:
        rpc.wait_for_workers(names, timeout=60)
        yield
    finally:
        rpc.shutdown(graceful=False)


def main(broker: str | None, rounds: int, observers: int) -> None:
    """Plays and learns, and prints how long the poles stay upright."""
    torch.manual_seed(0)
    workers = ["worker0", "worker1"]
    steps = []
    with joined(broker, workers):
        agent = Agent(workers, observers)
        for number in range(rounds):
            episodes = agent.play(MAX_STEPS)
            agent.learn(episodes)
            steps.append(sum(map(len, episodes)) / observers)
            print(f"round {number:3}: upright for {steps[-1]:5.1f} of {MAX_STEPS} steps")
    part = max(1, rounds // 4)
    first, last = sum(steps[:part]) / part, sum(steps[-part:]) / part
    print(f"upright at first for {first:.1f} steps, in the end for {last:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", metavar="ADDRESS", help="use running workers at this broker")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--observers", type=int, default=4)
    arguments = parser.parse_args()
    main(arguments.broker, arguments.rounds, arguments.observers)
