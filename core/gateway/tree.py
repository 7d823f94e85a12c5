"""The tokens of an episode's calls, each distinct prefix once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.core.types import Completion

NOBODY = -1


@dataclass
class TokenTree:
    """A node is a token after all those before it; 0 is the root, before the first token.

    `by` is the call that sampled a token, `NOBODY` for what the program or the template wrote. A
    token that was context and is sampled at the same place later counts as sampled; of one that is
    sampled twice the first call is kept, and `repeats` counts it.
    """

    parent: list[int] = field(default_factory=lambda: [-1])
    token: list[int] = field(default_factory=lambda: [-1])
    by: list[int] = field(default_factory=lambda: [NOBODY])
    logprob: list[float] = field(default_factory=lambda: [0.0])
    version: list[int] = field(default_factory=lambda: [-1])
    repeats: int = 0
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _has_child: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.token) - 1

    def add(self, call: int, prompt: Sequence[int], sampled: Completion) -> tuple[int, int]:
        """Add a call; returns the nodes at the end of its prompt and of what it sampled."""
        node = 0
        for token in prompt:
            node = self._child(node, token)
        start = node
        versions = sampled.versions or (sampled.policy_version,) * len(sampled.token_ids)
        drawn = zip(sampled.token_ids, sampled.logprobs, versions, strict=True)
        for token, logprob, version in drawn:
            node = self._child(node, token)
            if self.by[node] == NOBODY:
                self.by[node], self.logprob[node], self.version[node] = call, logprob, version
            else:
                self.repeats += 1
        return start, node

    def is_leaf(self, node: int) -> bool:
        """Whether no call goes on after `node`."""
        return node not in self._has_child

    def path(self, node: int) -> list[int]:
        """Nodes from the first token to `node`."""
        found = []
        while node:
            found.append(node)
            node = self.parent[node]
        return found[::-1]

    def _child(self, node: int, token: int) -> int:
        child = self._children.get((node, token))
        if child is None:
            child = len(self.token)
            self._children[node, token] = child
            self._has_child.add(node)
            self.parent.append(node)
            self.token.append(token)
            self.by.append(NOBODY)
            self.logprob.append(0.0)
            self.version.append(-1)
        return child
