# SPDX-License-Identifier: Apache-2.0
"""Compiled training: `learn.compile()` for the model, `learn.compile(step=True)` for the whole step as one call.

A training step is many small operations, and on a small model the calls cost more than the
computation. `compile()` fuses the operations of the model. `compile(step=True)` fuses the whole
step, forward, loss, backward and optimizer update, into one function (on a GPU one CUDA graph).

Handlers cannot be called inside such a step. A callback with handlers between `before_pred` and
`after_step` offers functions of tensors in their place, by a method `compiled_step`
(`learnkit.callbacks.step_parts`). Without them

- forward and backward are compiled alone, if only the optimizer's step has such handlers. It then
  runs as usual, and also where it cannot be compiled: if gradients accumulate, with microbatches,
  with several optimizers, with optimizers other than SGD and Adam;
- otherwise the ordinary step runs.

`explain_step()` names the step that runs, and the reasons. All other events occur as usual. This
module keeps everything else unchanged too:

- The weights equal the ordinary step's weights (fp32: within 1e-6 of their norm after 100 steps),
  dropout included.
- Rates, momenta and weight decay stay plain numbers in the optimizer's param groups, where
  schedules, checkpoints and users read them. Each step packs them into a small tensor that the
  compiled code reads, so that a new rate needs no recompilation.
- The optimizer's state is updated in its own tensors: a state dict has its usual form, and loading
  one works.
- A step that cannot be compiled raises no error: the ordinary step runs, and `explain_step()` returns
  the reason.

`learnkit.callbacks.whole_step` holds the compiled function, `traced_batch` and `step_plan` its
arguments, and `step_refusals` the reasons; this module decides which step runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_autocast_enabled, nn
from torch.utils.hooks import RemovableHandle

from learnkit.callbacks.step_parts import Handlers, Part
from learnkit.callbacks.step_plan import PassPlan, StepPlan
from learnkit.callbacks.step_refusals import find_refusals, find_step_refusals
from learnkit.callbacks.traced_batch import TracedBatch
from learnkit.callbacks.whole_step import NotCompiled, whole_step
from learnkit.core.batch import describe, map_tensors
from learnkit.core.errors import OptionError, StepPutOff
from learnkit.core.hints import suggest_keyword
from learnkit.engine.loss import total_loss

if TYPE_CHECKING:
    from learnkit.learner import Learner

MAX_SHAPES = 8  # number of shapes of batches that are compiled; each takes seconds and memory
MAX_REPEATS = 3  # number of compilations of a shape at successive batches, after the first one
Outputs = tuple[Any, ...]


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

    Takes the seam `batch` in a fit, or `passes` of microbatches. Before every batch it checks for
    changes since the last batch: handlers, hooks, gradients, numbers, shapes. The checks take two or
    three microseconds in total. Each shape of batches is compiled separately; a further shape
    is compiled when it comes the second time.
    """

    holder = 'compile(step=True)'
    default = TracedBatch()

    def __init__(self, learn: Learner, options: dict[str, Any]) -> None:
        torch.compile(whole_step, **options)  # raises errors in the options now
        import torch._dynamo as dynamo  # a local import: it takes a second

        self.learn = learn
        self.options = options
        self.dynamo = dynamo
        # whether an ordinary batch has prepared the compiled step (True), or compiled passes (False)
        self.ready: set[bool] = set()
        self.plans: dict[bool, PassPlan] = {}  # arguments of the compiled code, likewise
        self.n_hooks = 0  # next id of a hook in torch at the last check
        self.refused: list[str] = []  # permanent reasons why nothing is compiled
        self.step_refused: list[str] = []  # permanent reasons why passes alone are compiled
        self.waiting = ''  # reason why the last step was ordinary, and the next one may be compiled
        self.failure = ''  # reason why nothing is compiled any more
        self.codes: dict[Any, Code] = {}  # compiled code by kind of plan and shapes of the batch
        self.n_compilations = 0
        if not (
            hasattr(dynamo.config, 'trace_autograd_ops')
            and hasattr(dynamo.eval_frame, 'set_eval_frame')
        ):
            self.failure = f'torch {torch.__version__} cannot compile a whole step'

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeStep:
        return WholeStep(memo.get(id(self.learn), self.learn), self.options)

    @property
    def traced(self) -> TracedBatch:
        "The batch that is compiled."
        return self.learn.seams.traced or self.default

    def seams(self, learn: Learner) -> dict[str, Any] | None:
        "Return the training on a batch, or the passes of a microbatch."
        if learn.microbatch:
            return {'passes': self.run_passes}
        return {'batch': self, 'passes': self.run_passes}

    def __call__(self, learn: Learner) -> None:
        "Train on the current batch."
        if self.ready:
            self.traced.begin(learn)
        plan = self._find_plan()
        code = None if plan is None else self._find_code(plan)
        if plan is None or code is None:
            self._run_ordinary(self.traced.train, then=self._prepare)
        elif plan.takes_step:
            self._run(plan, code, self.traced.train)
        else:
            self.traced.take_step(learn, partial(self._run, plan, code))

    def run_passes(self, learn: Learner) -> None:
        "Run forward and backward of the current batch or microbatch."
        ordinary = self.traced.run_passes
        if self.ready:
            self.traced.begin(learn)
        plan = self._find_plan(takes_step=False)
        code = None if plan is None else self._find_code(plan)
        if plan is None or code is None:
            self._run_ordinary(ordinary, then=partial(self._prepare, takes_step=False))
        else:
            self._run(plan, code, ordinary)

    def _run_ordinary(self, ordinary: Callable[[Learner], None], then: Callable[[], None]) -> None:
        "Run the ordinary step or passes, and then another function unless they failed."
        try:
            ordinary(self.learn)
        except StepPutOff:
            then()
            raise
        then()

    # -- checks ------------------------------------------------------------------------------------

    def _prepare(self, takes_step: bool | None = None) -> None:
        "After an ordinary batch, check whether the next one can be compiled."
        if self.failure or self._find_blocks() or (self.refused and self.learn.iter):
            return  # permanent reasons may change until the next epoch, which checks again
        if (self._takes_step() if takes_step is None else takes_step) in self.ready:
            return
        self._find_refusals()
        if self.refused:
            return
        takes_step = self._takes_step() if takes_step is None else takes_step
        if self.learn.opt.n_steps or not takes_step:  # else the optimizer has no state yet
            self.ready.add(takes_step)

    def _find_refusals(self) -> None:
        "Run the checks that are too slow for each batch."
        self.n_hooks = RemovableHandle.next_id
        self.refused = [*self.traced.find_refusals(self.learn), *find_refusals(self.learn)]
        self.step_refused = [
            *self.traced.find_step_refusals(self.learn),
            *find_step_refusals(self.learn),
        ]

    def _find_plan(self, takes_step: bool | None = None) -> PassPlan | None:
        "Return the plan of the current batch, up to date; None if the batch needs the ordinary step."
        learn = self.learn
        if self.failure or not self.ready or self._find_blocks():
            return None
        # before each epoch, and after a hook was registered, run the slow checks too
        starts = not learn.iter
        if starts or self.n_hooks != RemovableHandle.next_id:
            self._find_refusals()
            if self.refused:
                self.plans = {}
                self.ready = set()
                return None
        if starts:
            self._find_handlers(again=True)
        takes_step = self._takes_step() if takes_step is None else takes_step
        if takes_step not in self.ready:
            return None
        plan = self.plans.get(takes_step)
        if plan is not None and not plan.holds(learn):
            del self.plans[takes_step]
            self.ready.remove(takes_step)
            return None
        if plan is None or starts or not self._is_current(plan):
            return self._make_plan(takes_step)
        return plan

    def _is_current(self, plan: PassPlan) -> bool:
        "Return True if the numbers and the parts of a plan are current; read the states of the parts."
        has_parts = plan.parts == self._list_parts(plan.takes_step)
        return plan.is_current() and has_parts and plan.read_parts()

    def _make_plan(self, takes_step: bool) -> PassPlan | None:
        "Return new arguments of the compiled code; None while a callback has no state for it."
        parts = self._list_parts(takes_step)
        states = []
        self.waiting = ''
        for part in parts:
            state = part.read_state()
            if state is None:
                self.waiting = f'{type(part.cb).__name__} asks for the ordinary step'
                return None
            states.append(state)
        cls = StepPlan if takes_step else PassPlan
        plan = self.plans[takes_step] = cls(self.learn, parts, states, self.plans.get(takes_step))
        return plan

    def _find_handlers(self, again: bool = False) -> Handlers:
        "Return the handlers inside the step."
        table: dict[str, Any] = self.learn.parts.callbacks.plain_tables[True]
        # the table drops this entry, like all others, when callbacks change
        handlers = None if again else table.get('whole step')
        if handlers is None:
            handlers = table['whole step'] = Handlers(self.learn)
        return handlers

    def _list_parts(self, takes_step: bool) -> list[Part]:
        return self._find_handlers().list_parts(takes_step)

    def _find_blocks(self) -> list[str]:
        "Return the temporary conditions that need the ordinary step, such as handlers."
        learn = self.learn
        found = [reason for reason, switch in self._find_handlers().blocks if switch]
        if learn.run.batch_device is not None and is_autocast_enabled(learn.run.batch_device.type):
            found.append('autocast is active')
        return found

    def _find_step_blocks(self) -> list[str]:
        "Return the conditions that need the optimizer's ordinary step."
        blocks = self._find_handlers().step_blocks
        return [*(reason for reason, switch in blocks if switch), *self.step_refused]

    def _takes_step(self) -> bool:
        "Return True if the optimizer's step can be compiled, too."
        return not self._find_step_blocks()

    def _find_code(self, plan: PassPlan) -> Code | None:
        "Return the code for the shapes of the batch; None for shapes that are not compiled yet."
        learn = self.learn
        if self.options.get('dynamic'):
            shapes: Any = 'all'
        else:
            batch = (*learn.xb, *learn.yb)
            shapes = tuple([t.shape if type(t) is Tensor else describe(t) for t in batch])
        code = self.codes.get((plan.takes_step, shapes))
        if code is None:
            if len(self.codes) >= MAX_SHAPES:
                return None
            is_first = not any(takes_step == plan.takes_step for takes_step, _ in self.codes)
            code = self.codes[plan.takes_step, shapes] = Code(is_first)
        code.n_batches += 1
        return code if code.n_batches > 1 else None

    # -- explanation -------------------------------------------------------------------------------

    def explain(self) -> str:
        "Return a sentence that names the step in use, and the reason."
        # a class with its own training batch may never request a compiled step
        reasons = [self.failure] if self.failure else list(self.traced.find_refusals(self.learn))
        reasons = reasons or [*self._find_blocks(), *self.refused]
        if not reasons and self.waiting and not self.n_compilations:
            reasons = [self.waiting]
        if reasons:
            return f'The ordinary step runs: {"; ".join(reasons)}.{advise_fused(self.learn)}'
        step_blocks = self._find_step_blocks()
        if (not step_blocks) not in self.ready:
            return 'The ordinary step runs: compiling comes after the next training batch.'
        return self._explain_compiled(step_blocks)

    def _explain_compiled(self, step_blocks: list[str]) -> str:
        "Return sentences about the compiled code."
        is_dynamic = self.options.get('dynamic')
        shapes = [
            list(map(describe_shape, key))
            for (takes_step, key), code in self.codes.items()
            if code.compiled and takes_step is not bool(step_blocks) and not is_dynamic
        ]
        where = f' for batches of the shapes {shapes}' if shapes else ''
        n = self.n_compilations
        times = 'once' if n == 1 else f'{n} times'
        if step_blocks:
            text = (
                f'Forward and backward run compiled{where}. They were compiled {times}. '
                f"The optimizer's step is the ordinary one: {'; '.join(step_blocks)}."
            )
        else:
            text = f'The compiled step runs{where}. It was compiled {times}.'
        if self.waiting:
            text += f' The last step was ordinary: {self.waiting}.'
        if len(self.codes) == MAX_SHAPES:
            text += (
                f' The ordinary step runs for shapes beyond the first {MAX_SHAPES} '
                '(`dynamic=True` compiles for all).'
            )
        return text + (advise_fused(self.learn) if step_blocks else '')

    # -- execution ---------------------------------------------------------------------------------

    def _run(self, plan: PassPlan, code: Code, ordinary: Callable[[Learner], None]) -> bool:
        """Run the compiled code on the current batch; return False if the ordinary function ran instead.

        It runs after an error of the compiled code, and after a step that a callback has refused.
        """
        learn = self.learn
        generator = get_generator(plan.device) if plan.may_undo else None
        before: Any = None if generator is None else generator.get_state()
        plan.write_numbers()
        inputs = plan.list_inputs()
        model, loss_func, *batch = self.traced.list_arguments(learn)
        args = (model, loss_func, *inputs, *batch)
        error = ''
        try:
            out = self._call(code, plan, args)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            error = describe_error(e)
        if error:
            # raises an error of the model or the data; otherwise compiling is at fault
            self._run_ordinary(ordinary, then=partial(self._give_up, error))
            return False
        *results, losses, found, grads = out
        if generator is not None and not all(f['accept'] for f in found if 'accept' in f):
            # the compiled step has undone itself: the callback that refused it acts in an ordinary one
            generator.set_state(before)
            ordinary(learn)
            return False
        learn.pred, learn.loss_grad, learn.loss = results
        if losses:
            total_loss(learn, losses)
        plan.end_step(grads)
        for part, values in zip(plan.parts, found, strict=True):
            if part.finish is not None:
                part.finish(values)
        return True

    def _call(self, code: Code, plan: PassPlan, args: tuple[Any, ...]) -> Outputs:
        "Call the compiled code, and return its results; compile it first for new arguments."
        on_gpu = plan.device.type == 'cuda'
        out = self._evaluate(code, args)
        if out is None:
            out = self._compile(code, args, on_gpu)
        if on_gpu:
            return map_tensors(out, Tensor.clone)  # the next replay of the graph overwrites these
        separate(out[-1], code.shared)
        return out

    def _evaluate(self, code: Code, args: tuple[Any, ...]) -> Any:
        """Call the compiled code; return None if there is none for the arguments.

        The function that torch.compile returns looks up settings at every call. Here only the frame
        evaluator is active, which runs compiled code and compiles nothing. It checks the guards as
        usual; if they fail, the Python code of `whole_step` runs, which raises `NotCompiled` at its
        start.
        """
        if code.compiled is None:
            return None
        set_evaluator = self.dynamo.eval_frame.set_eval_frame
        before = set_evaluator(False)
        try:
            out = code.function(*args)
        except NotCompiled:
            return None
        finally:
            set_evaluator(before)
        code.n_repeats = 0
        return out

    def _compile(self, code: Code, args: tuple[Any, ...], on_gpu: bool) -> Any:
        "Compile the code for new arguments, and call it."
        if code.compiled is None:
            code.compiled = torch.compile(code.function, **self._list_options(on_gpu))
        elif code.n_repeats == MAX_REPEATS or code.n_variants == self.dynamo.config.recompile_limit:
            raise NotCompiled(f'compiled too often, since this changes: {find_change(code, args)}')
        else:
            code.n_repeats += 1
        code.n_variants += 1
        self.n_compilations += 1
        with self.dynamo.config.patch(trace_autograd_ops=True):
            out = code.compiled(*args)
        code.shared |= find_shared(out[-1])
        return out

    def _list_options(self, on_gpu: bool) -> dict[str, Any]:
        # each shape has its own code, so that torch need not guess which sizes change
        options = {'fullgraph': True, 'dynamic': False, **self.options}
        if options.get('backend', 'inductor') == 'inductor' and 'mode' not in options:
            chosen = {
                'fallback_random': True,
                'triton.cudagraphs': on_gpu,
                'cpp_wrapper': not on_gpu,
            }
            options['options'] = chosen | (options.get('options') or {})
        return options

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self.ready = set()
        self.plans = {}
        self.codes = {}


