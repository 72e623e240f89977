"""Examples of hypothesis have no time limit of their own: a machine that is busy elsewhere is no fault of a test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
