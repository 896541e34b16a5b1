"""Keeps transformers' progress bars and advice out of a service's output."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and warnings for the calls inside; errors are still raised."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        # The GGUF reader draws a bar of its own, which no setting turns off.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
