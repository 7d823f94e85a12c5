"""Every metric key with its unit, its meaning and which direction is better.

Keys are `group/quantity`. A key that is not in `METRICS` and starts with no prefix of `PREFIXES` is
refused by the tracker: a misspelt key would otherwise become a chart that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.core.errors import RunError, nearest


@dataclass(frozen=True, slots=True)
class Metric:
    """Unit and meaning of one key."""

    unit: str
    description: str


HEADLINES = {
    "reward/mean": "0_main/reward",
    "acc/mean": "0_main/accuracy",
    "eval/greedy_accuracy": "0_main/held_out_accuracy",
    "distil/rollout_kl": "0_main/kl_to_teacher",
}
"""What MLflow gets under a second name: it sorts groups of charts and columns by their names."""

METRICS: dict[str, Metric] = {
    "0_main/reward": Metric("reward", "reward/mean again, for MLflow's first charts and columns"),
    "0_main/accuracy": Metric("fraction", "acc/mean again, likewise"),
    "0_main/held_out_accuracy": Metric("fraction", "eval/greedy_accuracy again, likewise"),
    "0_main/kl_to_teacher": Metric("nats", "distil/rollout_kl again, likewise"),
    # reward and accuracy of one rollout batch
    "reward/mean": Metric("reward", "mean reward of the scored responses"),
    "reward/std": Metric("reward", "standard deviation of the reward over responses"),
    "reward/min": Metric("reward", "smallest reward of the batch"),
    "reward/max": Metric("reward", "largest reward of the batch"),
    "reward/unscored_frac": Metric("fraction", "responses that could not be scored"),
    "reward/failures": Metric("count", "scores that failed: error, timeout or crash"),
    "reward/timeouts": Metric("count", "scores that took longer than their limit"),
    "reward/crashes": Metric("count", "scores whose worker process died"),
    "reward/errors": Metric("count", "scores whose reward raised or gave nonsense"),
    "reward/pool_samples_per_s": Metric("1/s", "scores made by worker processes"),
    "reward/overlong_filtered_frac": Metric(
        "fraction", "responses without loss because the length limit cut them"
    ),
    "reward/whiten_std": Metric("reward", "deviation that the rewards were divided by"),
    "acc/mean": Metric("fraction", "verifier's verdict before any shaping, sampled"),
    "group/zero_adv_frac": Metric("fraction", "groups whose advantages are all 0"),
    "group/all_correct_frac": Metric("fraction", "groups with only correct responses"),
    "group/all_wrong_frac": Metric("fraction", "groups with only wrong responses"),
    # advantages
    "adv/mean": Metric("advantage", "mean advantage over tokens that take loss"),
    "adv/std": Metric("advantage", "standard deviation of the advantage over those tokens"),
    "adv/max_abs": Metric("advantage", "largest absolute advantage"),
    "adv/singleton_groups": Metric(
        "count", "groups with too few scored responses to compare; one, for most"
    ),
    "adv/turn_groups": Metric(
        "count", "groups of turns that are compared: of one state, or of one place in the episode"
    ),
    "adv/turn_groups_lt_4": Metric("count", "those of them with fewer than four turns"),
    "adv/greedy_unscored_groups": Metric(
        "count", "groups whose greedy answer could not be scored (ReMax)"
    ),
    "adv/pos_frac": Metric("fraction", "tokens with a positive advantage"),
    # the policy update
    "ratio/mean": Metric("ratio", "new over old probability of the sampled tokens, mean"),
    "ratio/max": Metric("ratio", "largest probability ratio"),
    "ratio/min": Metric("ratio", "smallest probability ratio"),
    "clip/high_frac": Metric("fraction", "tokens whose gradient is cut at the upper bound"),
    "clip/low_frac": Metric("fraction", "tokens whose gradient is cut at the lower bound"),
    "clip/dual_frac": Metric("fraction", "tokens bounded by the dual clip, or by the cap of dppo"),
    "clip/frac": Metric("fraction", "tokens that the upper or the lower bound cuts"),
    "clip/live_behind_frac": Metric(
        "fraction", "tokens with a gradient that follow a clipped one in their response"
    ),
    "clip/seq_frac": Metric("fraction", "responses that a bound on their ratio cuts"),
    "clip/band_pos_frac": Metric("fraction", "tokens outside the clip's band, advantage above 0"),
    "clip/band_neg_frac": Metric("fraction", "tokens outside the clip's band, advantage below 0"),
    "contrib/pos_share": Metric(
        "fraction", "of the policy loss's gradient weight, on tokens with a positive advantage"
    ),
    "bapo/c_low": Metric("ratio", "lower clip bound of the step"),
    "bapo/c_high": Metric("ratio", "upper clip bound of the step"),
    "bapo/rho": Metric("fraction", "share of positive tokens under those bounds"),
    "bapo/iters": Metric("count", "moves of a bound until that share was reached"),
    "cov/picked_frac": Metric("fraction", "tokens picked for their covariance"),
    "vespo/phi": Metric("factor", "weight of a response, mean over responses"),
    "kl/old_k1": Metric("nats", "KL from the policy of the rollout, k1 estimate per token"),
    "kl/old_k3": Metric("nats", "KL from the policy of the rollout, k3 estimate per token"),
    "kl/old_abs": Metric("nats", "mean absolute log ratio to the policy of the rollout"),
    "kl/phase_k3": Metric("nats", "KL a whole rollout batch moved the policy, k3 per token"),
    "kl/penalty_beta": Metric("factor", "penalty per nat of KL in the policy loss"),
    "kl/ref_k1": Metric("nats", "KL from the reference policy, k1 estimate per token"),
    "kl/ref_k3": Metric("nats", "KL from the reference policy, k3 estimate per token"),
    "kl/ref": Metric("nats", "KL from the reference by the run's own estimator, per token"),
    "kl/ref_token": Metric("nats", "KL of the rollout's policy from the reference, mean per token"),
    "kl/ref_sequence": Metric("nats", "the same summed over a response, mean over responses"),
    "kl/ref_version": Metric("count", "moves of the reference before the step's own updates"),
    "kl/coef": Metric("factor", "KL coefficient in force"),
    "entropy/approx": Metric("nats", "mean negative log-prob of the sampled tokens"),
    "a_star_po/implied_reward": Metric("reward", "beta times an answer's log-ratio, mean"),
    "a_star_po/advantage": Metric("reward", "what a_star_po fits that to, mean over answers"),
    "fipo/weight": Metric("factor", "weight of a token by how far its future moved, mean"),
    "real/loss": Metric("loss", "classification loss of the groups, mean over groups"),
    "m2po/dropped_frac": Metric("fraction", "tokens that m2po leaves out of a mini-batch"),
    "m2po/second_moment": Metric("nats^2", "mean of ln(r)^2 over m2po's candidates, none dropped"),
    "entropy/coef": Metric("factor", "coefficient of the entropy bonus, mean over updates"),
    "entropy/mean": Metric("nats", "entropy of the policy per response token"),
    "resp_len/mean": Metric("tokens", "mean response length"),
    "resp_len/min": Metric("tokens", "shortest response"),
    "resp_len/max": Metric("tokens", "longest response"),
    "resp_len/truncated_frac": Metric("fraction", "responses cut by the length limit"),
    "loss/policy": Metric("loss", "policy term of the loss"),
    "loss/kl": Metric("loss", "KL term of the loss, coefficient included"),
    "loss/entropy": Metric("loss", "entropy term of the loss, coefficient included"),
    "loss/distillation": Metric("loss", "divergence from the teacher, coefficient included"),
    "loss/total": Metric("loss", "what the gradient is taken of"),
    "distil/divergence": Metric("nats", "divergence from the teacher per token, mean"),
    "distil/gap": Metric(
        "nats", "the teacher's log-prob of sampled tokens minus the policy's in the update, mean"
    ),
    "distil/logit_gradient": Metric(
        "norm", "norm of d divergence / d logits per token before the aggregator, mean"
    ),
    "distil/reverse_kl": Metric(
        "nats", "the policy's log-prob above the teacher's, mean over sampled tokens"
    ),
    "distil/rollout_kl": Metric("nats", "the same for the policy that sampled"),
    "distil/student_mass": Metric("fraction", "the policy's probability of the candidates"),
    "distil/teacher_mass": Metric(
        "fraction", "the teacher's probability of the candidates; below 0.9 raise top_k"
    ),
    "distil/overlap": Metric("fraction", "the policy's best tokens that are candidates"),
    "distil/teacher_entropy": Metric("nats", "entropy of the teacher per token"),
    "distil/weight_mean": Metric("factor", "weight of what a teacher says of a token, mean"),
    "distil/weight_min": Metric("factor", "the smallest of these weights"),
    "distil/weight_max": Metric("factor", "the largest of these weights"),
    "distil/masked_frac": Metric("fraction", "tokens left out because their probability fell"),
    "distil/missing_frac": Metric("fraction", "sampled tokens that their teacher did not score"),
    "distil/skipped_frac": Metric("fraction", "responses that no teacher judges"),
    "tokens/given": Metric("count", "tokens of answers that the policy did not sample, in a step"),
    "record/rows": Metric("count", "answers in a teacher's record"),
    "record/tokens": Metric("count", "tokens of answers in a teacher's record"),
    "record/files": Metric("count", "files of a teacher's record"),
    "distil/on_policy": Metric(
        "0 or 1", "whether the policy sampled the answers of the step; absent = always"
    ),
    "distil/context_too_long_frac": Metric(
        "fraction", "responses whose teacher would read more than max_model_len tokens"
    ),
    "distil/aligned_frac": Metric(
        "fraction", "sampled tokens in stretches that the teacher's tokenizer cuts out as well"
    ),
    "distil/tokens_per_stretch": Metric("tokens", "the policy's tokens of such a stretch, mean"),
    "distil/matched_mass": Metric(
        "fraction", "the policy's probability of tokens that the teacher has as well"
    ),
    "distil/teacher_version": Metric("count", "moves of a teacher that follows the policy"),
    "observed/nll": Metric("nats", "negative log-prob of a token that the environment wrote, mean"),
    "loss/sft": Metric("nats", "negative log-likelihood per response token"),
    "loss/preference": Metric("loss", "mean loss of preference pairs or labelled rows"),
    "grad/norm": Metric("norm", "L2 norm of the gradient before clipping"),
    "grad/non_finite": Metric(
        "count", "optimizer steps whose loss, gradient or weights were not finite; absent = none"
    ),
    "grad/clipped": Metric("0 or 1", "whether the gradient was scaled down"),
    "lr": Metric("rate", "learning rate of the step"),
    "mismatch/k1": Metric("nats", "engine against trainer on the same tokens, k1"),
    "mismatch/k3": Metric("nats", "engine against trainer on the same tokens, k3"),
    "mismatch/abs_max": Metric("nats", "largest difference of a token's log-prob"),
    "mismatch/abs_mean": Metric("nats", "mean absolute difference of log-probs"),
    "mismatch/prob_abs_max": Metric("probability", "largest difference of a token's"),
    "mismatch/ppl_ratio": Metric("ratio", "trainer's over engine's perplexity, mean over rows"),
    "mismatch/chi2_token": Metric("chi2", "mean squared token ratio, less 1"),
    "mismatch/chi2_seq": Metric("chi2", "mean squared ratio of whole responses, less 1"),
    "sync/probe_abs_max": Metric(
        "nats", "engine against trainer on the probe after a sync, largest"
    ),
    "sync/probe_abs_mean": Metric("nats", "the same, mean over the probe's tokens"),
    "sync/probe_change": Metric("nats", "how far the sync moved the probe's log-probs, mean"),
    "tis/clip_frac": Metric("fraction", "tokens whose importance weight was cut"),
    "mis/drop_frac": Metric("fraction", "tokens that a rollout correction drops"),
    "staleness/mean": Metric("updates", "mean age of the policy that sampled a token"),
    "staleness/max": Metric("updates", "largest age of the policy that sampled a token"),
    "ess/token": Metric("fraction", "effective sample size of the importance weights"),
    "ess/seq": Metric("fraction", "the same of the weights of whole responses"),
    "sampling/duplicate_frac": Metric("fraction", "responses that repeat one of their group"),
    "sampling/rounds": Metric("rounds", "rounds of sampling to fill the batch"),
    "sampling/acceptance": Metric("fraction", "groups of this step that were kept"),
    "sampling/prompts_drawn": Metric("prompts", "sampled in this step"),
    "sampling/dropped_all_right": Metric("groups", "dropped, every response right"),
    "sampling/dropped_all_wrong": Metric("groups", "dropped, no response right"),
    "sampling/dropped_equal": Metric("groups", "dropped, all with the same part marks"),
    "sampling/dropped_failed": Metric("groups", "dropped, every episode failed"),
    "sampling/dropped_stale": Metric("groups", "carried over and too old when needed"),
    "sampling/dropped_surplus": Metric("groups", "kept, and neither needed nor carried"),
    "sampling/carried_in": Metric("groups", "kept by an earlier step and used in this one"),
    "sampling/carried_out": Metric("groups", "kept for the next step"),
    "sampling/exhausted": Metric("0 or 1", "whether the rounds did not fill the batch"),
    "sampling/tokens_drawn": Metric("tokens", "response tokens sampled for the step"),
    "sampling/tokens_wasted": Metric("tokens", "of responses that were dropped"),
    "sampling/verdict_mean": Metric(
        "fraction", "mean verdict of all that was sampled, dropped groups included"
    ),
    "curriculum/known": Metric("problems", "whose pass rate has been measured"),
    "curriculum/unseen_frac": Metric("fraction", "prompts of the step that were never sampled"),
    "curriculum/inside_frac": Metric("fraction", "prompts of the step inside the target band"),
    "replay/taken_frac": Metric("fraction", "groups of the step that were sampled before"),
    "replay/buffer": Metric("groups", "kept for later steps"),
    "replay/admitted": Metric("groups", "of the step that went into the buffer"),
    "replay/expired": Metric("groups", "that left the buffer because of their age"),
    "replay/lag_mean": Metric("updates", "mean age of the policies of the replayed groups"),
    "replay/priority_mean": Metric("fraction", "mean spread of their verdicts"),
    "gateway/altered_frac": Metric(
        "fraction", "requests of programs that give answers back in other words than they read"
    ),
    "gateway/undelivered_frac": Metric(
        "fraction", "requests of programs that left before their answer, as a share of the others"
    ),
    "tools/turns": Metric("turns", "turns of the policy per response"),
    "tools/calls_per_response": Metric("calls", "tool calls per response"),
    "tools/failed_frac": Metric("fraction", "tool calls that failed or were malformed"),
    "env/outcome": Metric("reward", "mean score that the environment gave to an episode"),
    "env/failed_frac": Metric("fraction", "episodes that failed, and are not learned from"),
    "env/branches": Metric("responses", "branches of an episode, mean over episodes"),
    "stream/groups_waiting": Metric("groups", "done before the step asked for them"),
    "stream/groups_under_way": Metric("groups", "being sampled when the step began"),
    "stream/groups_dropped": Metric("groups", "sampled again, as they were older than allowed"),
    "stream/engine_busy_frac": Metric("fraction", "of the time since the last step"),
    "time/stream_wait_s": Metric("s", "that the step waited for groups"),
    "tree/leaves": Metric("responses", "leaves of a prompt's tree, mean over prompts"),
    "tree/branches": Metric("responses", "leaves that branched off another, mean over prompts"),
    "tree/topped_up": Metric("responses", "leaves sampled afresh at the end, mean over prompts"),
    "tree/shared_tokens_frac": Metric(
        "fraction", "sampled tokens that are copies of a prefix, not sampled again"
    ),
    "group/dropped_frac": Metric("fraction", "prompts that take no part in the update"),
    "guard/exceeded": Metric("count", "updates that found the KL guard's bound exceeded"),
    "guard/rate_factor": Metric("factor", "what the KL guard left of the learning rate"),
    "loss/prm": Metric("loss", "of the implicit process reward model: cross entropy of verdicts"),
    "prm/accuracy": Metric("fraction", "responses that it tells right or wrong, before its step"),
    "prm/logit": Metric("logit", "sum of its rewards over a response, mean over responses"),
    "prm/process_std": Metric("reward", "deviation of its rewards, leave-one-out, over tokens"),
    "prm/grad_norm": Metric("norm", "L2 norm of its gradient before clipping"),
    "prm/non_finite": Metric("count", "its optimizer steps that were not finite; absent = none"),
    "prm/lr": Metric("rate", "learning rate of its steps"),
    "loss/value": Metric("loss", "regression of the critic on the returns"),
    "value/ev": Metric(
        "fraction", "variance of the returns that the critic explained before its update"
    ),
    "value/mean": Metric("reward", "mean value over tokens that take loss"),
    "value/clip_frac": Metric("fraction", "tokens whose value loss the clip decided"),
    "value/grad_norm": Metric("norm", "L2 norm of the critic's gradient before clipping"),
    "value/non_finite": Metric("count", "the same of the critic's steps; absent = none"),
    "value/lr": Metric("rate", "learning rate of the critic's last step"),
    "trpo/kl": Metric("nats", "mean KL(old || new) of the step taken, exact over the vocabulary"),
    "trpo/improvement": Metric("loss", "what the step taken gained on the surrogate"),
    "trpo/expected": Metric("loss", "what its length times the slope promised"),
    "trpo/step_fraction": Metric("factor", "length of the step taken, in full steps; 0 = none"),
    "trpo/backtracks": Metric("count", "how often the step was shortened"),
    "trpo/rejected": Metric("0 or 1", "whether no length was good enough"),
    "trpo/skipped": Metric("0 or 1", "whether there was no gradient to follow"),
    "trpo/cg_residual": Metric("fraction", "what conjugate gradients left of the gradient's norm"),
    "value/pretraining": Metric("0 or 1", "whether only the critic was trained in this step"),
    "train/updates": Metric("count", "optimizer steps taken on the rollout batch"),
    "train/idle_rows": Metric(
        "count", "rows left out of an update because their advantages are 0 and nothing else counts"
    ),
    "train/reused_rows": Metric(
        "count", "rows whose linear outputs the update reused from sampling"
    ),
    "train/skipped_empty": Metric("count", "updates skipped because no token took loss"),
    # held-out evaluation
    "eval/greedy_accuracy": Metric("fraction", "greedy held-out accuracy"),
    "eval/greedy_low": Metric("fraction", "lower 95 % bound of the greedy accuracy"),
    "eval/greedy_high": Metric("fraction", "upper 95 % bound of the greedy accuracy"),
    "eval/sampled_accuracy": Metric("fraction", "mean sampled held-out accuracy"),
    "eval/sampled_low": Metric("fraction", "lower 95 % bound of the sampled accuracy"),
    "eval/sampled_high": Metric("fraction", "upper 95 % bound of the sampled accuracy"),
    "eval/sampled_problems": Metric("count", "held-out problems with sampled answers, in training"),
    "eval/failed_frac": Metric("fraction", "greedy episodes that failed, counted as wrong"),
    "eval/sampled_failed_frac": Metric("fraction", "sampled episodes that failed, likewise"),
    "eval/num_problems": Metric("count", "held-out problems evaluated"),
    "eval/gain": Metric("fraction", "greedy accuracy minus the baseline's"),
    "eval/gain_low": Metric("fraction", "lower 95 % bound of the gain"),
    "eval/gain_high": Metric("fraction", "upper 95 % bound of the gain"),
    "eval/sampled_gain": Metric("fraction", "sampled accuracy minus the baseline's, same problems"),
    "eval/sampled_gain_low": Metric("fraction", "lower 95 % bound of it"),
    "eval/sampled_gain_high": Metric("fraction", "upper 95 % bound of it"),
    # reward model
    "rm/pair_accuracy": Metric("fraction", "training pairs ranked right"),
    "rm/held_out_pair_accuracy": Metric("fraction", "held-out pairs ranked right"),
    "rm/held_out_low": Metric("fraction", "lower 95 % bound of it"),
    "rm/held_out_high": Metric("fraction", "upper 95 % bound of it"),
    "rm/margin": Metric("reward", "mean score of chosen minus rejected"),
    "rm/num_pairs": Metric("count", "training pairs"),
    "rm/num_held_out_pairs": Metric("count", "held-out pairs"),
    "rm/reward_mean": Metric("reward", "mean score of all answers of the pairs"),
    "rm/reward/min": Metric("reward", "smallest score of the step's answers"),
    "rm/reward/max": Metric("reward", "largest score of the step's answers"),
    # preference learning; chosen = desirable and rejected = undesirable where rows are labelled
    "rewards/chosen": Metric("reward", "implied reward beta * log-ratio of chosen"),
    "rewards/rejected": Metric("reward", "implied reward beta * log-ratio of rejected"),
    "rewards/margin": Metric("reward", "implied reward of chosen minus rejected"),
    "loss/process_reward": Metric("loss", "cross entropy of steps' labels, mean over steps"),
    "prm/step_accuracy": Metric("fraction", "training steps on the right side of 1/2"),
    "prm/score_mean": Metric("fraction", "mean probability that a training step is right"),
    "prm/label_mean": Metric("fraction", "mean label of the training steps"),
    "prm/held_out_step_accuracy": Metric("fraction", "held-out steps on the right side of 1/2"),
    "prm/held_out_low": Metric("fraction", "lower 95 % bound of it"),
    "prm/held_out_high": Metric("fraction", "upper 95 % bound of it"),
    "prm/held_out_order_accuracy": Metric(
        "fraction", "pairs of a better and a worse step of one problem, ordered rightly"
    ),
    "prm/num_steps": Metric("count", "training steps"),
    "prm/num_held_out_steps": Metric("count", "held-out steps"),
    "rewards/accuracy": Metric("fraction", "pairs whose chosen answer has more reward"),
    "logps/chosen": Metric("nats", "log-prob of the chosen answers, sum over tokens"),
    "logps/rejected": Metric("nats", "log-prob of the rejected answers, sum over tokens"),
    "logps/chosen_per_token": Metric("nats", "log-prob of chosen answers per token"),
    "logps/rejected_per_token": Metric("nats", "log-prob of rejected answers per token"),
    "logps/chosen_delta": Metric("nats", "log-prob of chosen less the reference's"),
    "logps/rejected_delta": Metric("nats", "log-prob of rejected less the reference's"),
    "pref/both_falling": Metric(
        "fraction", "pairs whose two answers are both less likely than under the reference"
    ),
    "pref/wpo_weight": Metric("factor", "mean weight of a pair under WPO"),
    "pref/log_odds": Metric("nats", "log odds ratio of chosen to rejected (ORPO)"),
    "pref/log_sigmoid_odds": Metric("nats", "logsigmoid of the log odds ratio (ORPO)"),
    "pref/held_out_pair_accuracy": Metric("fraction", "held-out pairs ranked right"),
    "pref/held_out_row_accuracy": Metric(
        "fraction", "held-out labelled answers whose reward has the sign of the label"
    ),
    "pref/held_out_low": Metric("fraction", "lower 95 % bound of it"),
    "pref/held_out_high": Metric("fraction", "upper 95 % bound of it"),
    "pref/held_out_margin": Metric("reward", "mean held-out reward margin"),
    "pref/num_rows": Metric("count", "training pairs or labelled rows"),
    "pref/num_held_out_rows": Metric("count", "held-out pairs or labelled rows"),
    # answers of the policy that a round of `online` pairs
    "online/accuracy": Metric("fraction", "mean verdict on the answers of a round"),
    "online/reward_mean": Metric("reward", "mean of the scores that rank a round's answers"),
    "online/num_pairs": Metric("count", "pairs of a round"),
    "online/prompts_with_pairs": Metric("fraction", "prompts of a round that gave a pair"),
    "online/response_length": Metric("tokens", "mean length of a round's answers"),
    "online/rounds_without_pairs": Metric("count", "rounds so far whose steps were skipped"),
    "kto/z_ref": Metric("nats", "KTO's reference point: estimated KL from the reference"),
    # a data set rewritten for integer answers
    "transform/num_problems": Metric("count", "problems that were looked at"),
    "transform/kept": Metric("count", "problems in the data set that was made"),
    "transform/kept_frac": Metric("fraction", "of the problems looked at"),
    "transform/by_unchanged": Metric("count", "kept, because the answer was an integer already"),
    "transform/by_rule": Metric("count", "kept, rewritten by rule and checked by arithmetic"),
    "transform/by_model": Metric("count", "kept, rewritten by the model and solved by it"),
    "transform/agreement": Metric(
        "fraction", "mean share of the model's solutions that gave the answer it claimed"
    ),
    # gates, promotion and rows that came since
    "approve/approved": Metric("flag", "1 when the model was approved, 0 when it was rejected"),
    "promote/promoted": Metric("flag", "1 when the model is the champion now"),
    "promote/difference": Metric("fraction", "model minus champion, same problems"),
    "promote/low": Metric("fraction", "lower 95 % bound of the paired difference"),
    "promote/high": Metric("fraction", "upper 95 % bound of the paired difference"),
    "promote/gained": Metric("count", "problems only the model solves"),
    "promote/lost": Metric("count", "problems only the champion solves"),
    "new_data/rows": Metric("count", "rows no earlier run was trained on"),
    # rows longer than max_model_len
    "data/overlong_dropped": Metric("count", "training rows left out because of their length"),
    "data/overlong_truncated": Metric("count", "training rows cut to the length limit"),
    "prompts/overlong_dropped": Metric("count", "prompts for the model's own answers left out"),
    "prompts/overlong_truncated": Metric("count", "prompts for the model's own answers cut"),
    "ptx/overlong_dropped": Metric("count", "examples of the term `ptx` left out"),
    "ptx/overlong_truncated": Metric("count", "examples of the term `ptx` cut"),
    "eval/overlong_dropped": Metric("count", "held-out prompts left out because of their length"),
    "eval/overlong_truncated": Metric("count", "held-out prompts cut to the length limit"),
    # supervised fine-tuning
    "sft/loss": Metric("nats", "negative log-likelihood per response token"),
    "sft/nll": Metric("nats", "the same without the weights of `weighting`"),
    "sft/held_out_loss": Metric("nats", "negative log-likelihood per held-out token"),
    "sft/held_out_perplexity": Metric("ratio", "exp of the held-out loss"),
    "sft/best_step": Metric("step", "optimizer step of the lowest held-out loss"),
    "sft/stopped_early": Metric("flag", "1 when the held-out loss ended training"),
    "data/num_rows": Metric("count", "training rows of all sources"),
    "data/num_held_out_rows": Metric("count", "held-out rows"),
    "data/num_tokens": Metric("tokens", "of the training rows"),
    "data/num_learned_tokens": Metric("tokens", "of the training rows, those that take loss"),
    "data/nothing_to_learn": Metric("count", "rows left out, without a message to learn from"),
    "data/also_held_out": Metric("count", "training rows left out that are held out as well"),
    # where the time goes
    "time/rollout_s": Metric("s", "sampling responses"),
    "time/rollout_wait_s": Metric("s", "waiting for rollouts sampled next to the update"),
    "time/score_s": Metric("s", "scoring responses"),
    "time/teacher_s": Metric("s", "asking the teachers, within advantages or update"),
    "time/advantage_s": Metric("s", "computing advantages"),
    "time/update_s": Metric("s", "updating the policy"),
    "time/sync_s": Metric("s", "giving the engine the new weights"),
    "time/sync_check_s": Metric("s", "checking that the engine has them"),
    "time/evaluate_s": Metric("s", "evaluating on held-out problems"),
    "time/evaluate_sampled_s": Metric("s", "sampling answers for avg@k and pass@k"),
    "time/checkpoint_s": Metric("s", "writing a checkpoint"),
    "time/record_s": Metric("s", "recording the step for a replay"),
    "time/step_s": Metric("s", "the whole step"),
    "time/overhead_ms": Metric("ms", "of the step outside all phases"),
    "throughput/rollout_tokens_per_s": Metric("tokens/s", "response tokens sampled"),
    "throughput/update_tokens_per_s": Metric("tokens/s", "response tokens trained on"),
    "tokens/response": Metric("tokens", "response tokens of the step"),
    "tokens/total": Metric("tokens", "prompt and response tokens of the step"),
    "memory/rank_peak_gb": Metric("GB", "peak memory of the learner's first rank"),
    "memory/peak_gb": Metric("GB", "peak memory of the process or the device"),
    # d loss / d log-prob of each token of an optimizer step; means over the step's optimizer steps
    "token_weight/max": Metric("loss/nat", "largest |d loss / d log-prob| of a token in the step"),
    "token_weight/p99": Metric("loss/nat", "99 % of the tokens with a weight have at most this"),
    "token_weight/p50": Metric("loss/nat", "median |weight| of the tokens with a weight"),
    "token_weight/peak": Metric("ratio", "largest |weight| over the mean of those not 0"),
    "token_weight/zero_frac": Metric("fraction", "tokens that take loss and have weight 0"),
    "token_weight/effective": Metric("tokens", "(sum |w|)^2 / sum w^2, the effective number"),
    "token_weight/effective_frac": Metric(
        "fraction", "effective number of tokens, of those that take loss"
    ),
    "token_weight/length_slope": Metric(
        "slope", "of ln(mean |weight| of a response) over ln(its tokens); -1: twice as long, half"
    ),
    "token_weight/share/positive": Metric("fraction", "of the |weight|, advantage above 0"),
    "token_weight/share/negative": Metric("fraction", "of the |weight|, advantage below 0"),
    "token_weight/share/bounded": Metric("fraction", "of the |weight|, where a bound acts (clip)"),
    "token_weight/share/short": Metric("fraction", "of the |weight|, lower third of the lengths"),
    "token_weight/share/medium": Metric("fraction", "of the |weight|, middle third of the lengths"),
    "token_weight/share/long": Metric("fraction", "of the |weight|, upper third of the lengths"),
    "token_weight/share/early": Metric("fraction", "of the |weight|, first third of each response"),
    "token_weight/share/middle": Metric("fraction", "of the |weight|, middle third of each"),
    "token_weight/share/late": Metric("fraction", "of the |weight|, last third of each response"),
}

PREFIXES: dict[str, Metric] = {
    "alarm/": Metric("0 or 1", "1 at steps at which the alarm of this name goes off"),
    "is_weight/": Metric("as named", "statistic of the rollout correction's weights"),
    "reject/": Metric("as named", "statistic of a rejection of the rollout correction"),
    "distil/tokens/": Metric("tokens", "sampled tokens that this teacher scored"),
    "distil/rollout_kl/": Metric("nats", "distil/rollout_kl of the responses it judges"),
    "reward/component/": Metric("reward", "mean of one reward before its weight"),
    "acc/task/": Metric("fraction", "verdict on the problems of one task of a mixture, sampled"),
    "eval/task_accuracy/": Metric("fraction", "greedy held-out accuracy on one task of a mixture"),
    "eval/task_low/": Metric("fraction", "lower 95 % bound of it"),
    "eval/task_high/": Metric("fraction", "upper 95 % bound of it"),
    "progress/share/": Metric("fraction", "prompts of the step that are of this task"),
    "progress/pass_rate/": Metric("fraction", "running verdict on this task, of the last steps"),
    "progress/change/": Metric("fraction", "pass rate of the last steps less that of more steps"),
    "reward/failed_frac/": Metric("fraction", "responses one reward failed on"),
    "reward/component_std/": Metric("reward", "standard deviation of it over responses"),
    "loss/term/": Metric("loss", "one term of the loss in addition to the first, factor included"),
    "loss/coef/": Metric("factor", "coefficient of a term of the loss, where it moves by step"),
    "eval/pass_at/": Metric("fraction", "problems solved in k samples, unbiased"),
    "eval/pass_at_se/": Metric("fraction", "standard error of it over problems"),
    "eval/pass_at_low/": Metric("fraction", "lower 95 % bound of it over problems"),
    "eval/pass_at_high/": Metric("fraction", "upper 95 % bound of it over problems"),
    "eval/avg_at_low/": Metric("fraction", "lower 95 % bound of avg@k over problems"),
    "eval/avg_at_high/": Metric("fraction", "upper 95 % bound of avg@k over problems"),
    "eval/avg_at/": Metric("fraction", "mean verdict of the first k samples"),
    "eval/avg_at_se/": Metric("fraction", "standard error of it over problems"),
    "eval/maj_at/": Metric("fraction", "most frequent of k answers is right"),
    "eval/maj_at_se/": Metric("fraction", "standard error of it over problems"),
    "eval/rm_at/": Metric("fraction", "the reward model's best of k answers is right"),
    "eval/rm_at_se/": Metric("fraction", "standard error of it over problems"),
    "eval/rm_gain_at/": Metric("fraction", "rm@k minus the right share of the same answers"),
    "eval/rm_gain_at_low/": Metric("fraction", "lower 95 % bound of it over problems"),
    "eval/rm_gain_at_high/": Metric("fraction", "upper 95 % bound of it over problems"),
    "curriculum/pass_rate/": Metric(
        "fraction", "mean verdict of the prompts that were in this band, or unseen, before"
    ),
    "curriculum/known_frac/": Metric("fraction", "known problems in this band"),
    "env/reward/": Metric("reward", "one part of the environment's score, mean over episodes"),
    "env/metric/": Metric("as named", "a metric of the environment, mean over episodes"),
    "suite/": Metric("as its benchmark says", "HARNESS/TASK/METRIC of a benchmark suite"),
    "suite_low/": Metric("as its benchmark says", "lower 95 % bound of it"),
    "suite_high/": Metric("as its benchmark says", "upper 95 % bound of it"),
    "transform/dropped/": Metric("count", "problems dropped for this reason"),
    "plugin/": Metric("as its plugin says", "measured by a third party's plugin"),
}


def find_metric(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    fits = (m for prefix, m in PREFIXES.items() if name.startswith(prefix) and name != prefix)
    return next(fits, None)


def check_names(names: Iterable[str]) -> None:
    """Raise `RunError` for the first name that is not a metric, with the nearest that is."""
    for name in names:
        if name not in METRICS and find_metric(name) is None:
            raise RunError(
                f"unknown metric '{name}'{nearest(name, METRICS)}: add it to "
                f"posttrain.core.tracking.metric_names, or start it with one of {sorted(PREFIXES)}"
            )


MAX_KEYS_PER_STEP = 100
ALARM = "alarm/"
TOKEN_WEIGHT = "token_weight/"
"""They are the same in every step, and take no room from the metrics of losses and plugins."""
_RANKS = {name: rank for rank, name in enumerate(METRICS)}


def left_out(names: Iterable[str]) -> tuple[str, ...]:
    """The names beyond the first 100, sorted: alarms first, then in the catalogue's order.

    Those of token weights do not count.
    """

    def rank(name: str) -> tuple[bool, int, str]:
        return not name.startswith(ALARM), _RANKS.get(name, len(_RANKS)), name

    counted = (name for name in names if not name.startswith(TOKEN_WEIGHT))
    return tuple(sorted(sorted(counted, key=rank)[MAX_KEYS_PER_STEP:]))
