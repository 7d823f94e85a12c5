"""What is recorded of a policy update: shares of each micro-batch, and the metrics of the whole."""

from __future__ import annotations

from posttrain.core.batch import RolloutBatch
from posttrain.core.training.forward import ResponseForward
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import MicroLoss


def record_micro(
    sums: MetricSums, loss: MicroLoss, out: ResponseForward, micro: RolloutBatch
) -> None:
    """Add a micro-batch's share of every metric."""
    mask = micro.mask
    for name, value in loss.parts.items():
        sums.add_scalar(name, value)
    sums.add_scalar("loss/total", loss.total.detach())
    sums.add("entropy/mean", out.entropy.cpu(), mask)
    sums.add("entropy/approx", -out.logprobs.detach().cpu(), mask)
    if micro.ref_logprobs is not None:
        gap = out.logprobs.detach().cpu() - micro.ref_logprobs
        sums.add("kl/ref_k1", gap, mask)
        sums.add("kl/ref_k3", (-gap).clamp(-20, 20).exp() - 1 + gap, mask)
    for name, (value, where) in loss.tokens.items():
        if name == "ratio":
            sums.add("ratio/mean", value, where)
            sums.add_extremes("ratio", value, where)
        else:
            sums.add(name, value, where)


def update_metrics(sums: MetricSums, num_updates: int) -> dict[str, float]:
    """Metrics of a rollout batch's updates; what sums over an update's parts is per update."""
    metrics = sums.result()
    for name in [n for n in metrics if n.startswith("loss/")] + ["grad/clipped"]:
        if name in metrics:
            metrics[name] /= max(1, num_updates)
    positive, negative = metrics.pop("contrib/pos", 0.0), metrics.pop("contrib/neg", 0.0)
    if positive + negative > 0:
        metrics["contrib/pos_share"] = positive / (positive + negative)
    return metrics | {"train/updates": float(num_updates)}
