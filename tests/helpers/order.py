"""In which order files of tests run, and which of them one worker runs one after another."""

from __future__ import annotations

LONG = (
    "tests/contract/test_engines.py",
    "tests/e2e/test_interruption.py",
    "tests/e2e/test_comparing.py",
    "tests/e2e/test_python_api.py",
    "tests/e2e/test_screens.py",
    "tests/contract/test_ranks.py",
    "tests/e2e/test_promotion.py",
    "tests/e2e/test_sweep.py",
    "tests/contract/test_plugins.py",
    "tests/e2e/test_pipeline.py",
    "tests/contract/test_cluster_weights.py",
    "tests/contract/test_cluster_faults.py",
    "tests/unit/test_tracking_outage.py",
    "tests/contract/test_imports.py",
    "tests/e2e/test_after_training.py",
    "tests/unit/environments/test_mcp.py",
    "tests/e2e/test_fork.py",
    "tests/contract/test_ranks_end.py",
    "tests/e2e/test_prefect_outage.py",
    "tests/e2e/test_mlflow_away.py",
    "tests/contract/test_mismatch.py",
    "tests/unit/test_bad_input_fuzz.py",
    "tests/unit/sandbox/test_sessions.py",
    "tests/unit/training/test_natural_gradient.py",
    "tests/e2e/test_verify.py",
    "tests/unit/teaching/test_learner.py",
    "tests/unit/preference/test_stages.py",
    "tests/e2e/test_mismatch.py",
    "tests/contract/test_server_replicas.py",
    "tests/contract/test_token_weights.py",
    "tests/unit/sandbox/test_escapes.py",
    "tests/unit/test_own_server.py",
    "tests/contract/test_env_check.py",
    "tests/unit/training/test_head_blocks.py",
    "tests/contract/test_copies.py",
    "tests/unit/training/test_compiled.py",
    "tests/e2e/test_reward_failures.py",
    "tests/unit/test_bad_input_kinds.py",
    "tests/unit/training/test_sampled_outputs.py",
    "tests/contract/test_kit.py",
    "tests/unit/test_allocator.py",
    "tests/unit/test_tables.py",
    "tests/contract/test_live_episodes.py",
    "tests/unit/training/test_architectures.py",
    "tests/unit/test_docs_site.py",
    "tests/unit/preference/test_training_step.py",
    "tests/unit/estimate/test_estimate.py",
    "tests/unit/test_device_limit.py",
    "tests/contract/test_remote_code.py",
    "tests/contract/test_tracking.py",
    "tests/unit/sandbox/test_sandbox.py",
    "tests/e2e/test_local_plugins.py",
    "tests/e2e/test_distillation_learns.py",
    "tests/unit/environments/test_terminal.py",
    "tests/unit/test_lighter_imports.py",
    "tests/unit/training/test_speed_options.py",
    "tests/unit/test_url_store.py",
    "tests/e2e/test_ends.py",
    "tests/e2e/test_tutorials.py",
    "tests/e2e/test_plugin_stages.py",
    "tests/e2e/test_secrets.py",
    "tests/contract/test_reward_pool.py",
    "tests/e2e/test_replay.py",
    "tests/unit/test_sequential.py",
    "tests/unit/test_template.py",
    "tests/e2e/test_own_answers.py",
    "tests/unit/test_services_dead_runs.py",
    "tests/e2e/test_distill_stages.py",
    "tests/unit/test_data_checks.py",
    "tests/contract/test_renderers.py",
    "tests/unit/training/test_flex_stream.py",
    "tests/unit/test_model_source.py",
    "tests/unit/test_tool_calls.py",
    "tests/e2e/test_numbers.py",
    "tests/contract/test_harnesses.py",
    "tests/e2e/test_events.py",
    "tests/unit/test_learner_terms.py",
)
"""Files that take 15 s or more, the longest first.

They run before all others, so that no worker has a long one left at the end while others have
nothing to do. Files that are not named run after these in the order of their names.
"""

TOGETHER = {
    "running_nodes": (
        "tests/contract/test_environment_nodes.py",
        "tests/contract/test_score_pools.py",
        "tests/e2e/test_cluster_pools.py",
    ),
    "services": (
        "tests/e2e/test_services.py",
        "tests/e2e/test_services_device_limit.py",
        "tests/e2e/test_suspension.py",
        "tests/e2e/test_sweep_work_pool.py",
    ),
}
"""Fixtures that start many processes, and the files that use them one after another. Before the
next other file they end, as servers take processor time also where nobody asks them."""

UNITS = {file: fixture for fixture, files in TOGETHER.items() for file in files}
FIRST = [*UNITS, *LONG]


def rank(file: str) -> int:
    """Where a file comes; those of one rank stay in their order."""
    return FIRST.index(file) if file in FIRST else len(FIRST)


def unit_of(nodeid: str) -> str:
    """What a test is given to a worker with: its file, or all files with one of these fixtures."""
    file = nodeid.split("::", 1)[0]
    return UNITS.get(file, file)
