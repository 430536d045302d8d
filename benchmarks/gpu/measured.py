"""The measured profile against stages run alone: what a plan counts for a stage is the sum of its nodes.

The plan's seconds come from timing every node by itself (``autosplit.profile.measured``), the stage's from its actions
run alone (`PipelinedModule.profile_stages`): the same device, the same microbatch, no model of costs in between.
"""

from __future__ import annotations

from benchmarks.gpu.part import Found, Setting, at_most
from benchmarks.gpu.subjects import Subject, steps

ASKED = 0.03
STAGES, CHUNKS = 4, 8


def run(setting: Setting) -> Found:
    """Run the part."""
    repeats = 1 if setting.small else 10
    found = Found(settings={"repeats": repeats, "stages": STAGES, "chunks": CHUNKS, "asked": ASKED})
    for subject in steps(small=setting.small).values():
        with found.going_on(subject.name):
            _measure(subject, setting, found, repeats=repeats)
        setting.empty()
    return found


def _measure(subject: Subject, setting: Setting, found: Found, *, repeats: int) -> None:
    """One model's stages."""
    made = subject.make(setting.device, chunks=CHUNKS)
    pipe = made.pipe([setting.device] * STAGES)
    assert pipe.plan is not None
    with made.precision():
        alone = pipe.profile_stages(made.batch, target=made.target, loss_fn=subject.loss, repeats=repeats)
    errors = []
    for stage, cell_s in zip(pipe.plan.stages, alone.cell_s, strict=True):
        profile_s = stage.forward_s + stage.backward_s
        errors.append(profile_s / cell_s - 1)
        found.figures.append(
            {
                "model": subject.name,
                "stage": stage.index,
                "profile_s": profile_s,
                "alone_s": cell_s,
                "forward_s": alone.seconds["F"][stage.index],
                "backward_s": cell_s - alone.seconds["F"][stage.index],
                "error": errors[-1],
            }
        )
    name = f"{subject.name}: measured profile against the stage run alone, worst stage"
    found.checks.append(at_most(name, ASKED, max(map(abs, errors))))
