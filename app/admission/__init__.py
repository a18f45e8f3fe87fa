"""Admission control: each key's limits, the wait that a model's backlog means, and the cuts that come first."""

from app.admission.admission import Admission
from app.admission.backlog import Backlog, Work
from app.admission.gate import AdmissionGate
from app.admission.ticket import Ticket

__all__ = ["Admission", "AdmissionGate", "Backlog", "Ticket", "Work"]
