"""Drafter and verifier over gRPC: a session is a stream, and a lost stream is opened again."""

from services.coordinator.clients.draft import DraftSession
from services.coordinator.clients.features import FeatureRelay
from services.coordinator.clients.session import session_start
from services.coordinator.clients.target import TargetSession

__all__ = ["DraftSession", "FeatureRelay", "TargetSession", "session_start"]
