"""Admission control: each key's limits, the wait that a model's backlog means, and the cuts that come first."""

from app.admission.admission import Admission, AdmissionGate
from app.admission.queue_estimate import AdmittedWork, QueueEstimate
from app.admission.request_budget import RequestBudget

__all__ = ["Admission", "AdmissionGate", "AdmittedWork", "QueueEstimate", "RequestBudget"]
