"""Hooks: look at what modules take in and give out, in a with-block or all through a fit, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any, Self

import torch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from learnkit.core.batch import map_tensors, to_detach
from learnkit.core.errors import OptionError, TimeError
from learnkit.core.time import Time, Timestamp, as_time, crossings
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import as_list

__all__ = [
    'Hook',
    'hook_output',
    'Hooks',
    'hook_outputs',
    'HookCallback',
    'has_params',
    'flatten_model',
]

HookFunc = Callable[[nn.Module, Any, Any], Any]  # f(module, inputs, output)


class Hook:
    """Call `hook_func(module, inputs, output)` after each forward pass of a module; keep what it returns in `stored`.

    `inputs` is a tuple: those given by position, then those given by name. With `is_forward=False` it is called in the
    backward pass as `hook_func(module, (), gradients)`, with a tuple of the gradients of the outputs (None where there
    is none); those of the inputs are not given, so that modules that work in place can be hooked too (only a view that
    is changed in place has no gradient to show). Leaving the with-block, or `remove()`, takes the hook off.

    What is stored unchanged shares its memory with the model: an in-place activation after it changes it too. A module
    inside compiled code does not call its hooks; under a Learner, `HookCallback` sees to that.

    Raises `OptionError` for what is no module.

    >>> layer = nn.Linear(3, 2)
    >>> with Hook(layer, lambda m, i, o: (i[0].shape, o.shape)) as h: _ = layer(torch.zeros(5, 3))
    >>> h.stored, h.hooked
    ((torch.Size([5, 3]), torch.Size([5, 2])), False)
    """

    def __init__(
        self,
        m: nn.Module,
        hook_func: HookFunc,
        is_forward: bool = True,  # the forward pass, or the backward one
        detach: bool = True,  # detach tensors from their graph first
        cpu: bool = False,  # with `detach`: also move them to the CPU, which waits for the device
        gather: bool = False,  # for fastai's code of one process; an error in a process group
    ) -> None:
        if not isinstance(m, nn.Module):
            raise OptionError(f'A hook is put on an nn.Module, not on {m!r}.')
        if gather and torch.distributed.is_available() and torch.distributed.is_initialized():
            raise OptionError(
                'gather=True: hooks do not gather over processes. Gather `hook.stored` afterwards.'
            )
        self.hook_func, self.detach, self.cpu = hook_func, detach, cpu
        self.stored: Any = None
        self.removed = False
        self.hook = m.register_forward_hook(
            self._forward if is_forward else self._await_backward, with_kwargs=True
        )

    @property
    def hooked(self) -> bool:
        "Whether the hook is still on its module."
        return not self.removed

    def _forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self.hook_fn(module, (*args, *kwargs.values()), output)

    def _await_backward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        def backward(grads: Sequence[Tensor | None]) -> None:
            if self.hooked:
                self.hook_fn(module, (), tuple(grads))

        if outputs := [t for t in tensors_in(output) if t.requires_grad]:
            register_multi_grad_hook(outputs, backward)

    def hook_fn(self, module: nn.Module, input: Any, output: Any) -> None:
        "Detach, call `hook_func` and store what it returns."
        if self.detach:
            input, output = to_detach(input, cpu=self.cpu), to_detach(output, cpu=self.cpu)
        self.stored = self.hook_func(module, input, output)

    def remove(self) -> None:
        "Take the hook off its module; what is stored stays."
        self.hook.remove()
        self.removed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


class Hooks:
    """Put a `Hook` on each of several modules. They are read like a list; `stored` has what each one stored.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> with Hooks(model, lambda m, i, o: o.shape) as hooks: _ = model(torch.zeros(5, 3))
    >>> len(hooks), hooks.stored
    (2, [torch.Size([5, 2]), torch.Size([5, 2])])
    """

    def __init__(
        self,
        ms: Iterable[nn.Module],
        hook_func: HookFunc,
        is_forward: bool = True,  # these three as for `Hook`
        detach: bool = True,
        cpu: bool = False,
    ) -> None:
        self.hooks: list[Hook] = []
        try:
            for m in ms:
                self.hooks.append(Hook(m, hook_func, is_forward, detach, cpu))
        except BaseException:
            self.remove()
            raise

    @property
    def stored(self) -> L:
        "What each hook stored."
        return L(h.stored for h in self)

    def remove(self) -> None:
        "Take all the hooks off."
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


def tensors_in(o: Any) -> list[Tensor]:
    "Return the tensors in a nested structure, a module's output or a batch, in order."
    found: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_tensors(o, keep)
    return found


def _output(m: nn.Module, inputs: Any, output: Any) -> Any:
    return output


def hook_output(
    module: nn.Module,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,  # the gradient of the output instead, a tuple
) -> Hook:
    """Store a module's output.

    >>> layer = nn.Linear(3, 2)
    >>> with hook_output(layer) as h: out = layer(torch.zeros(1, 3))
    >>> torch.equal(h.stored, out), h.stored.requires_grad
    (True, False)
    """
    return Hook(module, _output, detach=detach, cpu=cpu, is_forward=not grad)


def hook_outputs(
    modules: Iterable[nn.Module],
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,  # the gradients of the outputs instead
) -> Hooks:
    "Store the output of each module."
    return Hooks(modules, _output, detach=detach, cpu=cpu, is_forward=not grad)


# ------------------------------------------------------------------------------------------ modules


def has_params(m: nn.Module) -> bool:
    "Tell whether a module has a parameter."
    return next(m.parameters(), None) is not None


def flatten_model(m: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, in order of definition: modules without children, or with parameters of their own.

    >>> flatten_model(nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.ReLU()))
    [Linear(in_features=3, out_features=2, bias=True), ReLU()]
    """
    return list(named_layers(m).values())


