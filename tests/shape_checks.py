"""Checks of array shapes and types that cost little for functions that are never called.

Making a checker takes a millisecond or two, so it is made at the first call. Local functions with
the same code share a checker, since tracing makes thousands of them. Arguments and result are
checked in one call of the checker, whereas `jaxtyping.jaxtyped` binds and checks arguments twice.
"""

import dataclasses
import functools
import inspect
import threading
import types
import typing

import jaxtyping
from beartype.roar import BeartypeCallHintViolation

_jaxtyped = jaxtyping.jaxtyped
_checkers = {}
_calls = threading.local()
_shapes_of_a_call = _jaxtyped("context")


def jaxtyped(*, typechecker):
    """Return a decorator like `jaxtyping.jaxtyped` with shared checkers, made at the first call."""

    def decorate(function):
        try:
            check = typechecker(_with_types(function))
        except Exception:  # types that name themselves: beartype reads them as texts
            return _jaxtyped(function, typechecker=typechecker)

        @functools.wraps(function)
        def call(*args, **kwargs):
            __tracebackhide__ = True
            if jaxtyping.config.jaxtyping_disable:
                return function(*args, **kwargs)
            with _shapes_of_a_call:
                try:
                    return check(*args, **kwargs)
                except BeartypeCallHintViolation as violation:
                    raise jaxtyping.TypeCheckError(str(violation)) from violation

        return call

    def checked(made):
        if dataclasses.is_dataclass(made):
            if not hasattr(made.__init__, "checked"):
                made.__init__ = at_first_call(made.__init__)
            return made
        if not inspect.isfunction(made):
            return _jaxtyped(made, typechecker=typechecker)
        # Defaults would be kept alive.
        local = "<locals>" in made.__qualname__ and not (made.__defaults__ or made.__kwdefaults__)
        return shared(made) if local else at_first_call(made)

    def at_first_call(function):
        checker = None

        @functools.wraps(function)
        def call(*args, **kwargs):
            __tracebackhide__ = True
            nonlocal checker
            checker = checker or decorate(function)
            return checker(*args, **kwargs)

        call.checked = True
        return call

    def shared(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            __tracebackhide__ = True
            checker = _checkers.get(function.__code__)
            if checker is None:
                # beartype alone would read the parameters of the stand-in's code: any.
                checker = _jaxtyped(_latest_like(function), typechecker=typechecker)
                _checkers[function.__code__] = checker
            stack = _calls.__dict__.setdefault("stack", [])
            stack.append(function)
            try:
                return checker(*args, **kwargs)
            finally:
                stack.pop()

        return call

    return checked


def _with_types(function):
    """Return the function with its annotations evaluated to types; Any if that is impossible."""

    def evaluated(annotation):
        alone = types.FunctionType((lambda: None).__code__, function.__globals__)
        alone.__annotations__ = {"it": annotation}
        try:
            return typing.get_type_hints(alone, include_extras=True)["it"]
        except Exception:
            return typing.Any

    found = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    functools.update_wrapper(found, function)
    del found.__wrapped__
    found.__kwdefaults__ = function.__kwdefaults__
    found.__annotations__ = {
        name: evaluated(annotation) for name, annotation in function.__annotations__.items()
    }
    return found


def _latest_like(function, calls=_calls):
    """Return a function with another's signature, which calls the function that was called last."""

    def latest(*args, **kwargs):
        return calls.stack[-1](*args, **kwargs)

    # Annotations are looked up among the names of the function's module.
    names = function.__globals__
    found = types.FunctionType(latest.__code__, names, closure=latest.__closure__)
    functools.update_wrapper(found, function)
    found.__signature__ = inspect.signature(function)
    del found.__wrapped__
    return found
