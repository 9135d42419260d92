# SPDX-License-Identifier: Apache-2.0
"""Compiled training: `learn.compile()` for the model, `learn.compile(step=True)` for the whole step as one call.

A training step is many small operations, and on a small model the calls cost more than the
computation. `compile()` fuses the operations of the model. `compile(step=True)` fuses the whole
step, forward, loss, backward and optimizer update, into one function (on a GPU one CUDA graph).

Handlers cannot be called inside such a step. A callback with handlers between `before_pred` and
`after_step` offers functions of tensors in their place, by a method `compiled_step`
(`learnkit.callbacks.step_parts`). Without them the ordinary step runs, and `explain_step()` names
the callback. All other events occur as usual. This module keeps everything else unchanged too:

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
from collections.abc import Iterator, Mapping
from inspect import signature
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_autocast_enabled, nn

from learnkit.callbacks.step_parts import Handlers, Part
from learnkit.callbacks.update_rules import RULES
from learnkit.callbacks.whole_step import NotCompiled, Plan, has_tensor, whole_step
from learnkit.core.batch import describe, map_tensors, passed_names
from learnkit.core.errors import OptionError
from learnkit.core.hints import suggest_keyword
from learnkit.engine.custom_batch import list_overrides
from learnkit.engine.loss import total_loss
from learnkit.engine.seams import train_whole_batch
from learnkit.optim.wrapper import OptimWrapper

if TYPE_CHECKING:
    from learnkit.learner import Learner

MAX_SHAPES = 8  # number of shapes of batches that are compiled; each takes seconds and memory
RARE = ('amsgrad', 'dampening', 'differentiable', 'maximize')  # unsupported options
# attributes of modules, parameters and optimizers
HOOKS = (
    '_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks '
    '_post_accumulate_grad_hooks _optimizer_step_pre_hooks _optimizer_step_post_hooks'
).split()


def compile_learner(learn: Learner, *, step: bool, **options: Any) -> Any:
    "Compile the model or, with `step=True`, the whole training step."
    _check_options(step, options)
    with warnings.catch_warnings():
        # importing torch's compiler raises deprecation warnings of torch itself
        warnings.simplefilter('ignore', DeprecationWarning)
        if step:
            learn.seams.features = [WholeStep(learn, options)]
        else:
            learn.model._compiled_call_impl = torch.compile(make_caller(learn.model), **options)
    return learn


def _check_options(step: Any, options: Mapping[str, Any]) -> None:
    "Raise `OptionError` or `TypeError` for arguments that neither `learn.compile` nor `torch.compile` has."
    if not isinstance(step, bool):
        raise OptionError(
            f'compile({step!r}): `step` is True or False. Pass options of torch.compile by name, as '
            "`mode='reduce-overhead'`."
        )
    known = [name for name in signature(torch.compile).parameters if name != 'model']
    for name in options:
        if name not in known:
            hint = suggest_keyword(name, ['step', *known])
            raise TypeError(f'Learner.compile() got an unexpected keyword argument {name!r}.{hint}')


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
    three microseconds in total. Each shape of batches has compiled code of its own; a further shape
    is compiled when it comes the second time.
    """

    holder = 'compile(step=True)'

    def __init__(self, learn: Learner, options: dict[str, Any]) -> None:
        torch.compile(whole_step, **options)  # raises errors in the options now
        import torch._dynamo as dynamo  # a local import: it takes a second

        self.learn = learn
        self.options = options
        self.dynamo = dynamo
        # arguments of the compiled step, made after an ordinary step
        self.plan: Plan | None = None
        self.refused: list[str] = []  # reasons why there can be no plan
        self.waiting = ''  # reason why the last step was ordinary, and the next one may be compiled
        self.failure = ''  # reason why nothing is compiled any more
        self.codes: dict[Any, Code] = {}  # compiled code by shapes of the batch
        self.n_compilations = 0
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
            return
        code = self._find_code() if self._fits() else None
        if code is None:
            self._run_ordinary()
        else:
            self._run_compiled(code)

    def _run_ordinary(self) -> None:
        "Run the ordinary step, then check whether the next step can be compiled."
        train_whole_batch(self.learn)
        if self.plan or self._find_blocks() or (self.refused and self.learn.iter):
            return
        # the reasons may change until the next epoch, which checks again
        self.refused = list(find_refusals(self.learn))
        if not self.refused:
            self._make_plan()

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
        if starts:
            self._find_handlers(again=True)
        is_current = plan.n_steps == learn.opt.n_steps and plan.parts == self._list_parts()
        if starts or not is_current or not plan.read_parts():
            return self._make_plan()
        return True

    def _make_plan(self) -> bool:
        "Make the arguments of the compiled step; return False while a callback has no state for it."
        parts = self._list_parts()
        states = []
        self.waiting = ''
        for part in parts:
            state = part.read_state()
            if state is None:
                self.waiting = f'{type(part.cb).__name__} took part itself'
                return False
            states.append(state)
        self.plan = Plan(self.learn, parts, states, self.plan)
        return True

    def _find_handlers(self, again: bool = False) -> Handlers:
        "Return the handlers inside the step."
        table: dict[str, Any] = self.learn.parts.callbacks.plain_tables[True]
        # the table drops this entry, like all others, when callbacks change
        handlers = None if again else table.get('whole step')
        if handlers is None:
            handlers = table['whole step'] = Handlers(self.learn)
        return handlers

    def _list_parts(self) -> list[Part]:
        "Return the parts of callbacks that are on."
        return [part for part in self._find_handlers().parts if part.switch]

    def _find_blocks(self) -> list[str]:
        "Return the temporary conditions that need the ordinary step, such as handlers."
        learn = self.learn
        found = [reason for reason, switch in self._find_handlers().blocks if switch]
        if learn.microbatch:
            found.append('batches are split into microbatches')
        if learn.run.batch_device is not None and is_autocast_enabled(learn.run.batch_device.type):
            found.append('autocast is active')
        return found

    def _find_code(self) -> Code | None:
        "Return the code for the shapes of the batch; None for shapes that are not compiled yet."
        learn = self.learn
        if self.options.get('dynamic'):
            shapes: Any = 'all'
        else:
            batch = (*learn.xb, *learn.yb)
            shapes = tuple([t.shape if type(t) is Tensor else describe(t) for t in batch])
        code = self.codes.get(shapes)
        if code is None:
            if len(self.codes) >= MAX_SHAPES:
                return None
            code = self.codes[shapes] = Code(is_first=not self.codes)
        code.n_batches += 1
        return code if code.n_batches > 1 else None

    def explain(self) -> str:
        "Return a sentence that names the step in use, and the reason."
        reasons = [self.failure] if self.failure else [*self._find_blocks(), *self.refused]
        if not reasons and self.waiting and not self.n_compilations:
            reasons = [self.waiting]
        if reasons:
            return f'The ordinary step runs: {"; ".join(reasons)}.{advise_fused(self.learn)}'
        if self.plan is None:
            return 'The ordinary step runs: compiling comes after the next training batch.'
        n = self.n_compilations
        counted = f'It was compiled {"once" if n == 1 else f"{n} times"}.'
        if self.waiting:
            counted += f' The last step was ordinary: {self.waiting}.'
        if self.options.get('dynamic'):
            return f'The compiled step runs. {counted}'
        shapes = [
            list(map(describe_shape, key)) for key, code in self.codes.items() if code.compiled
        ]
        text = f'The compiled step runs for batches of the shapes {shapes}. {counted}'
        if len(self.codes) == MAX_SHAPES:
            text += (
                f' The ordinary step runs for shapes beyond the first {MAX_SHAPES} '
                '(`dynamic=True` compiles for all).'
            )
        return text

    # -- execution ---------------------------------------------------------------------------------

    def _run_compiled(self, code: Code) -> None:
        learn = self.learn
        plan = self.plan
        error = ''
        assert plan is not None  # checked by `_fits`
        plan.write_numbers()
        names = passed_names(learn.model, learn.xb)
        generator = get_generator(plan.device) if plan.may_undo else None
        before: Any = None if generator is None else generator.get_state()
        inputs = plan.list_inputs()
        try:
            out = self._call(code, learn.model, learn.loss_func, *inputs, names, learn.xb, learn.yb)
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
        *results, found = out
        if generator is not None and not all(f['accept'] for f in found if 'accept' in f):
            # the compiled step has undone itself: the callback that refused it acts in an ordinary one
            generator.set_state(before)
            train_whole_batch(learn)
            return
        learn.pred, learn.loss_grad, learn.loss, losses = results
        if losses:
            total_loss(learn, losses)
        plan.count()
        for part, values in zip(plan.parts, found, strict=True):
            if part.finish is not None:
                part.finish(values)

    def _call(self, code: Code, *args: Any) -> Any:
        """Call the compiled code, and compile it first for new arguments.

        The function that torch.compile returns looks up settings at every call. Here only the frame
        evaluator is active, which runs compiled code and compiles nothing. It checks the guards as
        usual; if they fail, the Python code of `whole_step` runs, which raises `NotCompiled` at its
        start.
        """
        if code.compiled is None:
            code.compiled = torch.compile(code.function, **self._list_options())
        set_evaluator = self.dynamo.eval_frame.set_eval_frame
        before = set_evaluator(False)
        try:
            return code.function(*args)
        except NotCompiled:
            pass
        finally:
            set_evaluator(before)
        self.n_compilations += 1
        with self.dynamo.config.patch(trace_autograd_ops=True):
            return code.compiled(*args)

    def _list_options(self) -> dict[str, Any]:
        assert self.plan is not None
        # each shape has its own code, so that torch need not guess which sizes change
        options = {'fullgraph': True, 'dynamic': False, **self.options}
        if options.get('backend', 'inductor') == 'inductor' and 'mode' not in options:
            on_gpu = self.plan.device.type == 'cuda'
            chosen = {
                'fallback_random': True,
                'triton.cudagraphs': on_gpu,
                'cpp_wrapper': not on_gpu,
            }
            options['options'] = chosen | (options.get('options') or {})
        return options

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self.plan = None
        self.codes = {}