def named_layers(m: nn.Module) -> dict[str, nn.Module]:
    "Return the layers of a model by their dotted names."
    return {
        name: o
        for name, o in m.named_modules()
        if not any(True for _ in o.children()) or any(True for _ in o.parameters(recurse=False))
    }


def as_written(model: nn.Module) -> nn.Module:
    "Return the model inside what `torch.compile(model)` returned, or the model itself."
    inner = model._modules.get('_orig_mod')
    return model if inner is None else inner


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    "Run a model as it is written: compiled code skips hooks that came later, and keeps those that are gone."
    modules = list(model.modules())
    calls = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    wrappers = [(m, m.forward, as_written(m)) for m in modules if as_written(m) is not m]
    try:
        for m, _ in calls:
            m._compiled_call_impl = None
        for m, _, inner in wrappers:
            setattr(m, 'forward', inner.__call__)  # noqa: B010  # mypy: it is no method here
        yield
    finally:
        for m, call in calls:
            m._compiled_call_impl = call
        for m, forward, _ in wrappers:
            setattr(m, 'forward', forward)  # noqa: B010


# ----------------------------------------------------------------------------------------- callback


class HookCallback(Callback):
    """Keep hooks on modules during a fit: override `hook(self, m, inp, out)`, or give a function as `hook=`.

    What it returned last is in `self.hooks.stored`, module by module, in the order of `self.modules`; `layer_names` has
    their names. A number in `every` hooks the training batches 0, n, 2n, ... of each fit; a time of another unit the
    first batch of the fit and the first after each multiple. Without `every` hooks are there all the time, in
    evaluation too: `self.training` tells.

    However the run ends, by an exception, Ctrl-C, a Cancel or by removal of the callback, the hooks are gone after it;
    `remove_end=False` keeps them after a run that ended well. While they are there, a compiled model runs uncompiled.

    Raises `OptionError` for names that the model does not have (before training), and `TimeError` for a bad `every`.
    Checkpointed: when hooks were last due; not what they have stored.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=HookCallback(hook=lambda m, i, o: o.shape, every='5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> learn.hook.layer_names, learn.hook.hooks.stored
    ([''], [torch.Size([16, 1])])
    """

    hooks: Hooks | None = None
    _on: ExitStack | None = None  # what takes the hooks off

    def __init__(
        self,
        modules: Any = None,  # modules or their names, one or several; None: all with parameters
        every: int | str | Time | None = None,  # interval of hooked training batches; None: all
        remove_end: bool = True,  # take the hooks off after a fit that ended well
        is_forward: bool = True,  # the forward pass, or the backward one
        detach: bool = True,  # detach tensors from their graph
        cpu: bool = True,  # with `detach`: move them to the CPU, which waits for the device
        include_paramless: bool = False,  # without `modules`: also layers without parameters
        hook: HookFunc | None = None,  # f(module, inputs, output); None: the method of a subclass
    ) -> None:
        self._wanted = None if modules is None else _listed_modules(modules)
        self.every = None if every is None else as_time(every, 'ba')
        if self.every and self.every.unit == 'tok':
            raise TimeError(f'every={every!r}: tokens are not counted.')
        if hook is not None and not callable(hook):
            raise OptionError(f'hook={hook!r}: give f(module, inputs, output).')
        self.remove_end, self.is_forward, self.detach, self.cpu = (
            remove_end,
            is_forward,
            detach,
            cpu,
        )
        self.include_paramless = include_paramless
        self.modules: list[nn.Module] = []  # those that are hooked, and their names
        self.layer_names: list[str] = []
        self.hooks, self._on = None, None
        self._before: Timestamp | None = None  # the last look at the time
        if hook is not None:
            self.__dict__['hook'] = hook

    def hook(self, m: nn.Module, inp: Any, out: Any) -> Any:
        "Look at a module's inputs (a tuple) and output; what is returned is stored."

    def before_fit(self) -> None:
        "Find the modules; without `every`, hook them."
        if self.learn.run.depth <= 1:  # the model may be another one than in the last fit
            self._remove()
            self._find()
        if self.every is None and self._on is None:
            self._register()

    def before_batch(self) -> None:
        "Hook this batch, when it is due."
        if self.every is not None and not (self.learn.training and self._is_due()):
            self._remove()
        elif self._on is None:
            self._register()

    def after_batch(self) -> None:
        "With `every`, take the hooks off."
        if self.every is not None and self.learn.training:
            self._remove()

    def after_fit(self) -> None:
        "Take the hooks off, unless this was an evaluation inside a fit."
        if self.remove_end and self.learn.run.depth <= 1:
            self._remove()

    def cleanup(self) -> None:
        "Take the hooks off; after a failure also forget what they stored."
        if self.remove_end or self.learn.error is not None:
            self._remove()
        if self.learn.error is not None:
            self.hooks = None

    def close(self) -> None:
        "Take the hooks off for good."
        self._remove()

    def __setattr__(self, name: str, value: object) -> None:
        # no event tells that the callback is switched off or leaves its learner
        if (name == 'run' and not value) or (name == 'learn' and value is None):
            self._remove()
        super().__setattr__(name, value)

    def _is_due(self) -> bool:
        every, n = self.every, self.learn.train_iter
        assert every is not None  # the caller has looked
        if every.unit == 'ba':
            return bool(n % every.value == 0)
        before, self._before = self._before, self.learn.time
        return not n or before is None or crossings(before, self._before, every) > 0

    def _find(self) -> None:
        model = as_written(self.learn.model)
        if self._wanted is not None:
            found = [_named_module(model, o) for o in self._wanted]
        else:
            found = [
                (name, m)
                for name, m in named_layers(model).items()
                if self.include_paramless or has_params(m)
            ]
        self.layer_names, self.modules = [name for name, _ in found], [m for _, m in found]

    def _register(self) -> None:
        if not self.modules:
            self._find()  # it came in the middle of a fit
        with ExitStack() as stack:
            stack.enter_context(uncompiled(self.learn.model))
            self.hooks = stack.enter_context(
                Hooks(self.modules, self.hook, self.is_forward, self.detach, self.cpu)
            )
            self._on = stack.pop_all()

    def _remove(self) -> None:
        if self._on is None:
            return
        on, self._on = self._on, None
        on.close()

    def state_dict(self) -> dict[str, Any] | None:
        "Return when hooks were last due, where that is not told by the number of the batch."
        return None if self._before is None else {'before': self._before.state_dict()}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from there."
        self._before = Timestamp.from_state_dict(sd['before'])


def _listed_modules(modules: Any) -> list[Any]:
    "Return modules and names as a list; a container of modules stands for what it holds."
    if isinstance(modules, (nn.Sequential, nn.ModuleList)):
        return list(modules)
    found = as_list(modules)
    for o in found:
        if not isinstance(o, (nn.Module, str)):
            raise OptionError(f'modules: {o!r} is no nn.Module and no name of one.')
    return found


def _named_module(model: nn.Module, wanted: nn.Module | str) -> tuple[str, nn.Module]:
    "Find a module by its name, or its name; one of another model goes by its class."
    named = dict(model.named_modules(remove_duplicate=False))
    if isinstance(wanted, nn.Module):
        return next(
            (name for name, m in named.items() if m is wanted), type(wanted).__name__
        ), wanted
    if wanted in named:
        return wanted, named[wanted]
    close = get_close_matches(wanted, named, n=3, cutoff=0.5) or [n for n in named if n][:8]
    there = f' There is {", ".join(f"`{n}`" for n in close)}.' if close else ''
    raise OptionError(
        f'{type(model).__name__} has no module named {wanted!r}.{there} `learn.summary()` lists them.'
    )
