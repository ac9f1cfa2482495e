"""Schedules, each a generator of actions for every rank. No torch here."""

from __future__ import annotations
