"""Stage `approve`: keeps a person's answer with the evidence that it was given on."""

from __future__ import annotations

from posttrain.core.analysis.approval_page import evidence
from posttrain.core.config.gate_stages import ApproveStage
from posttrain.core.contracts import StageOutput
from posttrain.core.store.approval import write_answer
from posttrain.pipelines.stage.context import StageContext


def run_approve(context: StageContext) -> StageOutput:
    """Record the answer, which the pipeline has obtained, in the artifact and in MLflow."""
    stage, answer = context.stage, context.answer
    assert isinstance(stage, ApproveStage) and answer is not None
    context.started(1)
    model, evaluation = context.inputs["model"], context.inputs["evaluation"]
    baseline = context.inputs.get("baseline")
    page, compared = evidence(
        stage.question,
        model.digest,
        evaluation.path,
        None if baseline is None else baseline.path,
        stage.samples,
    )
    digests: dict[str, object] = {f"{r}_digest": a.digest for r, a in context.inputs.items()}
    folder = context.out / "approval"
    folder.mkdir()
    write_answer(folder, answer, {"question": stage.question} | digests)
    (folder / "evidence.md").write_text(page, encoding="utf-8")
    context.tracker.log_file(folder, "approval")
    tags = {"decision": "approved" if answer.approved else "rejected", "by": answer.by}
    tags |= {"at": answer.at, "reason": answer.reason, "given": answer.given}
    context.tracker.set_tags({f"posttrain.approval.{k}": v for k, v in tags.items() if v})
    metrics = {"approve/approved": float(answer.approved)}
    if compared is not None:
        metrics |= {
            "eval/gain": compared.difference,
            "eval/gain_low": compared.low,
            "eval/gain_high": compared.high,
        }
    context.tracker.log_summary(metrics)
    context.reporter.step_done(context.name, 1, {})
    context.reporter.say(f"{context.name}: {answer.described()}")
    return StageOutput({"approval": folder}, metrics)
