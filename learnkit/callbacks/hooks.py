# SPDX-License-Identifier: Apache-2.0
"""Hooks on modules: record inputs and outputs in a with-block or during a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from fastcore.foundation import L
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from typing_extensions import override

from learnkit.core.batch import tensors_in, to_detach
from learnkit.core.errors import OptionError, TimeError, did_you_mean
from learnkit.core.model import has_weights
from learnkit.core.time import Time, as_time
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_list

HookFunc = Callable[[nn.Module, Any, Any], Any]  # f(module, inputs, output)


class Hook:
    """Call `hook_func(module, inputs, output)` after each forward pass of a module; store the result.

    `stored` holds the last result. `inputs` is a tuple: positional inputs, then keyword inputs.
    With `is_forward=False` the function is called in the backward pass as `hook_func(module, (),
    gradients)`, with a tuple of the gradients of the outputs (None for an output without gradient).
    Gradients of the inputs are not passed, so that modules with in-place operations can be hooked
    too; only a view that an in-place operation changes has no gradient. Leaving the with-block, or
    `remove()`, removes the hook.

    Tensors stored unchanged share memory with the model: a later in-place activation changes them
    too. A module inside compiled code does not call its hooks; under a Learner, `HookCallback` runs
    the model uncompiled.

    >>> import torch
    >>> layer = nn.Linear(3, 2)
    >>> with Hook(layer, lambda m, i, o: (i[0].shape, o.shape)) as h: _ = layer(torch.zeros(5, 3))
    >>> h.stored, h.hooked
    ((torch.Size([5, 3]), torch.Size([5, 2])), False)
    """

    def __init__(
        self,
        m: nn.Module,
        hook_func: HookFunc,
        is_forward: bool = True,  # whether to hook the forward pass; False: the backward pass
        detach: bool = True,  # whether to detach tensors from their graph first
        cpu: bool = False,  # with `detach`: whether to copy tensors to the CPU, synchronously
        gather: bool = False,  # accepted as in fastai, and ignored
    ) -> None:
        self.hook_func = hook_func
        self.detach = detach
        self.cpu = cpu
        self.stored: Any = None
        self.removed = False
        hook = self._forward if is_forward else self._register_backward
        self.hook = m.register_forward_hook(hook, with_kwargs=True)

    @property
    def hooked(self) -> bool:
        "Whether the hook is still on its module."
        return not self.removed

    def _forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self.hook_fn(module, (*args, *kwargs.values()), output)

    def _register_backward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        def backward(grads: Sequence[Tensor | None]) -> None:
            if self.hooked:
                self.hook_fn(module, (), tuple(grads))

        outputs = [t for t in tensors_in(output) if t.requires_grad]
        if outputs:
            register_multi_grad_hook(outputs, backward)

    def hook_fn(self, module: nn.Module, input: Any, output: Any) -> None:
        "Detach the tensors, call `hook_func` and store the result."
        if self.detach:
            input = to_detach(input, cpu=self.cpu)
            output = to_detach(output, cpu=self.cpu)
        self.stored = self.hook_func(module, input, output)

    def remove(self) -> None:
        "Remove the hook from its module; the stored result stays."
        self.hook.remove()
        self.removed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


class Hooks:
    """Register a `Hook` on each of several modules; `stored` lists the results of all hooks.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> with Hooks(model, lambda m, i, o: o.shape) as hooks: _ = model(torch.zeros(5, 3))
    >>> len(hooks), hooks.stored
    (2, [torch.Size([5, 2]), torch.Size([5, 2])])
    """

    def __init__(
        self,
        ms: Iterable[nn.Module],
        hook_func: HookFunc,
        is_forward: bool = True,  # this and the following: as in `Hook`
        detach: bool = True,
        cpu: bool = False,
    ) -> None:
        self.hooks = [Hook(m, hook_func, is_forward, detach, cpu) for m in ms]

    @property
    def stored(self) -> L:
        "Stored result of each hook."
        return L(h.stored for h in self)

    def remove(self) -> None:
        "Remove all hooks."
        for h in self.hooks:
            h.remove()

    def __getitem__(self, i: int) -> Hook:
        return self.hooks[i]

    def __len__(self) -> int:
        return len(self.hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def _return_output(m: nn.Module, inputs: Any, output: Any) -> Any:
    return output


def hook_output(
    module: nn.Module,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,  # whether to store the gradients of the output instead, as a tuple
) -> Hook:
    """Store a module's output.

    >>> import torch
    >>> layer = nn.Linear(3, 2)
    >>> with hook_output(layer) as h: out = layer(torch.zeros(1, 3))
    >>> torch.equal(h.stored, out), h.stored.requires_grad
    (True, False)
    """
    return Hook(module, _return_output, detach=detach, cpu=cpu, is_forward=not grad)


def hook_outputs(
    modules: Iterable[nn.Module],
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,  # whether to store the gradients of the outputs instead
) -> Hooks:
    "Store the output of each module."
    return Hooks(modules, _return_output, detach=detach, cpu=cpu, is_forward=not grad)


# ------------------------------------------------------------------------------------------ modules


def has_params(m: nn.Module) -> bool:
    "Return True if a module has a parameter."
    return has_weights(m)


def flatten_model(m: nn.Module) -> list[nn.Module]:
    """Return the layers of a model in order of definition: modules without children or with own parameters.

    >>> flatten_model(nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.ReLU()))
    [Linear(in_features=3, out_features=2, bias=True), ReLU()]
    """
    return list(named_layers(m).values())


def named_layers(m: nn.Module) -> dict[str, nn.Module]:
    "Return the layers of a model by their dotted names."
    return {name: o for name, o in m.named_modules() if has_own_params(o) or not list(o.children())}


def has_own_params(m: nn.Module) -> bool:
    "Return True if a module has parameters outside of its children."
    return any(True for _ in m.parameters(recurse=False))


def unwrap_compiled(model: nn.Module) -> nn.Module:
    "Return the model inside the result of `torch.compile(model)`, or the model itself."
    inner: nn.Module = getattr(model, '_orig_mod', model)
    return inner


@contextmanager
def run_uncompiled(model: nn.Module) -> Iterator[None]:
    "Run a model without its compiled code, which ignores later changes of its hooks."
    modules = list(model.modules())
    calls = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    wrappers = [(m, m.forward, unwrap_compiled(m)) for m in modules if unwrap_compiled(m) is not m]
    try:
        for m, _ in calls:
            m._compiled_call_impl = None
        for m, _, inner in wrappers:
            setattr(m, 'forward', inner.__call__)  # noqa: B010  # mypy rejects the assignment
        yield
    finally:
        for m, call in calls:
            m._compiled_call_impl = call
        for m, forward, _ in wrappers:
            setattr(m, 'forward', forward)  # noqa: B010


# ----------------------------------------------------------------------------------------- callback


class HookCallback(Callback):
    """Hook modules during a fit: override `hook(self, m, inp, out)`, or pass a function as `hook=`.

    `self.hooks.stored` holds the last result of each module, in the order of `self.modules`;
    `layer_names` holds the names of the modules. `every` hooks the training batches 0, n, 2n, ... of
    each fit. Without `every` all batches are hooked, also in evaluation: `self.training` is False
    there.

    The hooks are removed however the run ends: by an exception, Ctrl-C, a Cancel, or by removal of
    the callback. `remove_end=False` keeps them after a run without error. While they are
    registered, a compiled model runs uncompiled.

    Raises `OptionError` for unknown names of modules (before training), and `TimeError` for an
    `every` that is not a number of batches. Checkpointed: nothing.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=HookCallback(hook=lambda m, i, o: o.shape, every='5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> learn.hook.layer_names, learn.hook.hooks.stored
    ([''], [torch.Size([16, 1])])
    """

    hooks: Hooks | None = None
    _registration: ExitStack | None = None  # removes the hooks when closed

    def __init__(
        self,
        modules: Any = None,  # modules or their names, one or several; None: all with parameters
        every: int
        | str
        | Time
        | None = None,  # number of batches, such as '100ba'; None: 1, and evaluation
        remove_end: bool = True,  # whether to remove the hooks after a fit without error
        is_forward: bool = True,  # whether to hook the forward pass; False: the backward pass
        detach: bool = True,  # whether to detach tensors from their graph
        cpu: bool = True,  # with `detach`: whether to copy tensors to the CPU, synchronously
        include_paramless: bool = False,  # without `modules`: whether to hook all other layers too
        hook: HookFunc | None = None,  # f(module, inputs, output); None: the method of a subclass
    ) -> None:
        self._requested = None if modules is None else _list_modules(modules)
        self.every = None if every is None else as_time(every, 'ba')
        if self.every is not None and self.every.unit != 'ba':
            raise TimeError(f"every={every!r}: pass a number of batches, such as '100ba'.")
        self.remove_end = remove_end
        self.is_forward = is_forward
        self.detach = detach
        self.cpu = cpu
        self.include_paramless = include_paramless
        self.modules: list[nn.Module] = []  # hooked modules
        self.layer_names: list[str] = []  # names of the hooked modules
        if hook is not None:
            self.__dict__['hook'] = hook

    def hook(self, m: nn.Module, inp: Any, out: Any) -> Any:
        "Return the result to store for a module's inputs (a tuple) and output."

    def before_fit(self) -> None:
        "Find the modules; without `every`, hook them."
        if self.learn.run.depth <= 1:  # the model may be another one than in the last fit
            self._remove()
            self._find()
        if self.every is None and self._registration is None:
            self._register()

    def before_batch(self) -> None:
        "Hook this batch if it is due."
        learn = self.learn
        if self.every and not (learn.training and learn.train_iter % self.every.value == 0):
            self._remove()
        elif self._registration is None:
            self._register()

    def after_batch(self) -> None:
        "With `every`, remove the hooks."
        if self.every is not None and self.learn.training:
            self._remove()

    def cleanup(self) -> None:
        "Remove the hooks; after an error also drop the stored results."
        if self.remove_end or self.learn.error is not None:
            self._remove()
        if self.learn.error is not None:
            self.hooks = None

    def close(self) -> None:
        "Remove the hooks."
        self._remove()

    def _find(self) -> None:
        model = unwrap_compiled(self.learn.model)
        if self._requested is not None:
            found = [_find_module(model, o) for o in self._requested]
        else:
            found = [
                (name, m)
                for name, m in named_layers(model).items()
                if self.include_paramless or has_params(m)
            ]
        self.layer_names = [name for name, _ in found]
        self.modules = [m for _, m in found]

    def _register(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(run_uncompiled(self.learn.model))
            self.hooks = stack.enter_context(
                Hooks(self.modules, self.hook, self.is_forward, self.detach, self.cpu)
            )
            self._registration = stack.pop_all()

    def _remove(self) -> None:
        if self._registration is None:
            return
        registration = self._registration
        self._registration = None
        registration.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return nothing: a resumed fit registers its hooks again."
        return {}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore nothing."


def _list_modules(modules: Any) -> list[Any]:
    "Return modules and names as a list; replace a container of modules by its modules."
    if isinstance(modules, (nn.Sequential, nn.ModuleList)):
        return list(modules)
    return as_list(modules)


def _find_module(model: nn.Module, wanted: nn.Module | str) -> tuple[str, nn.Module]:
    "Return name and module for a module or its name; a module of another model is named by class."
    named = dict(model.named_modules(remove_duplicate=False))
    if isinstance(wanted, nn.Module):
        names = (name for name, m in named.items() if m is wanted)
        return next(names, type(wanted).__name__), wanted
    if wanted in named:
        return wanted, named[wanted]
    raise OptionError(
        f'{type(model).__name__} has no module named {wanted!r}.{did_you_mean(wanted, named)} '
        '`learn.summary()` lists them.'
    )
