"""What ranks on machines without a common file system are given: inputs and plugins' files.

Models and data go through the run's store, which has a URL: pushed once by digest, and fetched once
on each machine. Plugins' files are small and go with the message that starts a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from posttrain.core.config.base import StageBase
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.models.source import directory_digest
from posttrain.core.runtime.files import whole_folder
from posttrain.core.runtime.sources import files_of
from posttrain.core.store import urls
from posttrain.core.store.manifests import combine_digests
from posttrain.core.store.mirror import Mirror, mirror_of
from posttrain.core.store.remote import StoreAway
from posttrain.core.types import Artifact

LOOK_AGAIN_S = 2.0
CRITIC = "critic.path"


def sent(
    mirror: Mirror,
    inputs: Mapping[str, Artifact],
    warn: Callable[[str], None],
    check: Callable[[], None],
) -> dict[str, Artifact]:
    """`inputs` with places in the store, which has them when this returns.

    Waits for a store that is away, as ranks cannot begin without.
    """
    return {role: _sent(mirror, artifact, warn, check) for role, artifact in inputs.items()}


def _sent(
    mirror: Mirror, artifact: Artifact, warn: Callable[[str], None], check: Callable[[], None]
) -> Artifact:
    reported = False
    while True:
        try:
            if artifact.path.is_relative_to(mirror.root):
                place = artifact.path.relative_to(mirror.root)
                mirror.ensure(place.parts[0])
            else:
                mirror.push_model(artifact.path, artifact.digest)
                place = Path("models", artifact.digest)
            return replace(artifact, uri=place.as_posix())
        except StoreAway as error:
            if not reported:
                warn(f"{error}: waits to give ranks their inputs")
            reported = True
            until = time.monotonic() + LOOK_AGAIN_S
            while time.monotonic() < until:
                check()
                time.sleep(0.2)


def received(url: str, inputs: Mapping[str, Artifact]) -> dict[str, Artifact]:
    """The other end of `sent`, on the machine of a rank: every input in the cache there."""
    mirror = mirror_here(url)
    found = {}
    for role, artifact in inputs.items():
        first, *rest = artifact.path.parts
        folder = mirror.fetched_model(rest.pop(0)) if first == "models" else mirror.fetched(first)
        found[role] = replace(artifact, uri=str(folder.joinpath(*rest)))
    return found


def mirror_here(url: str) -> Mirror:
    """This machine's cache of the store at `url`."""
    mirror = mirror_of(urls.cached(url))
    assert mirror is not None, "it was given its URL just now"
    return mirror


def read_plugin_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files of plugins in no package and what belongs to them, by FOLDER/NAME.

    Their folders, those of the run's record, have different names.
    """
    return {
        f"{Path(path).parent.name}/{relative}": found.read_bytes()
        for path in files.values()
        for relative, found in files_of(Path(path))
    }


def written_plugin_files(
    url: str, files: Mapping[str, str], contents: Mapping[str, bytes]
) -> dict[str, str]:
    """The other end of `read_plugin_files`: each short name with its file in the cache."""
    digests = {name: sha256(content).hexdigest() for name, content in contents.items()}
    folder = mirror_here(url).root / "plugins" / combine_digests(digests)[:32]
    if contents and not folder.is_dir():
        with whole_folder(folder) as partial:
            for name, content in contents.items():
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    return {
        name: str(folder / Path(path).parent.name / Path(path).name) for name, path in files.items()
    }


def critic_input(stage: StageBase) -> dict[str, Artifact]:
    """The folder that a critic starts from, if the config names one, as an input more."""
    critic = stage.critic if isinstance(stage, RlStage) else None
    if critic is None or critic.init != "checkpoint" or critic.path is None:
        return {}
    path = Path(critic.path).expanduser().resolve()
    return {CRITIC: Artifact("model", str(path), directory_digest(path), stage="")}


def with_critic(stage: StageBase, inputs: Mapping[str, Artifact]) -> StageBase:
    """The stage with the place that the critic's folder has on this machine."""
    if CRITIC not in inputs or not isinstance(stage, RlStage):
        return stage
    assert stage.critic is not None
    critic = stage.critic.model_copy(update={"path": inputs[CRITIC].uri})
    return stage.model_copy(update={"critic": critic})
