"""The teachers of a stage in the YAML: where each of them is, and which responses it judges."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from posttrain.core.config.base import Section

TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$", max_length=100)]
TEACHER = "teacher"
"""The input that is a teacher without being listed."""


class OwnTeacherSection(Section):
    """The policy as its own teacher: it judges the same response after a longer prompt."""

    weights: Literal["base", "live", "ema"] = Field(
        default="ema",
        description="base: the stage's input, frozen; live: the policy as it is; ema: a moving "
        "average of it",
    )
    ema_rate: float = Field(
        default=0.05, gt=0, le=1, description="share of the policy in ema, each optimizer step"
    )
    context: Literal["worked", "metadata", "sibling"] = Field(
        default="worked",
        description="what it reads in addition: the problem's worked answer; a field of its "
        "metadata; the first other response of the group that succeeded",
    )
    field: str | None = Field(
        default=None, min_length=1, description="of the metadata, with context: metadata"
    )
    min_reward: float = Field(
        default=1.0,
        ge=-1_000_000,
        le=1_000_000,
        description="with context: sibling, the reward from which a response has succeeded",
    )
    template: str = Field(
        default="{prompt}\n\n{context}",
        max_length=100_000,
        description="the question that it reads, in place of the last one of the prompt",
    )

    @model_validator(mode="after")
    def _fits(self) -> OwnTeacherSection:
        if "{context}" not in self.template or "{prompt}" not in self.template:
            raise ValueError(
                "the template needs the places {prompt} and {context}, such as "
                "'{prompt}\\n\\n{context}'"
            )
        if (self.context == "metadata") is (self.field is None):
            raise ValueError(
                "`field` names a field of the problems' metadata, and belongs to context: metadata "
                "alone"
            )
        return self


class TeacherSection(Section):
    """A model whose probabilities the policy learns from: an input of the stage, of the teacher's
    name, unless it is a folder, a server or the policy itself.
    """

    model: str | None = Field(
        default=None,
        min_length=1,
        description="directory with config.json and *.safetensors; with base_url, the name that "
        "the server gives the model; null = the input of the teacher's name",
    )
    policy: OwnTeacherSection | None = Field(
        default=None,
        description="the policy itself, which reads a context that it has not when it samples",
    )
    base_url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="of a vLLM server, such as http://127.0.0.1:8000/v1, which is asked for "
        "`prompt_logprobs`",
    )
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="environment variable that holds the server's key; null = no key",
    )
    timeout_s: float = Field(
        default=120.0, gt=0, le=86_400, description="seconds that the server may take to answer"
    )
    at_once: int = Field(default=16, ge=1, le=10_000, description="requests to the server at once")
    routes: tuple[str, ...] = Field(
        default=(),
        description="values of `teacher_routing.by` that it teaches; empty = its own name",
    )

    @model_validator(mode="after")
    def _fits(self) -> TeacherSection:
        parts = urlsplit(self.base_url or "")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("a URL is logged, so it holds no key: name a variable in api_key_env")
        if self.base_url is not None and self.model is None:
            raise ValueError("a server needs `model`, the name that it gives the teacher")
        if self.base_url is None and self.api_key_env is not None:
            raise ValueError("api_key_env is of a server; set base_url, or remove it")
        if self.policy is not None and (self.model is not None or self.base_url is not None):
            raise ValueError(
                "a teacher is the policy, or a model, or behind a server; keep one of `policy`, "
                "`model` and `base_url`"
            )
        return self

    @property
    def is_input(self) -> bool:
        """Whether it is what another stage made."""
        return self.model is None and self.policy is None

    @property
    def weights(self) -> Literal["base", "live", "ema"] | None:
        """Which weights of the policy it has; None if it is another model."""
        return None if self.policy is None else self.policy.weights

    @property
    def folder(self) -> str | None:
        """Where its weights are, if the config says so."""
        return self.model if self.base_url is None else None


class RoutingSection(Section):
    """Which teacher a response is judged by: one of the problem's own fields says it."""

    by: str = Field(
        min_length=1, description="field of a problem's metadata, whose values are in `routes`"
    )
    unknown: Literal["error", "skip"] = Field(
        default="error",
        description="a problem that has another value there, or none: stop, or learn nothing from "
        "the teachers on it",
    )
    balance: Literal["tokens", "equal"] = Field(
        default="tokens",
        description="tokens: a teacher counts as much as what it judges; equal: the average over "
        "each teacher's responses counts 1 / number of teachers, in terms that read teachers alone",
    )
