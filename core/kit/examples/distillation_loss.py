"""A divergence from a teacher: half the squared gap of log-probs, weighed by the teacher's."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import DistillationLoss, NoConfig, RowLoss, TeacherRows


class Example(DistillationLoss[NoConfig]):
    """d = 1/2 sum_v p_T (log p_T - log p_S)^2 [N], nats^2. Source: an example."""

    name = "example"
    Config = NoConfig

    def rows(self, logits: Tensor, teacher: TeacherRows) -> RowLoss:
        """The loss [N] of `logits` [N, V]."""
        assert teacher.logits is not None
        wanted = torch.log_softmax(teacher.logits, dim=-1)
        gap = wanted - torch.log_softmax(logits, dim=-1)
        loss = 0.5 * (wanted.exp() * gap.square()).sum(dim=-1)
        return RowLoss(loss, torch.ones_like(loss, dtype=torch.bool))
