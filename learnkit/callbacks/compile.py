# SPDX-License-Identifier: Apache-2.0
"""Compiled training: `learn.compile()` for the model, `learn.compile(step=True)` for the whole step as one call.

A training step is many small operations, and on a small model the calls cost more than the
computation. `compile()` fuses the operations of the model. `compile(step=True)` fuses the whole
step, forward, loss, backward and optimizer update, into one function (on a GPU one CUDA graph).

Callbacks cannot act inside such a step. So the compiled step runs only while no active callback has
a handler between `before_pred` and `after_step`; otherwise the ordinary step runs, and
`explain_step()` names the callback. All other events occur as usual. This module keeps everything
else unchanged too:

- The weights equal the ordinary step's weights (fp32: within 1e-6 of their norm after 100 steps),
  dropout included.
- Rates, momenta and weight decay stay plain numbers in the optimizer's param groups, where
  schedules, checkpoints and users read them. Each step packs them into a small tensor that the
  compiled code reads, so that a new rate needs no recompilation.
- The optimizer's state is updated in its own tensors: a state dict has its usual form, and loading
  one works.
- A step that cannot be compiled raises no error: the ordinary step runs, and `explain_step()` gives
  the reason.

`learnkit.callbacks.whole_step` holds the compiled function; this module decides which step runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_autocast_enabled, nn

from learnkit.callbacks.whole_step import RULES, NotCompiled, Plan, has_tensor, whole_step
from learnkit.core.batch import describe, map_tensors, passed_names
from learnkit.engine.custom_batch import list_overrides
from learnkit.engine.events import METHODS, STEP_EVENTS
from learnkit.engine.loss import total_loss
from learnkit.engine.seams import train_whole_batch
from learnkit.optim.wrapper import OptimWrapper

if TYPE_CHECKING:
    from learnkit.learner import Learner

# events and methods of callbacks that a compiled step cannot call
SKIPPED = (*STEP_EVENTS, *METHODS)
RARE = ('amsgrad', 'dampening', 'differentiable', 'maximize')  # unsupported options
# attributes of modules, parameters and optimizers
HOOKS = (
    '_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks '
    '_post_accumulate_grad_hooks _optimizer_step_pre_hooks _optimizer_step_post_hooks'
).split()


def compile_learner(learn: Learner, *, step: bool, **options: Any) -> Any:
    "Compile the model or, with `step=True`, the whole training step."
    with warnings.catch_warnings():
        # importing torch's compiler raises deprecation warnings of torch itself
        warnings.simplefilter('ignore', DeprecationWarning)
        if step:
            learn.seams.features = [WholeStep(learn, options)]
        else:
            learn.model._compiled_call_impl = torch.compile(make_caller(learn.model), **options)
    return learn


def explain_step(learn: Learner) -> str:
    "Return a sentence that names the training step in use, compiled or ordinary, and the reason."
    for feature in learn.seams.features:
        if isinstance(feature, WholeStep):
            return feature.explain()
    return 'The ordinary step runs: `learn.compile(step=True)` was not called.'


# ------------------------------------------------------------------------------- choice of the step


class WholeStep:
    """Training step of a Learner: compiled if possible, otherwise ordinary.

    Takes the seam `batch` in a fit. Before every batch it checks for
    changes since the last batch: handlers, hooks, gradients, numbers, shapes. The checks take two or
    three microseconds in total.
    """

    holder = 'compile(step=True)'

    def __init__(self, learn: Learner, options: dict[str, Any]) -> None:
        torch.compile(whole_step, **options)  # raises errors in the options now
        import torch._dynamo as dynamo  # a local import: it takes a second

        self.learn = learn
        self.options = options
        self.dynamo = dynamo
        self.compiled: Any = None  # result of torch.compile, made before the first compiled step
        # arguments of the compiled step, made after an ordinary step
        self.plan: Plan | None = None
        self.refused: list[str] = []  # reasons why there can be no plan
        self.failure = ''  # reason why nothing is compiled any more
        self.shapes: list[Any] = []  # shapes of the batches that the step is compiled for
        if not (
            hasattr(dynamo.config, 'trace_autograd_ops')
            and hasattr(dynamo.eval_frame, 'set_eval_frame')
        ):
            self.failure = f'torch {torch.__version__} cannot compile a whole step'

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeStep:
        return WholeStep(memo.get(id(self.learn), self.learn), self.options)

    def seams(self, learn: Learner) -> dict[str, Any] | None:
        "Return the training on a batch; microbatches train with the ordinary step."
        return None if learn.microbatch else {'batch': self}

    def __call__(self, learn: Learner) -> None:
        if self.failure:
            train_whole_batch(learn)
        elif self._fits():
            self._run_compiled()
        else:
            self._run_ordinary()

    def _run_ordinary(self) -> None:
        "Run the ordinary step, then check whether the next step can be compiled."
        train_whole_batch(self.learn)
        if self.plan or self._find_blocks() or (self.refused and self.learn.iter):
            return
        # the reasons may change until the next epoch, which checks again
        self.refused = list(find_refusals(self.learn))
        if not self.refused:
            self.plan = Plan(self.learn)

    # -- checks ------------------------------------------------------------------------------------

    def _fits(self) -> bool:
        "Return True if the compiled step can run this batch; drop an outdated plan."
        plan = self.plan
        learn = self.learn
        if plan is None or self._find_blocks():
            return False
        # before each epoch, also run the checks that are too slow for each batch
        starts = not learn.iter
        if not plan.holds(learn) or (
            (plan.has_new_hooks() or starts) and any(find_refusals(learn))
        ):
            self.plan = None
            return False
        if starts or plan.n_steps != learn.opt.n_steps:
            self.plan = Plan(learn, plan)  # ordinary steps came between
        return bool(self.options.get('dynamic')) or self._has_usual_shape()

    def _find_blocks(self) -> list[str]:
        "Return the temporary conditions that need the ordinary step, such as handlers."
        learn = self.learn
        table: dict[str, Any] = learn.parts.callbacks.plain_tables[True]
        # the table drops this entry, like all others, when callbacks change
        entries = table.get('whole step')
        if entries is None:
            entries = table['whole step'] = [
                (f'{type(cb).__name__}.{e} has to be called', switch)
                for e in SKIPPED
                for _, switch, cb in table[e]
            ]
        found = [reason for reason, switch in entries if switch]
        if learn.microbatch:
            found.append('batches are split into microbatches')
        if learn.run.batch_device is not None and is_autocast_enabled(learn.run.batch_device.type):
            found.append('autocast is active')
        return found

    def _has_usual_shape(self) -> bool:
        learn = self.learn
        shapes = [t.shape if type(t) is Tensor else describe(t) for t in (*learn.xb, *learn.yb)]
        if not self.shapes:
            self.shapes = [tuple(shape) if isinstance(shape, tuple) else shape for shape in shapes]
        return shapes == self.shapes

    def explain(self) -> str:
        "Return a sentence that names the step in use, and the reason."
        reasons = [self.failure] if self.failure else [*self._find_blocks(), *self.refused]
        if reasons:
            return f'The ordinary step runs: {"; ".join(reasons)}.'
        if self.plan is None:
            return 'The ordinary step runs: compiling comes after the next training batch.'
        if self.options.get('dynamic'):
            return 'The compiled step runs.'
        return (
            f'The compiled step runs for batches of the shapes {self.shapes}, the ordinary step for '
            'others (`dynamic=True` compiles for all).'
        )

    # -- execution ---------------------------------------------------------------------------------

    def _run_compiled(self) -> None:
        learn = self.learn
        plan = self.plan
        error = ''
        assert plan is not None  # checked by `_fits`
        plan.write_numbers()
        names = passed_names(learn.model, learn.xb)
        try:
            out = self._call(learn.model, learn.loss_func, *plan.inputs, names, learn.xb, learn.yb)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            error = describe_error(e)
        if error:
            # raises an error of the model or the data; otherwise compiling is at fault
            train_whole_batch(self.learn)
            return self._give_up(error)
        if plan.device.type == 'cuda':
            out = map_tensors(out, Tensor.clone)  # the next replay of the graph overwrites these
        learn.pred, learn.loss_grad, learn.loss, parts = out
        if parts:
            total_loss(learn, parts)
        plan.count()

    def _call(self, *args: Any) -> Any:
        """Call the compiled code, and compile it first for new arguments.

        The function that torch.compile returns looks up settings at every call. Here only the frame
        evaluator is active, which runs compiled code and compiles nothing. It checks the guards as
        usual; if they fail, the Python code of `whole_step` runs, which raises `NotCompiled` at its
        start.
        """
        if self.compiled is None:
            self._make_code()
        set_evaluator = self.dynamo.eval_frame.set_eval_frame
        before = set_evaluator(False)
        try:
            return self.function(*args)
        except NotCompiled:
            pass
        finally:
            set_evaluator(before)
        with self.dynamo.config.patch(trace_autograd_ops=True):
            return self.compiled(*args)

    def _make_code(self) -> None:
        assert self.plan is not None
        options = {'fullgraph': True, **self.options}
        if options.get('backend', 'inductor') == 'inductor' and 'mode' not in options:
            on_gpu = self.plan.device.type == 'cuda'
            chosen = {
                'fallback_random': True,
                'triton.cudagraphs': on_gpu,
                'cpp_wrapper': not on_gpu,
            }
            options['options'] = chosen | (options.get('options') or {})
        self.function = copy_function(whole_step)
        self.compiled = torch.compile(self.function, **options)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self.plan = None
        self.compiled = None


def find_refusals(learn: Learner) -> Iterator[str]:
    "Yield the permanent conditions that rule out a compiled step."
    for name in list_overrides(learn):
        yield f'{type(learn).__name__} has its own `{name}`'
    for seam, holder in learn.seams.holders.items():
        if seam in ('model', 'loss', 'step'):
            yield f'{holder} holds the seam `{seam}` of the loop'
    if learn.seams.wrapper is not None:
        yield f'{type(learn.seams.wrapper).__name__} is called in place of the model'
    if isinstance(learn.model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        yield f'the model is a {type(learn.model).__name__}'
    devices = {str(p.device) for p in learn.opt.parameters() if p.requires_grad}
    if len(devices) != 1 or not devices.pop().startswith(('cpu', 'cuda')):
        yield 'what is trained is not all on one CPU or CUDA device'
    if type(learn.opt).step is not OptimWrapper.step:
        yield f'{type(learn.opt).__name__} has its own `step`'
    if len(learn.opt.optimizers) > 1:
        yield f'there are {len(learn.opt.optimizers)} optimizers'
    for opt in learn.opt.optimizers.values():
        if type(opt) not in RULES:
            yield f'{type(opt).__name__} is none of {", ".join(c.__name__ for c in RULES)}'
        else:
            yield from find_options(opt)
    yield from find_hooks(learn)


def find_options(opt: torch.optim.Optimizer) -> Iterator[str]:
    "Yield the options of an optimizer that a compiled step does not support."
    for group in opt.param_groups:
        yield from (f'{name} of {type(opt).__name__} is set' for name in RARE if group.get(name))
        if has_tensor(group[o] for o in RULES[type(opt)].options):
            yield f'a hyperparameter of {type(opt).__name__} is a tensor'


def find_hooks(learn: Learner) -> Iterator[str]:
    "Yield hooks and special parameters, which a compiled step would skip."
    opts = learn.opt.optimizers.values()
    hooked: list[tuple[str, Any]] = [(type(opt).__name__, opt) for opt in opts]
    for root in (m for m in (learn.model, learn.loss_func) if isinstance(m, nn.Module)):
        hooked += [(f'module {name or type(m).__name__}', m) for name, m in root.named_modules()]
    for name, p in learn.model.named_parameters():
        hooked.append((f'parameter {name}', p))
        if type(p) is not nn.Parameter or p.is_complex():
            yield f'parameter {name} is a {type(p).__name__} of {p.dtype}'
    for name, o in hooked:
        if any(getattr(o, hooks, None) for hooks in HOOKS):
            yield f'{name} has hooks'


# ------------------------------------------------------------------------------------------ helpers

_numbering = count()


def copy_function(f: Any) -> Any:
    "Copy a function under a new name, so that torch's caches of compiled code are separate."
    code = f.__code__.replace(co_name=f'{f.__name__}_{next(_numbering)}')
    return FunctionType(code, f.__globals__, closure=f.__closure__)


def make_caller(model: nn.Module) -> Any:
    """Return a function that calls a model, for torch.compile.

    `model.compile()` passes torch a function of torch.nn, and torch compiles only functions outside
    of torch.nn that it calls: for an `nn.Sequential` of torch's layers nothing at all."""

    def call_model(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    return copy_function(call_model)


def describe_error(e: Exception) -> str:
    "Return the type of an exception and the start of its message, on one line."
    return f'{type(e).__name__}: {" ".join(str(e).split())[:300]}'
