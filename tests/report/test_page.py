"""The page as text: one file that asks for nothing, escapes names, and says what an older plan does not hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autosplit.report import page as html
from autosplit.report.page import page
from tests.report.paper_plans import make_units, paper_plan, searched

TEMPLATES = Path(html.__file__).parent / "templates"


class Parts(HTMLParser):
    """The elements of a page, and what its scripts and styles hold."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.inside = []
        self.held = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append(tag if not dict(attrs).get("type") else "json")

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside.pop()

    def handle_data(self, data):
        if self.inside:
            self.held.setdefault(self.inside[-1], []).append(data)


def test_a_page_of_many_microbatches_is_small():
    text = page(searched(paper_plan(stages=8, microbatches=64)))
    assert len(text.encode()) < 300_000


def test_the_page_names_nothing_outside_itself():
    parts = Parts(page(searched(paper_plan())))
    linked = [value for _, own in parts.elements for key, value in own.items() if key in ("src", "href", "action")]
    assert set(linked) == {"data:,", "#step-title"}
    [script], [style] = parts.held["script"], parts.held["style"]
    # The name of a vocabulary of elements is no address.
    assert "http" not in style + script.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import|eval|innerHTML|insertAdjacentHTML)\b", script)
    assert "url(" not in style


def test_the_policy_runs_the_page_s_own_script_only():
    parts = Parts(page(paper_plan()))
    [policy] = [own["content"] for tag, own in parts.elements if tag == "meta" and "http-equiv" in own]
    assert policy.startswith("default-src 'none';")
    for name in ("script", "style"):
        [text] = parts.held[name]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&amp;\u2028\x1b[31m'


def test_names_from_a_file_are_text():
    units = [unit.model_copy(update={"name": f"{HOSTILE}{unit.name}"}) for unit in make_units(8, stages=2)]
    plan = searched(paper_plan(units, stages=2, devices=(HOSTILE, "b"), notes=(HOSTILE,)))
    plan = plan.model_copy(update={"fingerprint": plan.fingerprint.model_copy(update={"model": HOSTILE})})
    parts = Parts(page(plan))
    tags = [tag for tag, _ in parts.elements]
    assert tags.count("script") == 2
    assert "img" not in tags
    data = json.loads("".join(parts.held["json"]))
    assert "<img src=x" in data["units"][0]["name"]
    assert "\x1b" not in page(plan)


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ({"units": ()}, "does not hold its model in units"),
        ({"curves": ()}, "does not hold what its devices hold over the step"),
        ({"frontier": ()}, "was not searched for among others"),
    ],
)
def test_what_an_older_plan_lacks_is_said(left_out, says):
    whole = searched(paper_plan())
    flat = [re.sub(r"\s+", " ", page(plan)) for plan in (whole, whole.model_copy(update=left_out))]
    assert [says in text for text in flat] == [False, True]


def test_units_that_leave_a_stage_empty_cannot_be_moved():
    plan = paper_plan(stages=2)
    units = tuple(unit.model_copy(update={"stage": 0}) for unit in plan.units)
    assert "does not hold its model in units" in page(plan.model_copy(update={"units": units}))


def test_a_curve_of_another_step_is_left_out():
    plan = paper_plan(stages=2)
    assert "does not hold what its devices hold" in re.sub(
        r"\s+", " ", page(plan.model_copy(update={"chunks": 4, "microbatch_rows": (2,) * 4}))
    )


# --- colours ----------------------------------------------------------------------------------------------------------


def themes():
    """The colours of both themes, by name; the dark one is written down twice, alike."""
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", style)
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]
    assert len(found) == 3
    assert found[1] == found[2]
    return {"light": found[0], "dark": found[1]}


def linear(colour):
    levels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]


def contrast(one, other):
    """WCAG 2.2's contrast ratio."""
    bright, dim = sorted(
        (0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(one), linear(other))), reverse=True
    )
    return (bright + 0.05) / (dim + 0.05)


# Machado, Oliveira, Fernandes 2009: how colours look without the long, the middle and the short cones.


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_shapes_stand_out(theme):
    colours = themes()[theme]
    for ground in ("page", "panel"):
        for text in ("ink", "muted", "accent", "fits", "borderline", "no"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for name, colour in colours.items():
            if name.startswith(("kind-", "part-", "limit")):
                assert contrast(colour, colours[ground]) >= 3, (name, ground)
    for name, colour in colours.items():
        if name.startswith("kind-"):
            assert contrast(colours["on-kind"], colour) >= 4.5, name
