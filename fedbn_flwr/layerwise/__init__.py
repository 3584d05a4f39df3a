"""FedTAN: the step in which each batch norm meets the other clients, sessions that wait, and the direct exchange."""

from .dial import AGREED, FAILED, Line, Place
from .direct import Direct
from .service import ExchangeService, Lost
from .session import Session
from .step import Answer, Exchange, LayerwiseStep, Pending, count_calls
from .wire import Frame, WireError, decode, encode

__all__ = [
    "Answer", "Exchange", "LayerwiseStep", "Pending", "Session", "count_calls",
    "Direct", "ExchangeService", "Line", "Lost", "Place",
    "AGREED", "FAILED", "Frame", "WireError", "decode", "encode",
]  # fmt: skip
