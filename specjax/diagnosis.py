"""Diagnosis of a drafter: what it accepts, position by position, and what lowers acceptance.

    print(diagnose(model, drafter, prompts))     a table; `Diagnosis` has its numbers

`python -m specjax.doctor` is the command, and docs/doctor.md explains its numbers.
"""

from specjax.apps.doctor.changes import Finding
from specjax.apps.doctor.diagnose import Diagnosis, Measured, Share, diagnose

__all__ = ["Diagnosis", "Finding", "Measured", "Share", "diagnose"]
