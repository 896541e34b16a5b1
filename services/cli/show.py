"""Asks for an answer and shows it: what `generate` and `demo` have in common."""

from __future__ import annotations

from paceline.v1 import coordinator_pb2
from services.cli.access import PLAIN, Access
from services.cli.client import stream_answer
from services.cli.output import TokenPrinter, stdout_console, table_console
from services.cli.table import closing_table
from services.cli.waterfall import new_traceparent, waterfall


async def show_answer(
    address: str,
    request: coordinator_pb2.GenerateRequest,
    *,
    deadline_s: float | None = None,
    trace: bool = False,
    access: Access = PLAIN,
) -> None:
    """Stream an answer to standard output, then its figures where they do not get into a pipe.

    Args:
        address: Of a coordinator.
        request: What to ask.
        deadline_s: The call's deadline.
        trace: Ask for a trace and print the request's tree after the answer.
        access: Certificates and the like.

    Raises:
        CallError: The call failed.
    """
    console = stdout_console()
    printer = TokenPrinter(console)
    trace_id, traceparent = new_traceparent()
    try:
        answer = await stream_answer(
            *(address, request, printer),
            deadline_s=deadline_s,
            traceparent=traceparent if trace else None,
            access=access,
        )
    except BaseException:
        # Also when it fails or is cancelled in mid-text, what comes next on a terminal starts on a line of its own.
        if printer.written:
            printer.end()
        raise
    printer.end()
    if (figures := table_console(console)) is not None:
        figures.print("", closing_table(answer), sep="\n")
    if trace:
        console.file.write("\n")
        console.print(waterfall(answer.result, trace_id, console.width), end="", soft_wrap=True)
