"""State of the whole process that a component must leave as it is, because it runs inside a server."""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

try:
    import resource
except ImportError:  # not of Unix
    resource = None  # type: ignore[assignment]

_DIRECTORY = "the working directory"
_FILE_MASK = "the mask of new files"
_LIMITS = "limits of resources"
_LOCALE = "the locale"
_SIGNAL_MASK = "the mask of signals"


@contextmanager
def left_as_it_is() -> Iterator[None]:
    """Fails if anything of it is another afterwards, and says what. Of torch and numpy only if they were imported."""
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    variables = tuple(os.environ)  # a library may add what only it reads
    before, called = _state(variables, np, torch), set[str]()
    with put_back():
        with _watched(called):
            yield
        changed = [name for name, value in _state(variables, np, torch).items() if value != before[name]]
    changed += [f"{name} for a moment" for name in sorted(called - {*changed})]
    assert not changed, f"changed for the whole process: {', '.join(changed)}"


@contextmanager
def _watched(called: set[str]) -> Iterator[None]:
    """Adds changes by any Python call to `called`, on any thread, even if they are undone at once."""
    calls: list[tuple[Any, str, str, Callable[..., bool]]] = [
        (os, "umask", _FILE_MASK, lambda mask: True),
        (os, "chdir", _DIRECTORY, lambda path: True),
        (os, "fchdir", _DIRECTORY, lambda fd: True),
        (locale, "setlocale", _LOCALE, lambda category, value=None: value is not None),
        (resource, "setrlimit", _LIMITS, lambda which, limits: True),
        (signal, "pthread_sigmask", _SIGNAL_MASK, lambda how, mask: _on_main_thread() and bool(mask)),
    ]
    there = [(module, name, getattr(module, name), *about) for module, name, *about in calls if hasattr(module, name)]

    def noting(function: Callable[..., Any], what: str, changes: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if changes(*args, **kwargs):
                called.add(what)
            return function(*args, **kwargs)

        return call

    for module, name, function, what, changes in there:
        setattr(module, name, noting(function, what, changes))
    try:
        yield
    finally:
        for module, name, function, *_ in there:
            setattr(module, name, function)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()  # a thread of its own may do as it likes


@contextmanager
def put_back() -> Iterator[None]:
    """Restore the state as far as possible: otherwise a later test would not notice the same change again."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    loggers = [(log, log.level, log.handlers[:], log.filters[:], log.propagate, log.disabled) for log in _loggers()]
    disabled = logging.root.manager.disable
    environment, where, mask, limits = dict(os.environ), os.getcwd(), _umask(), _limits()
    blocked = _signal_mask()
    undo = [
        partial(setattr, module, name, getattr(module, name))
        for module, names in ((sys, ("excepthook", "unraisablehook", "displayhook")), (threading, ("excepthook",)))
        for name in names
    ]
    undo += [
        gc.enable if gc.isenabled() else gc.disable,
        partial(gc.set_threshold, *gc.get_threshold()),
        partial(sys.setrecursionlimit, sys.getrecursionlimit()),
        partial(sys.setswitchinterval, sys.getswitchinterval()),
        partial(socket.setdefaulttimeout, socket.getdefaulttimeout()),
        partial(locale.setlocale, locale.LC_ALL, locale.setlocale(locale.LC_ALL)),
        partial(random.setstate, random.getstate()),
        *_undo_of_torch(),
    ]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for log, level, handlers, filters, log.propagate, log.disabled in loggers:
            log.handlers[:], log.filters[:] = handlers, filters
            log.setLevel(level)
        logging.disable(disabled)
        for number, handler in signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
        os.chdir(where)
        os.umask(mask)
        if blocked != _signal_mask():
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, limit in limits.items():
            if limit != resource.getrlimit(number):
                with suppress(ValueError, OSError):  # limits that were lowered for good
                    resource.setrlimit(number, limit)
        for each in undo:
            each()


def _undo_of_torch() -> list[Callable[[], object]]:
    """Nothing if it was not imported: then it stays so."""
    torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
    undo: list[Callable[[], object]] = []
    if np is not None:
        undo += [partial(np.seterr, **np.geterr()), partial(np.random.set_state, np.random.get_state())]
    if torch is not None:
        undo += [
            _put_back_if_changed(torch.get_num_threads, torch.set_num_threads),
            # Which imports torch's compiler, in a second of processor time.
            _put_back_if_changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
            partial(torch.set_default_dtype, torch.get_default_dtype()),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            partial(torch.set_rng_state, torch.get_rng_state()),
            partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        ]
    return undo


def _put_back_if_changed(get: Callable[[], Any], put: Callable[[Any], object]) -> Callable[[], object]:
    before = get()
    return lambda: put(before) if get() != before else None


def _signal_mask() -> set[signal.Signals]:
    """The signal mask of this thread, which new threads inherit."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()) if hasattr(signal, "pthread_sigmask") else set()


def _limits() -> dict[int, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {number: resource.getrlimit(number) for number in {getattr(resource, name) for name in names}}


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _state(variables: Sequence[str], np: Any, torch: Any) -> dict[str, object]:
    looks: dict[str, Callable[[], object]] = {
        "logging": _logging,
        "handlers of signals": lambda: [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "hooks of the interpreter": lambda: (
            sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.stdout, sys.stderr,
        ),
        "warnings": _filters_of_everything,
        "garbage collection": lambda: (gc.isenabled(), gc.get_threshold()),
        "limits of the interpreter": lambda: (sys.getrecursionlimit(), sys.getswitchinterval()),
        _SIGNAL_MASK: _signal_mask,
        _LIMITS: lambda: (_limits(), *((os.getpriority(os.PRIO_PROCESS, 0),) if hasattr(os, "getpriority") else ())),
        "processors it may use": lambda: os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "the time zone": lambda: (time.tzname, time.timezone),
        _LOCALE: lambda: locale.setlocale(locale.LC_ALL),
        _DIRECTORY: os.getcwd,
        _FILE_MASK: _umask,
        "environment variables": lambda: [os.environ.get(name) for name in variables],
        "the default timeout of sockets": socket.getdefaulttimeout,
        "random numbers": random.getstate,
    }  # fmt: skip
    if np is not None:
        looks |= {
            "random numbers of numpy": lambda: [each.tobytes() if isinstance(each, np.ndarray) else each
                                                for each in np.random.get_state(legacy=True)],
            "errors of numpy": np.geterr,
        }  # fmt: skip
    if torch is not None:
        looks |= {
            "random numbers of torch": lambda: torch.get_rng_state().numpy().tobytes(),
            "threads of torch": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
            "default dtype of torch": torch.get_default_dtype,
            "default device of torch": torch.get_default_device,
            "grad mode of torch": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "deterministic algorithms of torch": torch.are_deterministic_algorithms_enabled,
            "precision of matrix products of torch": torch.get_float32_matmul_precision,
        }
    return {name: look() for name, look in looks.items()}


def _loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in ("", "kvloom")]


def _logging() -> object:
    about = [(log.level, tuple(log.handlers), tuple(log.filters), log.propagate, log.disabled) for log in _loggers()]
    return about, logging.root.manager.disable, logging.getLoggerClass(), logging.getLogRecordFactory()


def _filters_of_everything() -> object:
    """Warning filters that apply to all code. A library's filters for its own warnings do not count."""
    return [
        (action, category)
        for action, message, category, module, _ in warnings.filters
        if message is None and module is None and category.__module__ == "builtins"
    ]
