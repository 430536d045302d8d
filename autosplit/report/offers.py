"""Kinds of machine side by side: which hold a training, how long they take for so many tokens, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosplit.planning.explain.verdicts import binding
from autosplit.planning.plan.plan import Plan
from autosplit.report.document import Section, column, printable
from autosplit.report.words import format_count, format_rate, format_usd
from autosplit.units import format_bytes, format_seconds

_WIDTH, _HEIGHT, _MARGIN = 720, 360, 56


@dataclass(frozen=True)
class Offer:
    """A machine and the plan for it, and how many tokens are to be trained on."""

    machine: str
    plan: Plan
    tokens: float

    @property
    def devices(self) -> int:
        """How many devices the machine has."""
        return self.plan.parallel.ranks

    @property
    def fits(self) -> bool:
        """Whether the training surely fits."""
        return self.plan.verdict == "fits"

    @property
    def hours(self) -> float | None:
        """How long the tokens take; None where rows have no tokens."""
        speed = self.plan.tokens_per_s
        return None if not speed else self.tokens / speed / 3600

    @property
    def usd(self) -> float | None:
        """What the tokens cost; None without a price."""
        return None if self.hours is None or self.plan.price is None else self.hours * self.plan.price.usd_per_hour

    def fields(self) -> dict[str, Any]:
        """Return it as data."""
        price = self.plan.price
        return {
            "machine": self.machine,
            "devices": self.devices,
            "verdict": self.plan.verdict,
            "step_s": self.plan.step_s,
            "tokens_per_s": self.plan.tokens_per_s,
            "usd_per_hour": None if price is None else price.usd_per_hour,
            "price_source": None if price is None else price.source,
            "usd_per_billion_tokens": None if price is None else price.usd_per_billion_tokens,
            "hours": self.hours,
            "usd": self.usd,
        }


def answers(offers: Sequence[Offer], budget: float | None) -> dict[str, str]:
    """Return which machine holds the training with the fewest devices, and which is the cheapest and the fastest."""
    fitting = [offer for offer in offers if offer.fits and offer.hours is not None]
    priced = [offer for offer in fitting if offer.usd is not None]
    found = {}
    if fitting:
        least = min(fitting, key=lambda offer: (offer.devices, offer.usd or math.inf))
        fastest = min(fitting, key=lambda offer: offer.hours or math.inf)
        found = {"fewest": f"{least.machine}", "fastest": f"{fastest.machine}, {_hours(fastest)}"}
    if priced:
        cheapest = min(priced, key=lambda offer: offer.usd or math.inf)
        found["cheapest"] = f"{cheapest.machine}, {format_usd(cheapest.usd or 0)}"
    if budget is not None:
        within = sorted((offer for offer in priced if (offer.usd or 0) <= budget), key=lambda offer: offer.hours or 0)
        best = f"{within[0].machine} is the fastest of {len(within)} within it" if within else "none is within it"
        if priced and not within:
            best += f", the cheapest takes {format_usd(cheapest.usd or 0)}"
        most = max((offer.tokens * budget / (offer.usd or 1) for offer in priced), default=None)
        tokens = "" if most is None else f"; it pays for {_count(most)} tokens at most"
        found["budget"] = f"{format_usd(budget)}: {best}{tokens}"
    return found


def offers_sections(offers: Sequence[Offer], budget: float | None) -> Iterator[Section]:
    """Yield the table of machines, the cheapest first, and the answers."""
    rows = sorted(offers, key=lambda offer: (not offer.fits, offer.usd or math.inf, offer.hours or math.inf))
    tokens = _count(rows[0].tokens)
    columns = (
        column("machine", rows, lambda row: row.machine, align="left"),
        column("verdict", rows, lambda row: row.plan.verdict, align="left"),
        column("fullest device", rows, _fullest),
        column("step", rows, lambda row: format_seconds(row.plan.step_s)),
        column("tokens/s", rows, lambda row: format_rate(row.plan.tokens_per_s or 0)),
        column("$/hour", rows, lambda row: "-" if row.plan.price is None else f"{row.plan.price.usd_per_hour:,.2f}"),
        column("time", rows, _hours),
        column("cost", rows, lambda row: "-" if row.usd is None or not row.fits else format_usd(row.usd)),
    )
    sources = dict.fromkeys(row.plan.price.source for row in rows if row.plan.price is not None)
    yield Section(f"Machines for {tokens} tokens, the cheapest first", columns=columns, below=tuple(sources))
    found = answers(offers, budget)
    if found:
        yield Section("Answers", facts=tuple(found.items()))


def _count(tokens: float) -> str:
    """Return a number of tokens as they are counted: ``"2.00 B"``."""
    return format_count(tokens).replace(" G", " B")


def _fullest(offer: Offer) -> str:
    device = binding(offer.plan)
    return "-" if device is None else f"{format_bytes(device.peak_bytes)} of {format_bytes(device.capacity_bytes or 0)}"


def _hours(offer: Offer) -> str:
    if offer.hours is None or not offer.fits:
        return "-"
    return f"{offer.hours:.1f} h" if offer.hours < 100 else f"{offer.hours / 24:.1f} days"


def offers_page(offers: Sequence[Offer], budget: float | None) -> str:
    """Return the machines as an HTML file: time against cost as a picture, and the table."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(templates), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("offers.html").render(
        style=(templates / "page.css").read_text(encoding="utf-8"),
        sections=list(offers_sections(offers, budget)),
        model=printable(offers[0].plan.fingerprint.model),
        chart=_chart(offers, budget),
    )


def _chart(offers: Sequence[Offer], budget: float | None) -> dict[str, Any] | None:
    """Return where machines lie, by hours and by dollars on logarithmic axes; None where nothing is priced."""
    shown = [(offer, offer.hours, offer.usd) for offer in offers if offer.fits and offer.hours and offer.usd]
    if not shown:
        return None
    across = _Axis([hours for _, hours, _ in shown], _MARGIN, _WIDTH - 2 * _MARGIN)
    up = _Axis([usd for *_, usd in shown] + ([budget] if budget else []), _HEIGHT - _MARGIN, _MARGIN / 2)
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "margin": _MARGIN,
        "points": [
            {"x": across.at(hours), "y": up.at(usd), "name": printable(offer.machine), "usd": format_usd(usd)}
            for offer, hours, usd in shown
        ],
        "hours": [{"at": across.at(value), "text": f"{value:g} h"} for value in across.ticks()],
        "dollars": [{"at": up.at(value), "text": format_usd(value)} for value in up.ticks()],
        "budget": None if not budget else {"at": up.at(budget), "text": f"budget {format_usd(budget)}"},
    }


class _Axis:
    """A logarithmic axis from some place of a picture to another, with room around the values."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = min(values) / 1.5, max(values) * 1.5, start, end

    def at(self, value: float) -> float:
        """Return the place of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return round values that lie on the axis: 1, 2 and 5 times powers of ten."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [
            each * 10.0**power for power in powers for each in (1, 2, 5) if self.low <= each * 10.0**power <= self.high
        ]
