"""Audits: may the encoder of a model be trusted, for which observations and which quantities."""

from vaerdict.auditing.pipeline import audit
from vaerdict.auditing.quantities import Quantity
from vaerdict.auditing.result import Audit

__all__ = ["Audit", "Quantity", "audit"]
