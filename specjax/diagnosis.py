"""Diagnosis of a drafter, position by position: see `specjax.apps.doctor`."""

from specjax.apps.doctor import Diagnosis, Finding, Measured, Share, diagnose

__all__ = ["Diagnosis", "Finding", "Measured", "Share", "diagnose"]
