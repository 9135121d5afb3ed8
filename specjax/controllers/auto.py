"""Stub."""

from dataclasses import dataclass

from specjax.controllers.fixed import Fixed


@dataclass(frozen=True)
class Auto(Fixed):
    pass
