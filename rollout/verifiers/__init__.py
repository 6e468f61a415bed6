"""Verifiers: whether a completion's answer is the gold answer, without being fooled."""

from .judging import verify
from .pool import VerifierPool
from .verdict import Verdict

__all__ = ["Verdict", "VerifierPool", "verify"]
