"""Checks of shapes and types that cost little where few of the functions are called.

To make a checker takes a millisecond or two: it is made at the first call. Functions that are local
to another one share theirs: tracing makes thousands of them.
"""

import dataclasses
import functools
import inspect
import threading
import types

import jaxtyping

_jaxtyped = jaxtyping.jaxtyped
_checkers = {}
_calls = threading.local()


def jaxtyped(*, typechecker):
    """`jaxtyping.jaxtyped` with checkers that are made at the first call and shared."""
    decorate = _jaxtyped(typechecker=typechecker)

    def checked(made):
        if dataclasses.is_dataclass(made):
            if not hasattr(made.__init__, "checked"):
                made.__init__ = at_first_call(made.__init__)
            return made
        if not inspect.isfunction(made):
            return decorate(made)
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
                checker = _checkers[function.__code__] = decorate(_latest_like(function))
            stack = _calls.__dict__.setdefault("stack", [])
            stack.append(function)
            try:
                return checker(*args, **kwargs)
            finally:
                stack.pop()

        return call

    return checked


def _latest_like(function, calls=_calls):
    """A function with the signature of another one, which calls the function called last."""

    def latest(*args, **kwargs):
        return calls.stack[-1](*args, **kwargs)

    # Annotations are looked up among the names of the function's module.
    names = function.__globals__
    found = types.FunctionType(latest.__code__, names, closure=latest.__closure__)
    functools.update_wrapper(found, function)
    found.__signature__ = inspect.signature(function)
    del found.__wrapped__
    return found