class Code:
    "Compiled code of the step for batches of one shape."

    def __init__(self, is_first: bool) -> None:
        self.function = copy_function(whole_step)
        self.compiled: Any = None  # result of torch.compile, made before the first call
        self.shared: set[int] = set()  # indices of gradients in its result that share memory
        self.n_variants = 0  # number of compilations
        self.n_repeats = 0  # number of compilations since the last call that needed none
        # the first shape is compiled at once, others when they come again
        self.n_batches = 1 if is_first else 0


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


def find_change(code: Code, args: tuple[Any, ...]) -> str:
    "Return the condition of the last compilation that no longer holds, in torch's words."
    try:
        with torch.compiler.set_stance('fail_on_recompile'):
            code.compiled(*args)
    except Exception as e:
        # lines such as '- 0/3: model.n_calls == 4  # its source line (HINT: ...)'
        lines = [line.strip() for line in str(e).splitlines()]
        found = [line.partition(': ')[2] for line in lines if line.startswith('- ')]
        return found[0].partition(' (HINT')[0] if found else lines[0]
    return 'unknown'


def describe_shape(shape: Any) -> Any:
    "Return the shape of a tensor as a tuple, and the description of another object unchanged."
    return tuple(shape) if isinstance(shape, torch.Size) else shape


def get_generator(device: torch.device) -> torch.Generator:
    "Return the default random generator of a device."
    if device.type == 'cuda':
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def find_shared(grads: list[Tensor | None]) -> set[int]:
    """Return the indices of gradients that share memory with earlier ones, or within themselves.

    >>> a = torch.ones(2)
    >>> find_shared([a, None, a[:1], torch.ones(2), torch.ones(1).expand(3)])
    {2, 4}
    """
    seen: set[int] = set()
    shared = set()
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        place = grad.untyped_storage().data_ptr()
        repeats = any(
            n > 1 and step == 0 for n, step in zip(grad.shape, grad.stride(), strict=True)
        )
        if place in seen or repeats:
            shared.add(i)
        seen.add(place)
    return shared


def separate(grads: list[Tensor | None], shared: set[int]) -> None:
    "Replace gradients that share memory by copies, since optimizers and clipping change gradients in place."
    for i in shared:
        grad = grads[i]
        if grad is not None:
            grads[i] = grad.clone(memory_format=torch.contiguous_format)


def advise_fused(learn: Learner) -> str:
    "Return a sentence about optimizers that loop over the tensors in Python on a CPU, or an empty string."
    for opt in learn.opt.optimizers.values() if learn.opt is not None else ():
        group = opt.param_groups[0]
        loops = 'fused' in group and not group['fused'] and not group.get('foreach')
        if loops and all(p.device.type == 'cpu' for p in group['params']):
            name = type(opt).__name__
            is_class = getattr(learn.opt_func, 'func', learn.opt_func) is type(opt)
            fix = f'opt_func=partial(torch.optim.{name}, fused=True)' if is_class else 'fused=True'
            return (
                f' {name} updates one tensor after the other on a CPU: `{fix}` updates all at once.'
            )
    return ''


def describe_error(e: Exception) -> str:
    "Return the type of an exception and the start of its message, on one line."
    return f'{type(e).__name__}: {" ".join(str(e).split())[:300]}'
