"""The tokens of an episode's calls, each distinct prefix once."""

from __future__ import annotations

from array import array
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

    parent: array[int] = field(default_factory=lambda: array("i", [-1]))
    token: array[int] = field(default_factory=lambda: array("i", [-1]))
    by: array[int] = field(default_factory=lambda: array("i", [NOBODY]))
    logprob: array[float] = field(default_factory=lambda: array("d", [0.0]))
    version: array[int] = field(default_factory=lambda: array("i", [-1]))
    repeats: int = 0
    # Of most nodes the only child is the next node; all other children are here.
    _others: dict[tuple[int, int], int] = field(default_factory=dict)
    _with_others: set[int] = field(default_factory=set)

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
        return not self._has_next(node) and node not in self._with_others

    def path(self, node: int) -> list[int]:
        """Nodes from the first token to `node`."""
        found = []
        while node:
            found.append(node)
            node = self.parent[node]
        return found[::-1]

    def tokens(self, node: int) -> tuple[int, ...]:
        """Token ids from the first to `node`."""
        return tuple(self.token[each] for each in self.path(node))

    def _has_next(self, node: int) -> bool:
        return node + 1 < len(self.parent) and self.parent[node + 1] == node

    def _child(self, node: int, token: int) -> int:
        following = self._has_next(node)
        if following and self.token[node + 1] == token:
            return node + 1
        child = self._others.get((node, token)) if node in self._with_others else None
        if child is None:
            child = len(self.token)
            if child != node + 1:
                self._others[node, token] = child
                self._with_others.add(node)
            self.parent.append(node)
            self.token.append(token)
            self.by.append(NOBODY)
            self.logprob.append(0.0)
            self.version.append(-1)
        return child
