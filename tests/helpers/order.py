"""In which order files of tests run, and which of them one worker runs one after another."""

from __future__ import annotations

LONG = (
    "tests/contract/test_engines.py",
    "tests/e2e/test_presets_learn.py",
    "tests/e2e/test_comparing.py",
    "tests/e2e/test_interruption.py",
    "tests/e2e/test_sweep.py",
    "tests/e2e/test_python_api.py",
    "tests/unit/test_tracking_outage.py",
    "tests/e2e/test_pipeline.py",
    "tests/e2e/test_prefect_outage.py",
    "tests/e2e/test_mlflow_away.py",
    "tests/contract/test_plugins.py",
    "tests/contract/test_cluster_weights.py",
    "tests/contract/test_ranks.py",
    "tests/e2e/test_distillation_learns.py",
    "tests/unit/test_cli_bad_input.py",
    "tests/unit/sandbox/test_escapes.py",
    "tests/e2e/test_verify.py",
    "tests/unit/environments/test_mcp.py",
    "tests/unit/sandbox/test_sessions.py",
    "tests/contract/test_env_check.py",
    "tests/contract/test_live_episodes.py",
    "tests/unit/test_url_store.py",
    "tests/unit/training/test_natural_gradient.py",
    "tests/e2e/test_secrets.py",
    "tests/e2e/test_fork.py",
    "tests/unit/preference/test_stages.py",
    "tests/unit/test_bad_input_kinds.py",
    "tests/e2e/test_after_training.py",
    "tests/e2e/test_promotion.py",
    "tests/e2e/test_local_plugins.py",
    "tests/unit/test_bad_input_fuzz.py",
    "tests/unit/estimate/test_estimate.py",
    "tests/contract/test_server_replicas.py",
    "tests/unit/training/test_speed_options.py",
    "tests/e2e/test_replay.py",
    "tests/unit/test_tracking_store.py",
    "tests/contract/test_reward_pool.py",
    "tests/unit/environments/test_terminal.py",
    "tests/unit/test_serving.py",
    "tests/unit/test_own_server.py",
    "tests/contract/test_gateway.py",
    "tests/unit/test_data_checks.py",
    "tests/unit/test_template.py",
    "tests/e2e/test_plugin_stages.py",
    "tests/unit/policy_losses/test_invariance.py",
    "tests/unit/test_answer_cases.py",
    "tests/contract/test_renderers.py",
    "tests/contract/test_tracking.py",
    "tests/unit/training/test_architectures.py",
    "tests/unit/test_docs_site.py",
    "tests/e2e/test_numbers.py",
    "tests/e2e/test_mismatch.py",
    "tests/contract/test_imports.py",
    "tests/unit/test_allocator.py",
    "tests/contract/test_token_weights.py",
    "tests/contract/test_ranks_end.py",
    "tests/unit/test_rewards_code_tests.py",
    "tests/e2e/test_tutorials.py",
    "tests/unit/tools/test_arpo_tree.py",
    "tests/unit/training/test_flex_stream.py",
    "tests/e2e/test_ends.py",
    "tests/contract/test_remote_code.py",
    "tests/contract/test_harnesses.py",
    "tests/contract/test_copies.py",
)
"""Files that take 10 s or more, the longest first.

They run before all others, so that no worker has a long one left at the end while others have
nothing to do. Files that are not named run after these in the order of their names.
"""

TOGETHER = {
    "running_nodes": (
        "tests/contract/test_environment_nodes.py",
        "tests/contract/test_score_pools.py",
        "tests/e2e/test_cluster_pools.py",
        "tests/contract/test_ranks_on_nodes.py",
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
