"""Compiled training: `learn.compile()` for the model, `learn.compile(step=True)` for the whole step as one call.

A training step is many small operations, and on a small model calling them costs more than computing them. `compile()`
joins those of the model's forward pass, and with them its backward pass. `compile(step=True)` joins the whole step,
forward, loss, backward and optimizer update, into one function (on a GPU one CUDA graph).

Such a step has no place inside where a callback could act. So it runs only while no active callback has a handler
between `before_pred` and `after_step`; as soon as one has, the ordinary step runs, and `explain_step()` names it. All
other events fire as always. Nothing else may change either, which is what this file is about:

- The weights stay those of the ordinary step (fp32: to 1e-6 of their norm after 100 steps), dropout masks included.
- Rates, momenta and weight decay stay plain numbers in the optimizer's param groups, where schedules, checkpoints and
  people expect them. Each step packs them into a small tensor that the compiled step reads: changing one never compiles
  anything again.
- The optimizer's state is updated in place, so that a state dict has its usual form, and loading one just works.
- What cannot be compiled, or is not faster, is not an error: the ordinary step goes on and the reason is told.

Four parts follow: what the Learner has, when which step runs, what is compiled, and how SGD and Adam update."""
from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, process_time
from typing import Any, Self

import torch
from torch import Tensor

from learnkit.batch import describe
from learnkit.loop import Loop

__all__ = ['Compilation']

STEP_EVENTS = ('before_pred', 'after_pred', 'after_loss', 'before_backward', 'after_cancel_backward', 'after_backward',
               'before_step', 'after_cancel_step', 'after_step')           # those that a compiled step cannot fire
REPLACED = ('_do_one_batch', '_do_pred_loss', '_do_loss', '_do_grad_opt', '_backward', '_do_step', '_step')
PARAM_HOOKS = ('_backward_hooks', '_post_accumulate_grad_hooks')
MODULE_HOOKS = ('_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks')
OPTIMIZER_HOOKS = ('_optimizer_step_pre_hooks', '_optimizer_step_post_hooks')

TIMED = 6       # steps of each kind that are timed; the first compiled one, which compiles, does not count
ODD_IN_A_ROW = 8  # so many batches of other shapes mean that shapes vary, and it pays to compile for that


# --------------------------------------------------------------------------------------------------- what a Learner has

class Compilation(Loop):
    "The part of the Learner that compiles: its model, or its whole training step."
    _whole_step: WholeStep | None = None

    def compile(
        self,
        step: bool = False,     # the whole training step, not the model alone
        **options: Any,         # for torch.compile: `mode`, `dynamic`, `backend`, `options`
    ) -> Self:
        """Compile the model in place (its state dict keeps its keys), or with `step=True` the whole training step.

        The whole step begins as usual; once the optimizer has its state, compiled and ordinary steps take turns, timed,
        and the faster goes on. `explain_step` says what runs and why. It takes torch's SGD, Adam and AdamW (and
        learnkit's) with one optimizer and no microbatches. After a compiled step `pred` and `loss_grad` are detached,
        and gradients were never attached to parameters.

        Batches of other shapes than the compiled one run as usual, until so many come in a row that it is compiled
        again for varying shapes. Random numbers are drawn as in the ordinary step (inductor's `fallback_random`), so
        that dropout masks are equal; `options={'fallback_random': False}` is faster for models with much dropout, and
        then they are not.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner().compile(step=True)
        >>> learn.explain_step()
        'The ordinary step runs: nothing is compiled before the first training batch.'
        """
        if not step: self.model.compile(**options)
        else:
            self._whole_step = WholeStep(self, options)
            self.__dict__['_do_one_batch'] = self._whole_step  # the loop calls it in place of the method
        return self

    def explain_step(self) -> str:
        "Say whether the compiled or the ordinary training step runs, and why."
        if self._whole_step is None: return 'The ordinary step runs: `learn.compile(step=True)` was not called.'
        return self._whole_step.explain()


# ------------------------------------------------------------------------------------------------ when which step runs

