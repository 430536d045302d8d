"""``autosplit compare MODEL``: kinds of machine side by side: what holds a training, how fast, and at what cost."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosplit.checks import check_price, resolve_machine
from autosplit.cli import common
from autosplit.cli.inputs import ROWS_PER_DEVICE, InputOptions, ModelSpec, wants_labels
from autosplit.cli.outputs import check_path, write_file
from autosplit.cli.plan import Mesh, default_precision
from autosplit.errors import AutosplitError, InputError
from autosplit.progress import phase

if TYPE_CHECKING:
    from autosplit.report.offers import Offer

EXAMPLES = """Examples:

\b
  autosplit compare config.json --tokens 2B --budget 500
  autosplit compare config.json --tokens 2B --devices H100,A100,L40S,4090
  autosplit compare config.json --tokens 10B --devices 8xH100,8xA100,16xL40S --mesh auto --batch 64 --html machines.html
  autosplit compare my.gpt:GPT --input "input_ids=int64[64,1024]<50257" --devices 8xH100,8xB200 --price H100=2.10/h

A name without a number, such as H100, stands for the fewest devices that hold the training; 8xH100 for that machine.
All have the same batch. Prices are list prices, with their source and day, or those of --price.

Exit codes: 0 done; 1 done, and the training fits on none, or none within the budget; 2 bad usage or input.
"""
KINDS = "H100,A100,H200,B200,L40S,A100-40GB,4090"
"""What is compared where nothing is said: kinds that have a list price."""
_TOKENS = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kMBT]?)\s*")
_POWERS = {"": 0, "k": 3, "M": 6, "B": 9, "T": 12}
_STATE_BYTES, _FILLED = 16, 0.8
"""Of a parameter under Adam with fp32 copies; how much of a device they take in the first guess of their number."""

Devices = Annotated[
    str, typer.Option(help="Kinds and machines, with commas between.", autocompletion=common.complete_device)
]
Tokens = Annotated[str, typer.Option(help="How many tokens are trained on, such as 2B or 500M.")]
Budget = Annotated[float | None, typer.Option(min=0, metavar="USD", help="What all of it may cost.")]
Prices = Annotated[
    list[str] | None,
    typer.Option("--price", metavar="KIND=USD/h", help="Per device and hour; several times for several."),
]
Page = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison as an HTML page.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print markdown instead of a table.")]


@common.command
def compare_command(
    model: common.Target,
    *,
    tokens: Tokens = "1B",
    budget: Budget = None,
    devices: Devices = KINDS,
    price: Prices = None,
    mesh: Mesh = None,
    inputs: InputOptions,
    options: common.PlanOptions,
    precision: common.Precision = None,
    html: Page = None,
    as_json: common.AsJson = False,
    as_markdown: Markdown = False,
) -> int:
    """Compare kinds of machine: what holds a training, which is the cheapest and which the fastest."""
    if html is not None:
        check_path("html", html)
    if options.plan is not None:
        raise InputError("compare plans for every machine anew; leave --plan out")
    spec = inputs.spec(model, labels=wants_labels(None, options.schedule))
    count, prices = parse_tokens(tokens), _prices(price or [])
    precision = precision or default_precision(spec, schedule=options.schedule)
    machines = common.words(devices)
    for name in machines:
        resolve_machine(name)
    spec = replace(spec, batch=spec.batch or 8 * ROWS_PER_DEVICE) if spec.is_config and not spec.inputs else spec
    choices = options.choices(1, chunks="auto", precision=precision) | {"mesh": mesh}
    with common.beside_stdout():
        offers = _offers(spec, machines, tokens=count, prices=prices, choices=choices)
    _answer(offers, budget, html=html, as_json=as_json, as_markdown=as_markdown)
    paid = (offer for offer in offers if budget is None or (offer.usd is not None and offer.usd <= budget))
    return common.DONE if any(offer.fits for offer in paid) else common.ANSWER_IS_NO


def parse_tokens(text: str) -> float:
    """Read a number of tokens: ``2B``, ``500M``, ``1e9``."""
    match = _TOKENS.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--tokens {text!r} is no number of tokens; write 2B, 500M or 1e9")
    return float(match[1]) * 10.0 ** _POWERS[match[2]]


def _prices(texts: list[str]) -> dict[str, float]:
    """Read ``H100=2.10/h``: the price per device and hour by the device's name."""
    prices = {}
    for text in texts:
        name, equals, amount = text.partition("=")
        usd = check_price(amount) if equals else None
        if usd is None:
            raise InputError(f"--price {text!r} names no device and price; write H100=2.10/h")
        prices[resolve_machine(name).devices[0].name] = usd
    return prices


def _offers(
    spec: ModelSpec, machines: list[str], *, tokens: float, prices: dict[str, float], choices: dict[str, Any]
) -> list[Offer]:
    """Plan for each machine; one for which there is no plan at all is told and left out."""
    with phase("importing"):
        from autosplit.api import plan
        from autosplit.cli.models import input_specs, make_model, make_sample
        from autosplit.report.offers import Offer
        from cost_models.registry import usual
    made = make_model(spec, blank=True)
    rows = spec.batch or ROWS_PER_DEVICE
    sample = make_sample(replace(spec, inputs=input_specs(spec, model=made, rows=rows)), model=made, rows=rows)
    states = _STATE_BYTES * sum(parameter.numel() for parameter in made.parameters())
    offers = []
    for name in machines:
        machine = resolve_machine(name)
        device = machine.devices[0]
        asked = {**choices, "price": prices.get(device.name)}
        if usual(name) is not None:
            count = max(1, math.ceil(states / (device.usable_bytes or states) / _FILLED))
            machine = resolve_machine(f"{count}x{device.name}")
            asked |= {"find": "smallest", "mesh": None}
        try:
            with phase(f"planning for {name}"):
                found = plan(made, sample=sample, batch_dims=spec.batch_dims, devices=machine, **asked)
        except AutosplitError as error:
            common.tell(f"{name}: {error}")
            continue
        offers.append(Offer(found.machine or name, found, tokens))
    if not offers:
        raise InputError("there is no plan for any of these machines; see above")
    return offers


def _answer(offers: list[Offer], budget: float | None, *, html: Path | None, as_json: bool, as_markdown: bool) -> None:
    """Write the page and print the comparison."""
    from autosplit.report.document import as_markdown as markdown
    from autosplit.report.document import as_text, page_width
    from autosplit.report.offers import answers, offers_page, offers_sections

    if html is not None:
        write_file("html", html, offers_page(offers, budget))
    if as_json:
        text = json.dumps({"machines": [offer.fields() for offer in offers], **answers(offers, budget)}, indent=2)
    else:
        sections = list(offers_sections(offers, budget))
        text = markdown(sections) if as_markdown else as_text(sections, width=page_width(common.page_width()))
    typer.echo(text)