class Code:
    "Compiled code of the step for batches of one shape."

    def __init__(self, is_first: bool) -> None:
        self.function = copy_function(whole_step)
        self.compiled: Any = None  # result of torch.compile, made before the first call
        # the first shape is compiled at once, others when they come again
        self.n_batches = 1 if is_first else 0


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


def describe_shape(shape: Any) -> Any:
    "Return the shape of a tensor as a tuple, and the description of another object as it is."
    return tuple(shape) if isinstance(shape, torch.Size) else shape


def get_generator(device: torch.device) -> torch.Generator:
    "Return the default random generator of a device."
    if device.type == 'cuda':
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def advise_fused(learn: Learner) -> str:
    "Return a sentence about optimizers that loop over the tensors in Python on a CPU, or an empty string."
    for opt in learn.opt.optimizers.values() if learn.opt is not None else ():
        group = opt.param_groups[0]
        loops = 'fused' in group and not group['fused'] and not group.get('foreach')
        if loops and all(p.device.type == 'cpu' for p in group['params']):
            name = type(opt).__name__
            return (
                f' {name} updates one tensor after the other on a CPU: '
                f'`opt_func=partial(torch.optim.{name}, fused=True)` updates all at once.'
            )
    return ''


def describe_error(e: Exception) -> str:
    "Return the type of an exception and the start of its message, on one line."
    return f'{type(e).__name__}: {" ".join(str(e).split())[:300]}'
