"""The callbacks of a plan, of one source for both libraries."""

from types import SimpleNamespace
from typing import Any

from tests.helpers.compat_plans import BATCH_EVENTS, EVENTS, EXCEPTIONS, Place


def callbacks_of(lib: Any, run: Any) -> SimpleNamespace:
    "Callback classes on the given library's `Callback`."

    class Raiser(lib.Callback):
        "Raise the plan's exception for the current place of the loop."

        def __init__(self, order: int, planned: dict[Place, str]) -> None:
            self.order, self.planned = order, planned

        def at(self, event: str) -> None:
            training = bool(self.learn.training)
            epoch = getattr(self.learn, 'epoch', 0) if run.counting else 0
            if event in ('before_fit', 'after_create'):
                epoch = -1
            batch = getattr(self.learn, 'iter', 0) if event in BATCH_EVENTS else -1
            place = (run.call, event, epoch, batch, training if event in BATCH_EVENTS else True)
            if place in self.planned:
                raise getattr(lib, EXCEPTIONS[self.planned[place]])

    def raise_at(event: str) -> Any:
        return lambda self: self.at(event)

    for event in EVENTS:
        setattr(Raiser, event, raise_at(event))

    class Tracer(lib.Callback):
        "Note every event."

        def __init__(self, tag: str, order: int = 0) -> None:
            self.tag, self.order = tag, order

        def note(self, event: str) -> None:
            run.note(self.tag, event, self.learn)

    def note_at(event: str) -> Any:
        return lambda self: self.note(event)

    for event in EVENTS:
        setattr(Tracer, event, note_at(event))

    class Losses(lib.Callback):
        order, run_valid = 200, True

        def after_loss(self) -> None:
            run.losses.append(self.loss.item())

    class OnlyTraining(Tracer):
        run_valid = False

    class OnlyValidation(Tracer):
        run_train = False

    class OnlyOutside(Tracer):
        run_train = run_valid = False

    class OffInFit(Tracer):
        def before_fit(self) -> None:
            self.note('before_fit')
            self.run = False

    class Acts(Tracer):
        "Do something at one event of one batch."

        def __init__(self, tag: str, order: int, act: Any, at: str, epoch: int, batch: int) -> None:
            super().__init__(tag, order)
            self.act, self.acts_at, self.in_epoch, self.on_batch = act, at, epoch, batch

        def note(self, event: str) -> None:
            super().note(event)
            if event == self.acts_at and self.is_here():
                self.act(self)

        def is_here(self) -> bool:
            learn = self.learn
            here = learn.epoch, learn.iter
            return bool(learn.training) and here == (self.in_epoch, self.on_batch)

        def after_train(self) -> None:
            self.note('after_train')
            if 'added' in self.__dict__:
                self.learn.remove_cb(self.__dict__.pop('added'))

    def add(cb: Any) -> None:
        cb.added = Tracer(f'{cb.tag}+', cb.order - 1)
        cb.learn.add_cb(cb.added)

    class ChangesBatch(Tracer):
        def before_batch(self) -> None:
            self.note('before_batch')
            self.learn.xb, self.learn.yb = (self.x * 2,), (self.y - 1,)

    class ScalesLoss(Tracer):
        def after_loss(self) -> None:
            self.note('after_loss')
            self.learn.loss_grad = self.loss_grad * 0.5

    class EveryEvent(lib.Callback):
        def __init__(self, tag: str, order: int) -> None:
            self.tag, self.order = tag, order

        def __call__(self, event: str) -> None:
            run.note(self.tag, event, self.learn)

    class CallsByHand(Tracer):
        "Hand events on to a callback that is not part of the learner."

        def __init__(self, tag: str, order: int) -> None:
            super().__init__(tag, order)
            self.inner = Tracer(f'{tag}>')

        def note(self, event: str) -> None:
            super().note(event)
            self.inner.learn = self.learn
            self.inner(event)

    def by_keyword(tag: str, order: int) -> Any:
        def note(event: str) -> Any:
            return lambda self: run.note(tag, event, self.learn)

        cb = lib.Callback(**{event: note(event) for event in EVENTS})
        cb.order = order
        return cb

    plain = {
        'plain': Tracer,
        'no_train': OnlyValidation,
        'no_valid': OnlyTraining,
        'neither': OnlyOutside,
        'off_in_fit': OffInFit,
        'every_event': EveryEvent,
        'changes_batch': ChangesBatch,
        'scales_loss': ScalesLoss,
        'calls_by_hand': CallsByHand,
        'by_keyword': by_keyword,
        'temporary': Tracer,
    }
    acting = {
        'off_in_batch': lambda cb: setattr(cb, 'run', False),
        'adds': add,
        'removes_itself': lambda cb: cb.learn.remove_cb(cb),
        'changes_order': lambda cb: setattr(cb, 'order', -cb.order),
        'changes_run': lambda cb: setattr(cb, 'run_train', not cb.run_train),
        'sets_lr': lambda cb: cb.opt.set_hypers(lr=cb.opt.hypers[-1]['lr'] * 0.5),
    }

    def make(i: int, kind: str, order: int, at: str, epoch: int, batch: int) -> Any:
        tag = f'{i}:{kind}'
        if kind in plain:
            return plain[kind](tag, order)
        return Acts(tag, order, acting[kind], at, epoch, batch)

    return SimpleNamespace(Raiser=Raiser, Tracer=Tracer, Losses=Losses, make=make)
