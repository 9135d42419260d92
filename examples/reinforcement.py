"""Balance a pole with deep Q-learning: a model that makes the data it learns from.

    python examples/reinforcement.py                     # 20,000 batches, then 20 episodes: some minutes
    python examples/reinforcement.py --quick             # 200 batches: seconds
    python examples/reinforcement.py --resume            # continue after a kill, with the same arguments
    python examples/reinforcement.py --compare           # the same training as a plain loop: equal weights?

The stream of batches acts in the environment with the current model. Deep Q-learning: Mnih et al., 2015.
`nbs/project_reinforcement.ipynb` explains each part. pip install gymnasium."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, Checkpoint, DataLoaders, Learner, Periodic, SaveModelCallback

LONGEST = 500  # steps of an episode
DISCOUNT = 0.99  # of the reward of the next step
Batch = tuple[Tensor, ...]


def make_model(width: int = 128) -> nn.Module:
    "Return a model of the discounted sum of rewards that follows each of the two actions."
    return nn.Sequential(
        nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )


def make_environment() -> gym.Env[Any, Any]:
    "Return a cart with a pole, without a time limit: `Experience` counts the steps."
    return gym.make('CartPole-v1', max_episode_steps=-1, disable_env_checker=True)


# -- data ------------------------------------------------------------------------------------------


class Experience:
    """A stream of batches from a memory that grows while the model acts.

    Before each batch the current model takes some steps in the environment; now and then the action is random. The
    batch holds random steps of the memory: observations (n, 4), actions, rewards, next observations and whether the
    pole fell.

    The reward to learn from is -1 for a fall and 0 for any other step. With gymnasium's own reward of 1 for each step,
    the values to learn are up to 100, and nearly equal for both actions.

    The state holds everything from which the next batch is made, so that a run is resumed exactly. CartPole draws
    random numbers only at the start of an episode, from a seed that is given here. An environment that draws them
    in each step has a generator whose state would be needed, too."""

    def __init__(
        self,
        model: nn.Module,  # acts, and is trained meanwhile
        seed: int = 0,
        bs: int = 128,  # steps in a batch
        steps_per_batch: int = 4,  # steps in the environment before each batch
        capacity: int = 20_000,  # steps to remember; older ones are overwritten
        warmup: int = 500,  # steps before the first batch, nearly all random
        explore: int = 10_000,  # steps until the share of random actions has fallen to `epsilon`
        epsilon: float = 0.05,
    ) -> None:
        self.model, self.seed, self.bs = model, seed, bs
        self.steps_per_batch, self.capacity, self.warmup = steps_per_batch, capacity, warmup
        self.explore, self.epsilon = explore, epsilon
        self.generator = torch.Generator().manual_seed(seed)
        self.environment = make_environment()
        self.memory: Batch = (
            torch.zeros(capacity, 4),
            torch.zeros(capacity, dtype=torch.long),
            torch.zeros(capacity),
            torch.zeros(capacity, 4),
            torch.zeros(capacity, dtype=torch.bool),
        )
        self.n_steps = 0  # steps so far
        self.n_episodes = 0
        self.returns: list[float] = []  # of the episodes that ended before the current batch
        self._begin_episode()

    def _begin_episode(self) -> None:
        # the first observation of each episode depends on its number alone
        observation, _ = self.environment.reset(seed=1000 * self.seed + self.n_episodes)
        self.observation = torch.from_numpy(observation)
        self.n_episodes += 1
        self.length = 0  # steps in this episode, which are its return

    def __iter__(self) -> Iterator[Batch]:
        while self.n_steps < self.warmup:
            self._act()
        while True:
            self.returns = []
            for _ in range(self.steps_per_batch):
                self._act()
            yield self._draw()

    def _act(self) -> None:
        "Take one step in the environment, and remember it."
        share = max(self.epsilon, 1 - self.n_steps / self.explore)
        if torch.rand((), generator=self.generator) < share:
            action = int(torch.randint(2, (), generator=self.generator))
        else:
            action = choose_actions(self.model, self.observation[None])[0]
        after, _, has_fallen, _, _ = self.environment.step(action)
        reward = -1.0 if has_fallen else 0.0
        step = (self.observation, action, reward, torch.from_numpy(after), has_fallen)
        for column, value in zip(self.memory, step, strict=True):
            column[self.n_steps % self.capacity] = value
        self.observation = torch.from_numpy(after)
        self.n_steps += 1
        self.length += 1
        if has_fallen or self.length == LONGEST:
            self.returns.append(float(self.length))
            self._begin_episode()

    def _draw(self) -> Batch:
        "Return random steps of the memory."
        n = min(self.n_steps, self.capacity)
        rows = torch.randint(n, (self.bs,), generator=self.generator)
        return tuple(column[rows] for column in self.memory)

    def state_dict(self) -> dict[str, Any]:
        "Return the memory, the state of the environment and the counters."
        n = min(self.n_steps, self.capacity)
        return {
            'memory': [column[:n] for column in self.memory],
            'environment': torch.tensor(self.environment.unwrapped.state, dtype=torch.float64),
            'observation': self.observation,
            'generator': self.generator.get_state(),
            'counters': [self.n_steps, self.n_episodes, self.length],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        "Restore what `state_dict` has returned."
        for column, saved in zip(self.memory, state['memory'], strict=True):
            column[: len(saved)] = saved
        self.environment.reset()
        self.environment.unwrapped.state = state['environment'].numpy()
        self.observation = state['observation']
        self.generator.set_state(state['generator'])
        self.n_steps, self.n_episodes, self.length = state['counters']


@torch.no_grad()
def choose_actions(model: nn.Module, observations: Tensor) -> list[int]:
    "Return the action with the largest predicted return for each observation."
    return model(observations).argmax(1).tolist()


def play(model: nn.Module, episodes: int = 20, seed: int = 1_000_000) -> list[float]:
    "Return the returns of episodes without random actions, all played side by side."
    environments = [make_environment() for _ in range(episodes)]
    observations = [env.reset(seed=seed + i)[0] for i, env in enumerate(environments)]
    returns = [0.0] * episodes
    running = list(range(episodes))
    while running:
        actions = choose_actions(
            model, torch.from_numpy(np.stack([observations[i] for i in running]))
        )
        for i, action in zip(list(running), actions, strict=True):
            observations[i], reward, has_fallen, _, _ = environments[i].step(action)
            returns[i] += float(reward)
            if has_fallen or returns[i] == LONGEST:
                running.remove(i)
    return returns


# -- training --------------------------------------------------------------------------------------


def find_loss(values: Tensor, actions: Tensor, targets: Tensor) -> Tensor:
    "Compare the values of the actions that were taken with their targets (Huber loss)."
    return F.smooth_l1_loss(values.gather(1, actions[:, None])[:, 0], targets)


@torch.no_grad()
def find_targets(target_model: nn.Module, rewards: Tensor, after: Tensor, fallen: Tensor) -> Tensor:
    "Return the reward plus the discounted value of the best next action, which is 0 after a fall."
    best = target_model(after).max(1).values
    return rewards + DISCOUNT * torch.where(fallen, 0.0, best)


class TargetModel(Periodic):
    """Compute targets with a copy of the model that is replaced only now and then.

    Without it each step would move the targets towards which it goes. Checkpointed: the copy."""

    def __init__(self, every: str) -> None:
        super().__init__(every)
        self.target_model: nn.Module | None = None

    def before_fit(self) -> None:
        super().before_fit()
        self.target_model = deepcopy(self.model)

    def before_batch(self) -> None:
        actions, *others = self.yb
        self.learn.yb = (actions, find_targets(self.target_model, *others))

    def on_every(self) -> None:
        self.target_model.load_state_dict(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), 'model': self.target_model.state_dict()}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        super().load_state_dict(sd)
        self.target_model.load_state_dict(sd['model'])


class LogReturns(Callback):
    "Record the returns of training episodes, and the mean return of ten episodes after each epoch."

    def after_batch(self) -> None:
        for value in self.dls.train.returns:
            self.learn.log('episode_return', value)

    def after_train(self) -> None:
        self.learn.log('return', np.mean(play(self.model, episodes=10, seed=2_000_000)))


def make_learner(
    folder: str | Path = '.',  # for checkpoints and weights
    seed: int = 0,
    epoch: int = 1000,  # batches
    lr: float = 1e-3,
    update: int = 200,  # batches from one copy of the model to the next
    **options: Any,  # of `Experience`
) -> Learner:
    "Return a Learner whose data come from its own model."
    torch.manual_seed(seed)
    model = make_model()
    # a model this small acts and learns fastest on the CPU
    dls = DataLoaders(Experience(model, seed, **options), n_inp=1, n_iter=epoch, device='cpu')
    cbs = [TargetModel(f'{update}ba'), LogReturns()]
    return Learner(dls, model, find_loss, torch.optim.Adam, lr=lr, path=folder, cbs=cbs)


def train_by_hand(
    n: int,  # batches
    seed: int = 0,
    lr: float = 1e-3,
    update: int = 200,
    **options: Any,  # of `Experience`
) -> nn.Module:
    "Train as the Learner does, in a plain loop."
    torch.manual_seed(seed)
    model = make_model()
    target_model = deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = islice(Experience(model, seed, **options), n)
    for i, (observations, actions, *others) in enumerate(batches, 1):
        targets = find_targets(target_model, *others)
        loss = find_loss(model(observations), actions, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % update == 0:
            target_model.load_state_dict(model.state_dict())
    return model


def compare(n: int, **options: Any) -> bool:
    "Train n batches in both ways, and return True if all weights are equal to the last bit."
    learn = make_learner(**options)
    with learn.no_bar():
        learn.fit(f'{n}ba')
    weights = train_by_hand(n, **options).state_dict()
    return all(torch.equal(w, weights[name]) for name, w in learn.model.state_dict().items())


# -- the whole -------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description='Balance a pole with deep Q-learning.')
    parser.add_argument('--folder', type=Path, default=Path('pole'), help='for all files')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--quick', action='store_true', help='200 batches')
    parser.add_argument('--resume', action='store_true', help='continue a run that was killed')
    parser.add_argument('--compare', action='store_true', help='compare with a plain loop instead')
    args = parser.parse_args()
    n, epoch = (200, 100) if args.quick else (20_000, 1000)
    if args.quick:
        print('--quick shows that the script runs: its figures mean nothing.')
    torch.set_num_threads(1)  # more do not help with a model this small
    if args.compare:
        n = min(n, 2000)
        print(f'equal weights after {n} batches: {compare(n)}')
        return

    learn = make_learner(args.folder, args.seed, epoch)
    keep_best = SaveModelCallback(lambda learn: learn.history[-1]['return'], comp='greater')
    learn.fit(f'{n}ba', cbs=[keep_best, Checkpoint(f'{epoch}ba')], resume=args.resume)
    returns = play(learn.model)  # with the best weights, which the fit has loaded at its end
    print(f'20 episodes: mean {np.mean(returns):.1f}, worst {min(returns):.0f}')


if __name__ == '__main__':
    main()
