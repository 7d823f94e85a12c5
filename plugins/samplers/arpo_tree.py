"""ARPO's tree: responses branch after tool results that leave the policy uncertain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from posttrain.core.contracts import (
    PluginConfig,
    PromptGroup,
    RolloutRequest,
    SampledGroup,
    SampledRollout,
    Sampler,
)
from posttrain.core.contracts.rollout import Episode
from posttrain.core.errors import ConfigError
from posttrain.core.rollout.turns import completion_of
from posttrain.core.runtime.seeding import derive_seed


class ArpoTreeConfig(PluginConfig):
    """Settings of `arpo_tree`. The budget M, leaves per prompt, is the stage's num_generations."""

    initial: int | None = Field(
        default=None,
        ge=1,
        description="N, responses to begin with; null = half of num_generations (paper: 8 of 16)",
    )
    beam: int = Field(
        default=2,
        ge=2,
        le=100_000,
        description="Z, responses that go on from a branching point, at most",
    )
    alpha: float = Field(default=0.5, ge=0, le=1, description="probability to branch at dH = 0")
    beta: float = Field(
        default=0.2, ge=0, le=1_000, description="what a rise of the entropy adds to it"
    )
    tau: float = Field(
        default=0.5, ge=0, le=1, description="of branch_mode threshold: branch where P > tau"
    )
    entropy_tokens: int = Field(
        default=20, ge=1, description="k, tokens after a tool result whose entropy is read"
    )
    branch_mode: Literal["stochastic", "threshold"] = Field(
        default="stochastic",
        description="each of Z - 1 copies with probability P (released code), or all where P > tau "
        "(paper)",
    )


@dataclass(slots=True)
class _Leaf:
    """A response in progress; `initial` is the H_init of its root, once that is known."""

    episode: Episode
    initial: float | None = None
    at_branch: bool = False
    """Whether it stands where it branched off: that node has been decided on."""


@dataclass(slots=True)
class _Tree:
    """The leaves of one prompt."""

    prompt: PromptGroup
    leaves: list[_Leaf] = field(default_factory=list)
    branches: int = 0
    topped_up: int = 0


class ArpoTreeSampler(Sampler[ArpoTreeConfig]):
    """P_t = alpha + beta (H_t - H_init): the chance to branch after tool result t.

    H is the mean entropy of a turn's first k tokens over ln V: exact where the engine knows the
    whole distribution, else over its 20 likeliest tokens, renormalised. H_init is that of the
    response's first turn, for a branch its root's. N responses begin; a branch goes on from just
    after the tool result, next to the response whose k tokens were read, and may itself branch
    after its next result. No prompt gets more than M leaves; when all are done, fresh responses
    to the prompt fill what is left. M = N is plain sampling. All chance comes from the seed.

    A prefix is copied with its log-probs, and `node_id` has one number for it in all its copies.
    Source: ARPO, arXiv:2507.19849, section 3.1; its released code for the stochastic mode.
    """

    name = "arpo_tree"
    Config = ArpoTreeConfig
    adds_columns = frozenset({"node_id"})
    needs_environment = True

    def refuses(self, num_generations: int) -> str:
        """A tree that begins with more leaves than it may have."""
        initial = self.config.initial
        if initial is None or initial <= num_generations:
            return ""
        return (
            f"'{self.name}' begins with initial: {initial} responses, but a prompt has only "
            f"num_generations: {num_generations}; lower one or raise the other"
        )

    def sample(self, request: RolloutRequest) -> SampledRollout:
        """M leaves for each prompt, in order, and what the trees are like."""
        if request.episodes is None:
            raise ConfigError(
                f"sampler '{self.name}' branches after observations, which only an environment "
                "gives: add `environment` to the stage, or set sampler: group"
            )
        budget = request.params.num_generations
        initial = min(self.config.initial or math.ceil(budget / 2), budget)
        trees = [_Tree(prompt) for prompt in request.prompts]
        for tree in trees:
            tree.leaves = [_Leaf(request.episodes.open(tree.prompt)) for _ in range(initial)]
        number = 0
        while any(self._going(tree) for tree in trees):
            request.check()
            self._round(request, trees, budget, number)
            for tree in trees:
                if not self._going(tree):
                    missing = budget - len(tree.leaves)
                    tree.leaves += [
                        _Leaf(request.episodes.open(tree.prompt)) for _ in range(missing)
                    ]
                    tree.topped_up += missing
            number += 1
        groups = [_group(tree) for tree in trees]
        return SampledRollout(groups, _metrics(trees, groups))

    def _going(self, tree: _Tree) -> list[_Leaf]:
        return [leaf for leaf in tree.leaves if leaf.episode.finish_reason is None]

    def _round(
        self, request: RolloutRequest, trees: Sequence[_Tree], budget: int, number: int
    ) -> None:
        """One turn of every unfinished leaf of every tree, and the branches that it calls for."""
        assert request.episodes is not None
        going = [(tree, leaf) for tree in trees for leaf in self._going(tree)]
        params = replace(request.params, entropy=True)
        before = [leaf.episode for _, leaf in going]
        after = request.episodes.advance(request.engine, before, params, number)
        scale = math.log(request.episodes.vocabulary_size)
        for (tree, leaf), old, new in zip(going, before, after, strict=True):
            leaf.episode, at_branch, leaf.at_branch = new, leaf.at_branch, False
            turn = new.turns[-1]
            read = turn.entropies[: self.config.entropy_tokens]
            entropy = sum(read) / max(1, len(read)) / scale
            if leaf.initial is None:
                leaf.initial = entropy
            elif not at_branch:
                wanted = self._copies(entropy - leaf.initial, turn.seed)
                copies = min(wanted, budget - len(tree.leaves))
                tree.leaves += [_Leaf(old, leaf.initial, at_branch=True) for _ in range(copies)]
                tree.branches += copies

    def _copies(self, rise: float, seed: int) -> int:
        """How many branches go on from a tool result, were there room for all."""
        config = self.config
        chance = config.alpha + config.beta * rise
        copies = range(config.beam - 1)
        if config.branch_mode == "threshold":
            return len(copies) if chance > config.tau else 0
        return sum(derive_seed(seed, "branch", copy) / 2**63 < chance for copy in copies)


def _group(tree: _Tree) -> SampledGroup:
    nodes: dict[int, int] = {}
    leaves = (completion_of(leaf.episode, nodes) for leaf in tree.leaves)
    return SampledGroup(tree.prompt, tuple(leaves))


def _metrics(trees: Sequence[_Tree], groups: Sequence[SampledGroup]) -> dict[str, float]:
    """Size and shape of the trees."""
    total = distinct = 0
    for tree in trees:
        segments = [s for leaf in tree.leaves for s in leaf.episode.segments if s.turn is not None]
        total += sum(len(s.token_ids) for s in segments)
        distinct += sum(len(s.token_ids) for s in {id(s): s for s in segments}.values())
    return {
        "tree/leaves": sum(len(group.completions) for group in groups) / len(groups),
        "tree/branches": sum(tree.branches for tree in trees) / len(trees),
        "tree/topped_up": sum(tree.topped_up for tree in trees) / len(trees),
        "tree/shared_tokens_frac": 1.0 - distinct / max(1, total),
    }
