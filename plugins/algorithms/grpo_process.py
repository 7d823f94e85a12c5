"""The GRPO preset with process supervision: rewards of steps, not of answers."""

from __future__ import annotations

from posttrain.plugins.algorithms.grpo import Grpo


class GrpoProcess(Grpo):
    """GRPO's loss with A_it = sum of the z-scores of the steps that end at or after token t.

    Needs a reward that scores steps (a process reward model, or a verifier of steps).
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.3.
    """

    name = "grpo_process"
    fields = {**Grpo.fields, "advantage": "grpo_process"}
