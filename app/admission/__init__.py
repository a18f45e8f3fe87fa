"""Admission control: each key's limits, the wait that a model's backlog means, and the cuts that come first."""

from app.admission.admission import Admission, AdmissionGate
from app.admission.queue_estimate import Backlog, Work
from app.admission.request_budget import Ticket

__all__ = ["Admission", "AdmissionGate", "Backlog", "Ticket", "Work"]
