"""Compare users' loops that use `forward` and `optimize` with plain torch loops."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import (
    EMA,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelStepException,
    GradientAccumulation,
    GradientClip,
    Learner,
    MixedPrecision,
    MixUp,
    OptimWrapper,
    Recorder,
    TrainEvalCallback,
)
from learnkit.callbacks import SAM, GuardNonFinite, OptimizerMonitor
from learnkit.core.errors import FitError, LossError, OptimizerError, OptionError
from learnkit.engine.custom_batch import take_step
from tests.helpers.learners import quiet_synth_learner
from tests.helpers.own_loops import (
    Bare,
    Duel,
    Pair,
    classifier,
    fit,
    make_classifier_learner,
    make_duel,
    make_labeled_batches,
    points,
    train_by_hand,
    two_opts,
    weights,
)

# ------------------------------------------------------------------------------------- two networks


def test_a_gan_is_its_hand_written_loop_to_the_last_bit() -> None:
    learn = fit(make_duel())
    assert torch.equal(weights(learn.model), weights(train_by_hand()))
    assert (weights(learn.model) - weights(Pair())).abs().max() > 0.01
    assert learn.time.st == 12 and learn.time.ba == 6


def test_the_loss_of_a_batch_is_the_mean_of_those_that_were_optimized() -> None:
    seen: list[float] = []
    learn = fit(make_duel(Callback(after_loss=lambda cb: seen.append(cb.loss.item()))))
    expected = torch.tensor(seen, dtype=torch.float64).view(-1, 2).mean(1)
    found = torch.tensor(learn.recorder.smooth_loss.raw, dtype=torch.float64)
    assert torch.allclose(found, expected, atol=1e-12)


def test_a_user_evaluation_reports_its_loss() -> None:
    learn = make_duel()
    expected = (
        torch.stack([F.softplus(-learn.model.critic(x)).mean() for (x,) in points()]).mean().item()
    )
    with learn.no_logging():
        (loss,) = learn.validate(dl=points())
    assert loss == pytest.approx(expected, rel=1e-6)


def test_fp16_unscales_each_optimizer_and_skips_its_step_alone() -> None:
    def overflow(cb: Any) -> None:
        if cb.turn == 'generator' and cb.train_iter == 2:
            cb.learn.loss_grad = cb.loss_grad * float('inf')

    learn = make_duel(
        MixedPrecision('fp16', init_scale=2.0**8, growth_interval=4),
        Callback(before_backward=overflow),
        dtype=torch.float32,
    )
    fit(learn)

    model = Pair(torch.float32)
    opts = two_opts(None, 1e-2, model)
    scaler = torch.amp.GradScaler('cpu', 2.0**8, growth_interval=4)

    def called(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast('cpu', torch.float16):
            return m(x).float()

    def step(name: str, loss: Tensor, factor: float = 1.0) -> None:
        model.zero_grad()
        scaler.scale(loss * factor).backward()
        scaler.step(opts[name])
        scaler.update()

    for i, (real,) in enumerate(points(dtype=torch.float32)):
        fake = called(model.generator, real.flip(1))
        critic_loss = F.softplus(-called(model.critic, real)).mean()
        step('critic', critic_loss + F.softplus(called(model.critic, fake.detach())).mean())
        step(
            'generator',
            F.softplus(-called(model.critic, fake)).mean(),
            float('inf') if i == 2 else 1.0,
        )
    assert torch.allclose(weights(learn.model), weights(model), atol=1e-7)
    assert learn.mixed_precision.n_skipped == 1 and learn.time.st == 11
    assert learn.mixed_precision.scaler.get_scale() == scaler.get_scale() != 2.0**8


def test_monitors_and_guards_look_at_the_optimizer_whose_turn_it_is() -> None:
    seen: list[tuple[str, set[str]]] = []

    class Watch(OptimizerMonitor):
        def look(self) -> None:
            names = {
                name.split('/')[-1].split('.')[0] for name in self.measure() if 'grad/' in name
            }
            seen.append((self.learn.turn, names - {'global'}))

    fit(make_duel(Watch('1st'), GuardNonFinite(), n=1))
    assert seen == [('critic', {'critic'}), ('generator', {'generator'})]


# ------------------------------------------------------------------------------------- accumulation


def accumulated_by_hand(n: int, due: int) -> Pair:
    "Step each network with the mean gradient of `due` batches."
    model = Pair()
    opts = two_opts(None, 1e-2, model)
    grads: dict[str, list[Tensor]] = {}
    for i, (real,) in enumerate(points(n)):
        fake = model.generator(real.flip(1))
        for name in opts:
            params = opts[name].param_groups[0]['params']
            if name == 'critic':
                loss = (
                    F.softplus(-model.critic(real)).mean()
                    + F.softplus(model.critic(fake.detach())).mean()
                )
            else:
                loss = F.softplus(-model.critic(fake)).mean()
            new = torch.autograd.grad(loss, params)
            grads[name] = (
                [a + b for a, b in zip(grads[name], new, strict=True)]
                if name in grads
                else list(new)
            )
            if (i + 1) % due:
                continue
            for p, grad in zip(params, grads.pop(name), strict=True):
                p.grad = grad / due
            opts[name].step()
    return model


def test_each_optimizer_accumulates_on_its_own() -> None:
    steps: list[str] = []
    learn = fit(
        make_duel(
            GradientAccumulation(8), Callback(after_step=lambda cb: steps.append(cb.turn)), n=8
        )
    )
    assert steps == ['critic', 'generator'] * 4 and learn.time.st == 8
    assert torch.allclose(weights(learn.model), weights(accumulated_by_hand(8, 2)), atol=1e-14)


def test_optimize_returns_whether_it_stepped() -> None:
    class Asks(Duel):
        def optimize(self, *args: Any, **kwargs: Any) -> bool:
            stepped.append(super().optimize(*args, **kwargs))
            return stepped[-1]

    stepped: list[bool] = []
    fit(make_duel(GradientAccumulation(8), cls=Asks, n=4))
    assert stepped == [False, False, True, True] * 2


def test_samples_that_are_left_over_are_stepped_with_for_each() -> None:
    steps: list[tuple[str, int]] = []
    watcher = Callback(after_step=lambda cb: steps.append((cb.turn, cb.train_iter)))
    learn = make_duel(GradientAccumulation(8), watcher, n=5)
    fit(learn)
    assert steps == [
        ('critic', 1),
        ('generator', 1),
        ('critic', 3),
        ('generator', 3),
        ('critic', 5),
        ('generator', 5),
    ]


def test_a_resume_in_the_middle_of_an_accumulation_is_exact(tmp_path: Path) -> None:
    def make(*cbs: Any) -> Any:
        cbs = GradientAccumulation(12), MixedPrecision('fp16', init_scale=2.0**8), *cbs
        return make_duel(*cbs, dtype=torch.float32, n=7, path=tmp_path)

    straight = fit(make(), 2)
    states: list[Any] = []
    fit(make(Callback(batch_checkpoint=lambda cb: states.append(cb.learn.checkpoint_state()))), 2)
    assert len(states) == 14
    for state in (states[0], states[3], states[6], states[10]):
        again = make()
        fit(again, 2, resume=state)
        assert torch.equal(weights(again.model), weights(straight.model))
        assert again.time.st == straight.time.st


def test_adversarial_training_and_distillation() -> None:
    teacher = classifier()

    class Adversarial(Learner):
        def train_batch(self) -> None:
            x = self.x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(self.compute_loss(self.forward(self.model, x)), x)
            pred = self.forward(self.model, self.x + 0.1 * grad.sign())
            with torch.no_grad():
                soft = teacher(self.x).softmax(1)
            self.optimize({'hard': self.compute_loss(pred), 'soft': F.cross_entropy(pred, soft)})

    learn = fit(make_classifier_learner(Adversarial))
    model = classifier()
    for x, y in make_labeled_batches():
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        pred = model(x.detach() + 0.1 * grad.sign())
        loss = F.cross_entropy(pred, y) + F.cross_entropy(pred, teacher(x).softmax(1).detach())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    assert torch.allclose(weights(learn.model), weights(model), atol=1e-14)
    assert {'train_hard', 'train_soft'} <= set(learn.history[0])


class Ordinary(Learner):
    "The default batch, written with `forward` and `optimize`."

    def train_batch(self) -> None:
        self.optimize(lambda: self.compute_loss(self.forward(self.model, self.x)))


@pytest.mark.parametrize(
    'options',
    [
        {'cbs': lambda: [SAM(0.1), GradientClip(0.5)]},
        {'cbs': list, 'opt_func': partial(torch.optim.LBFGS, max_iter=3), 'lr': 0.3},
        {'cbs': lambda: [MixUp(0.4)]},
        {'cbs': lambda: [GradientAccumulation(16), EMA(0.9), GuardNonFinite()]},
    ],
    ids=['SAM', 'LBFGS', 'MixUp', 'accumulation'],
)
def test_the_ordinary_batch_in_verbs_is_the_ordinary_batch(options: dict[str, Any]) -> None:
    made = options['cbs']
    rest = {key: value for key, value in options.items() if key != 'cbs'}
    ends = []
    for cls in (Learner, Ordinary):
        torch.manual_seed(5)
        learn = fit(make_classifier_learner(cls, *made(), **rest), 2)
        ends.append((weights(learn.model), learn.recorder.smooth_loss.raw, learn.time.st))
    (plain, plain_losses, plain_steps), (own, own_losses, own_steps) = ends
    assert torch.equal(plain, own) and plain_losses == own_losses and plain_steps == own_steps


def test_the_events_of_a_turn() -> None:
    seen: list[str] = []
    names = (
        'before_batch before_pred after_pred after_loss before_backward after_backward '
        'before_step after_step after_batch'
    ).split()
    watcher = Callback(**{name: lambda cb, name=name: seen.append(name) for name in names})
    learn = make_classifier_learner(Ordinary, watcher)
    fit(learn)
    assert seen == names * 4


@pytest.mark.parametrize(
    ('event', 'error', 'n_steps'),
    [
        ('before_backward', CancelBackwardException, 6),
        ('before_step', CancelStepException, 3),
        ('before_step', CancelBatchException, 0),
        ('after_loss', CancelBatchException, 0),
    ],
)
def test_a_cancel_in_a_turn(event: str, error: type[Exception], n_steps: int) -> None:
    "Canceling the critic's turn leaves the generator's turn, unless the batch is canceled."

    def act(cb: Any) -> None:
        if cb.turn == 'critic':
            raise error

    learn = fit(make_duel(Callback(**{event: act}), n=3))
    assert learn.time.st == n_steps and learn.time.ba == 3
    assert learn.turn is None and learn.parts.custom_batch.call is None
    assert torch.equal(weights(learn.model.critic), weights(Pair().critic))


def test_lbfgs_for_one_network_and_sgd_for_the_other() -> None:
    def opts(params: Any, lr: float, model: Pair) -> dict[str, torch.optim.Optimizer]:
        critic = torch.optim.LBFGS(model.critic.parameters(), lr=0.5, max_iter=3)
        return {
            'critic': critic,
            'generator': torch.optim.SGD(model.generator.parameters(), lr=0.1),
        }

    class Both(Duel):
        def train_batch(self) -> None:
            model = self.model
            self.optimize(lambda: self.forward(model.critic, self.x).square().mean(), only='critic')
            self.optimize(self.forward(model.generator, self.x).square().mean(), only='generator')

    learn = fit(make_duel(cls=Both, opt_func=opts, lr={'critic': 0.5, 'generator': 0.1}))
    model = Pair()
    two = opts(None, 0.1, model)
    for (x,) in points():

        def closure(x: Tensor = x) -> Tensor:
            model.zero_grad()
            loss = model.critic(x).square().mean()
            loss.backward()
            return loss

        two['critic'].step(closure)
        model.zero_grad()
        model.generator(x).square().mean().backward()
        two['generator'].step()
    assert torch.equal(weights(learn.model), weights(model))


class Heads(nn.Module):
    "A model with two heads on one body."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh()).double()
        self.a, self.b = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()


def test_two_losses_share_a_part_of_their_graph() -> None:
    def opts(params: Any, lr: float, model: Heads) -> dict[str, torch.optim.Optimizer]:
        parts = {'a': model.a, 'b': model.b}
        return {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}

    class Shares(Learner):
        def train_batch(self) -> None:
            model = self.model
            x = self.forward(model.body, self.x)
            self.optimize(self.forward(model.a, x).square().mean(), only='a', retain_graph=True)
            self.optimize(self.forward(model.b, x).square().mean(), only='b')

    cbs = [TrainEvalCallback, Recorder]
    learn = Shares(points(), Heads(), None, opt_func=opts, lr=0.1, cbs=cbs, default_cbs=False)
    with pytest.warns(UserWarning, match='body.0.weight'):  # no optimizer has it, on purpose
        fit(learn)
    model = Heads()
    for (x,) in points():
        for head in (model.a, model.b):
            model.zero_grad()
            head(model.body(x)).square().mean().backward()
            with torch.no_grad():
                for p in head.parameters():
                    p -= 0.1 * p.grad
    assert torch.allclose(weights(learn.model), weights(model), atol=1e-14)


# ---------------------------------------------------------------------------------------- bad input


def test_what_optimize_cannot_do_is_reported() -> None:
    class Own(Learner):
        def train_batch(self) -> None:
            act(self)

    def loss(learn: Any) -> Tensor:
        return learn.compute_loss(learn.forward(learn.model, learn.x))

    act: Callable[[Any], Any] = lambda learn: learn.optimize(loss(learn), only='criti')
    with pytest.raises(OptimizerError, match='criti'):
        fit(make_classifier_learner(Own))
    act = lambda learn: learn.optimize(loss(learn))
    with pytest.raises(LossError, match=r'optimize\(\)'):
        fit(make_classifier_learner(Own, opt_func=torch.optim.LBFGS))
    with pytest.raises(LossError, match='SAM'):
        fit(make_classifier_learner(Own, SAM()))
    act = lambda learn: learn.optimize(loss(learn).detach())
    with pytest.raises(LossError):
        fit(make_classifier_learner(Own))
    act = lambda learn: learn.optimize(3.0)
    with pytest.raises(LossError):
        fit(make_classifier_learner(Own))
    act = lambda learn: learn.forward(learn.model, learn.x[:, :2])
    with pytest.raises(RuntimeError) as raised:
        fit(make_classifier_learner(Own))
    assert any('Sequential got' in note for note in raised.value.__notes__)
    with pytest.raises(FitError, match='report_loss'):
        make_classifier_learner(
            type(
                'Evaluates',
                (Learner,),
                {'evaluate_batch': lambda self: self.optimize(self.x.sum())},
            )
        ).validate(dl=make_labeled_batches())
    with pytest.raises(FitError, match='train_batch'):
        make_classifier_learner(Own, microbatch=2)


# -------------------------------------------------------------------------- loops without the verbs


WAITS = {
    'GradientAccumulation': (lambda: GradientAccumulation(8), 'before_backward'),
    'EMA': (EMA, 'after_step'),
    'SAM-like': (
        lambda: type('Own', (Callback,), {'after_pred': lambda self: None})(),
        'after_pred',
    ),
}


@pytest.mark.parametrize('name', WAITS)
def test_a_callback_that_cannot_act_is_named_once(name: str) -> None:
    make, event = WAITS[name]
    cb = make()
    with pytest.warns(UserWarning, match=event) as warned:
        fit(make_classifier_learner(Bare, cb), 2)
    texts_of_warnings = [str(w.message) for w in warned if 'Bare' in str(w.message)]
    own = [
        text
        for text in texts_of_warnings
        if type(cb).__name__ in text and event in text and '_do_one_batch' in text
    ]
    assert len(own) == 1


def test_sam_is_refused_by_a_loop_that_it_cannot_repeat() -> None:
    with pytest.raises(OptionError, match='SAM'):
        fit(make_classifier_learner(Bare, SAM()))


class Fires(Bare):
    "A loop that steps with every second batch and fires the events of each part."

    def _do_one_batch(self) -> None:
        self._do_pred_loss()
        if not self.training:
            return
        self._with_events(self._backward, 'backward', CancelBackwardException)
        if self.iter % 2 == 0:
            return
        self._with_events(self._step, 'step', CancelStepException)
        self.opt.zero_grad()


@pytest.mark.parametrize('cls', [Fires, Ordinary, Learner])
def test_a_loop_that_fires_its_events_is_left_alone(cls: type[Learner]) -> None:
    learn = make_classifier_learner(
        cls,
        MixedPrecision('bf16'),
        GradientClip(),
        EMA(),
        GuardNonFinite(),
        Callback(after_pred=len_of),
    )
    tables = learn.parts.callbacks.tables
    fit(learn, 2)
    assert learn.parts.callbacks.tables is tables and len(learn.cbs) == 7


def len_of(cb: Any) -> None:
    assert len(cb.pred) == 6


class Direct(Learner):
    "A loop that calls its loss function itself."

    def train_batch(self) -> None:
        self.optimize(self.loss_func(self.forward(self.model, self.x), *self.yb))


@pytest.mark.parametrize('cls', [Direct, Bare])
def test_mixup_names_a_loss_that_it_did_not_blend(cls: type[Learner]) -> None:
    with pytest.warns(UserWarning, match='MixUp .*compute_loss') as warned:
        fit(make_classifier_learner(cls, MixUp()), 2)
    assert len(warned) == 1


# ------------------------------------------------------------------------------- rates by optimizer


def test_rates_by_optimizer() -> None:
    rates = {'critic': 3e-3, 'generator': 2e-2}
    expected = weights(train_by_hand(lrs=(3e-3, 2e-2)))
    assert torch.equal(weights(fit(make_duel(lr=rates)).model), expected)
    assert torch.equal(weights(fit(make_duel(), lr=rates).model), expected)
    learn = fit(make_duel(), lr={'generator': 2e-2}, wd={'critic': 0.1})
    assert [h['lr'] for h in learn.opt.hypers] == [1e-2, 2e-2]
    assert [h['wd'] for h in learn.opt.hypers] == [0.1, 0.0]


def test_wrong_rates_by_optimizer_change_nothing() -> None:
    rates = {'critik': 0.1}
    learn = make_duel()
    before = weights(learn.model)
    with pytest.raises(OptimizerError, match=r"'critik'.* 'critic', 'generator'"):
        fit(learn, lr=rates)
    with pytest.raises(OptimizerError):
        fit(make_duel(lr=rates))
    assert torch.equal(weights(learn.model), before)


def test_parameters_and_gradients_of_one_optimizer() -> None:
    model = Pair()
    opt = OptimWrapper(opt=two_opts(None, 0.1, model))
    assert set(opt.parameters('critic')) == set(model.critic.parameters()) == set(opt.parameters(0))
    assert opt.name_of(1) == 'generator' and opt.name_of(None) is None
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.zero_grad(only='critic')
    assert all(p.grad is None for p in model.critic.parameters())
    assert all(p.grad is not None for p in model.generator.parameters())
    with pytest.raises(OptimizerError, match='generator'):
        opt.zero_grad(only='generater')


def test_a_step_by_hand_has_its_events_and_steps_one_optimizer() -> None:
    turns: list[Any] = []
    note = Callback(before_step=lambda cb: turns.append(cb.learn.turn))
    learn = make_duel(note)
    learn.create_opt()
    for p in learn.model.parameters():
        p.grad = torch.ones_like(p)
    critic = [p.clone() for p in learn.model.critic.parameters()]
    generator = [p.clone() for p in learn.model.generator.parameters()]
    take_step(learn, 'critic')
    assert turns == ['critic'] and learn.turn is None
    assert all((a != b).all() for a, b in zip(critic, learn.model.critic.parameters(), strict=True))
    assert all(map(torch.equal, generator, learn.model.generator.parameters()))
    replaced: list[str] = []
    take_step(learn, None, lambda: replaced.append('step'))
    assert replaced == ['step'] and turns == ['critic', None]


def test_a_callback_can_ask_whether_the_batch_is_evaluated_again() -> None:
    seen: list[bool] = []
    note = Callback(after_loss=lambda cb: seen.append(cb.learn.run.repeating))
    note.run_valid = False
    learn = quiet_synth_learner(n_train=2, cbs=[SAM(), note])
    learn.fit(1)
    assert seen == [False, True] * 2
