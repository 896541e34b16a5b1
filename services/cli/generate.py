"""`paceline generate`: one answer from a running coordinator."""

from __future__ import annotations

import json
from typing import Any

import click

from paceline.v1 import coordinator_pb2
from services.cli.access import Access, access_options, access_to
from services.cli.client import stream_answer
from services.cli.interrupt import run_or_exit
from services.cli.output import answer_object, stderr_console
from services.cli.request import VERIFICATIONS, build_request, int32, seconds, token_ids, uint64
from services.cli.show import show_answer
from services.cli.waterfall import new_traceparent, waterfall


@click.command()
@click.option(
    "--address",
    default="127.0.0.1:50050",
    show_default=True,
    envvar="PACELINE_ADDRESS",
    show_envvar=True,
    metavar="HOST:PORT",
    help="The coordinator: HOST:PORT, dns:///name:port.",
)
@access_options
@click.option("--prompt", metavar="TEXT", help="Raw text to go on from, as it is; - reads standard input.")
@click.option("--chat", metavar="TEXT", help="One user message for the model's chat template; - reads standard input.")
@click.option("--token-ids", type=token_ids, metavar="ID,ID,...", help="Token ids to go on from, as they are.")
@click.option("--system", metavar="TEXT", help="System message before --chat.")
@click.option("--max-tokens", type=int32, metavar="N", help="Most tokens to generate.  [default: the server's]")
@click.option("--temperature", type=float, metavar="X", help="0 is greedy.  [default: the model's]")
@click.option(
    "--top-k", type=int32, metavar="N", help="Keep the likeliest tokens, so many; 0 all.  [default: the model's]"
)
@click.option(
    "--top-p", type=float, metavar="X", help="Keep the likeliest tokens with this mass; 1 all.  [default: the model's]"
)
@click.option(
    "--min-p",
    type=float,
    metavar="X",
    help="Keep tokens this likely relative to the likeliest.  [default: the model's]",
)
@click.option("--seed", type=uint64, metavar="N", help="Key of the random numbers.  [default: drawn, and returned]")
@click.option(
    "--gamma", type=int32, metavar="N", help="Drafts in a round; 0 uses the target alone.  [default: what pays]"
)
@click.option(
    "--verification",
    type=click.Choice(tuple(VERIFICATIONS)),
    help="The rule for drafts; under coupled a seed gives the same tokens whatever was drafted."
    "  [default: coupled with --seed, else token]",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--stop-token-id", multiple=True, type=int32, metavar="N", help="End with this token; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end of text.")
@click.option(
    "--deadline", "deadline_s", type=seconds, metavar="SECONDS", help="Give up after so long.  [default: the server's]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--trace", is_flag=True, help="Have the request traced, and print its tree as a waterfall.")
def generate(address: str, deadline_s: float | None, as_json: bool, trace: bool, **fields: Any) -> None:
    """Stream one answer; on a terminal each token has the colour of its origin."""
    access = access_to(address, fields)
    request = build_request(**fields)
    if as_json:
        run_or_exit(_print_json(address, request, deadline_s, trace, access))
    else:
        run_or_exit(show_answer(address, request, deadline_s=deadline_s, trace=trace, access=access))


async def _print_json(
    address: str, request: coordinator_pb2.GenerateRequest, deadline_s: float | None, trace: bool, access: Access
) -> None:
    trace_id, traceparent = new_traceparent()
    answer = await stream_answer(
        *(address, request, lambda _: None),
        deadline_s=deadline_s,
        traceparent=traceparent if trace else None,
        access=access,
    )
    click.echo(json.dumps(answer_object(answer), ensure_ascii=False))
    if trace:
        console = stderr_console()
        console.print(waterfall(answer.result, trace_id, console.width), end="", soft_wrap=True)