class WholeStep:
    """The training step of a learner: compiled where it may be, ordinary otherwise.

    It stands in for `_do_one_batch`. Every batch asks what may change at any time (handlers, hooks, gradients, shapes);
    each question is answered by what is at hand, so that all of them together take two or three microseconds.
    """

    def __init__(self, learn: Any, options: dict[str, Any]) -> None:
        self.learn, self.options = learn, options
        self.plan: Plan | None = None           # what the compiled step works on; made after an ordinary step
        self.refused: list[str] = []            # why no plan could be made
        self.given_up = ''                      # why nothing will be compiled any more
        self.odd_in_a_row, self.any_shape = 0, False
        self.compiled_s: list[float] = []       # how long the timed steps took
        self.ordinary_s: list[float] = []
        self.verdict = ''                       # what the timing said
        torch.compile(_whole_step, **options)   # raises now what is wrong with the options
        import torch._dynamo as dynamo
        if not hasattr(dynamo.config, 'trace_autograd_ops'): self.given_up = f'torch {torch.__version__} is too old'
        self._forget_code()

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeStep:
        return WholeStep(memo.get(id(self.learn), self.learn), self.options)

    def __call__(self) -> None:
        learn = self.learn
        if not learn.training or self.given_up: self._ordinary()
        elif not self._fits(): self._ordinary_then_plan()
        elif self.verdict: self._compiled()
        else: self._timed()

    def _ordinary(self) -> None: type(self.learn)._do_one_batch(self.learn)

    def _ordinary_then_plan(self) -> None:
        "Run the ordinary step, and see whether the next one may be a compiled one."
        self._ordinary()
        learn = self.learn
        if self.plan is not None or (self.refused and learn.iter) or self._in_the_way(): return
        self.refused = list(refusals(learn))    # where it was refused, the question is asked again each epoch
        if not self.refused: self.plan, self.refused = make_plan(learn)

    # -- may it run? ---------------------------------------------------------------------------------------------------

    def _fits(self) -> bool:
        "Tell whether the compiled step may do this batch; forget a plan that holds no more."
        plan, learn = self.plan, self.learn
        if plan is None or self._in_the_way(): return False
        if plan.holds(learn): return self.any_shape or self._usual_shape(plan)
        self.plan = None
        return False

    def _in_the_way(self) -> Sequence[str]:
        "Name the handlers, and other things that come and go, for which the ordinary step has to run now."
        learn = self.learn
        table = learn._tables[True]
        entries = table.get('whole step')       # as an event of its own, the table forgets it when callbacks change
        if entries is None: entries = table['whole step'] = [entry for e in STEP_EVENTS for entry in table[e]]
        for _, switch, _ in entries:
            if switch: return handler_names(learn)
        if learn.microbatch: return ['microbatches are in use']
        if learn._device and torch.is_autocast_enabled(learn._device.type): return ['autocast is active']
        return ()

    def _usual_shape(self, plan: Plan) -> bool:
        learn = self.learn
        shapes = [t.shape if type(t) is Tensor else describe(t) for t in learn.xb + learn.yb]
        if not plan.shapes: plan.shapes = shapes
        if shapes == plan.shapes: self.odd_in_a_row = 0
        else: self.odd_in_a_row += 1
        if self.odd_in_a_row == ODD_IN_A_ROW: self.any_shape, self.verdict = True, ''
        return not self.odd_in_a_row or self.any_shape

    def explain(self) -> str:
        "Say which step runs, and why."
        reasons = [self.given_up] if self.given_up else [*self._in_the_way(), *self.refused]
        if reasons: return f'The ordinary step runs: {"; ".join(reasons)}.'
        if self.plan is None: return 'The ordinary step runs: nothing is compiled before the first training batch.'
        if not self.verdict: return 'Compiled and ordinary steps take turns, to see which is faster.'
        odd = ' This batch has another shape: the ordinary one runs.' if self.odd_in_a_row and not self.any_shape else ''
        return f'The compiled step runs: {self.verdict}.{odd}'

    # -- running it ----------------------------------------------------------------------------------------------------

    def _timed(self) -> None:
        "Run the compiled or the ordinary step, in turn, and after some of each decide for the faster."
        compiled = len(self.compiled_s) <= len(self.ordinary_s)
        started = self._clock()
        if compiled: self._compiled()
        else: self._ordinary()
        (self.compiled_s if compiled else self.ordinary_s).append(self._clock() - started)
        if len(self.ordinary_s) < TIMED or self.given_up: return
        fast, slow = min(self.compiled_s[1:]), min(self.ordinary_s)
        self.compiled_s, self.ordinary_s = [], []
        self.verdict = f'{duration(fast)} against {duration(slow)} of the ordinary step'
        if fast >= slow: self._give_up(f'the compiled one was not faster, {self.verdict}')

    def _clock(self) -> float:
        "Return a time in seconds: of the processor, which other processes do not disturb; with a GPU, when it is done."
        if self.learn._device.type != 'cuda': return process_time()
        torch.cuda.synchronize()
        return perf_counter()

    def _compiled(self) -> None:
        learn, plan, error = self.learn, self.plan, None
        assert plan is not None
        plan.fill()
        try: out = self._call((learn.model, learn.loss_func, *plan.inputs, learn.xb, learn.yb))
        except torch.OutOfMemoryError: raise
        except Exception as e: error = message_of(e)
        if error is not None:
            self._ordinary()            # raises itself what the model or the data is to blame for; if it does not, then
            self._give_up(error)        # compiling is
            return
        learn.pred, learn.loss_grad, learn.loss, parts = out
        if plan.on_gpu: self._keep_outputs()
        if parts: learn._total_loss(parts)
        plan.count()

    def _call(self, args: tuple[Any, ...]) -> Any:
        "Call the compiled step; only when it has to be traced (again) does the setting for that cost its time."
        try: return self.code(*args)
        except self.needs_tracing: pass
        with self.tracing(trace_autograd_ops=True): return self.code(*args)

    def _keep_outputs(self) -> None:
        "Copy what the next replay of a CUDA graph overwrites."
        learn = self.learn
        learn.loss_grad, learn.loss = learn.loss_grad.clone(), learn.loss.clone()
        if isinstance(learn.pred, Tensor): learn.pred = learn.pred.clone()

    def _give_up(self, reason: str) -> None:
        self.given_up, self.plan = reason, None
        self._forget_code()

    def _forget_code(self) -> None: self.__dict__.pop('code', None)

    def __getattr__(self, name: str) -> Any:
        "Make the compiled function when it is first called: what compiles is slow to import."
        if name not in ('code', 'needs_tracing', 'tracing'): raise AttributeError(name)
        import torch._dynamo as dynamo
        self.needs_tracing, self.tracing = dynamo.exc.Unsupported, dynamo.config.patch
        self.code = torch.compile(own_copy(_whole_step), fullgraph=True, **self._compile_options())
        return self.__dict__[name]
