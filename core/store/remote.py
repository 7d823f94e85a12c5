"""Files in a store with a URL, by fsspec: put by digest, fetched and verified, a lease on a name.

Files lie under their digest and a JSON object that names them is written last, so that what is
named is whole. Whatever goes wrong is one of two errors: `StoreAway` may pass, any other
`ResourceError` needs somebody.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.core.errors import ResourceError, RunError, causes
from posttrain.core.store.locks import locked
from posttrain.core.store.manifests import file_digest, inside

_DIGEST = re.compile(r"[0-9a-f]{64}")
_AWAY = (
    *("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "HTTPClientError"),
    *("ConnectionClosedError", "ProxyConnectionError", "ClientPayloadError"),
    *(
        "ClientConnectionError",
        "ServerDisconnectedError",
        "FSTimeoutError",
        "ResponseStreamingError",
    ),
    *("IncompleteReadError", "ClientOSError", "ClientConnectorError"),
)
"""Errors of clients that need not be installed, by name."""
_OTHER_VERSION = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey")
_SECONDS = {"connect_timeout": 10, "read_timeout": 60}


class StoreAway(ResourceError):
    """The store does not answer at present."""


class DamagedObject(RunError):
    """What lies under a digest in the store has another one, or is gone."""


class Remote:
    """The store at `url`; keys are paths below it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.scheme = url.partition(":")[0]
        self._opened: Any = None  # Any: fsspec has no types
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise `ResourceError` unless objects can be written, read and removed."""
        key = f"checks/{uuid.uuid4().hex}"
        self.put(key, b"posttrain")
        if self.get(key) != b"posttrain":
            raise ResourceError(f"the store {self.url} does not return what was written to it")
        self.remove([key])

    def get(self, key: str) -> bytes | None:
        """The object, or None."""
        with self._explained(f"read {key}"):
            try:
                return bytes(self._fs.cat_file(self._path(key)))
            except FileNotFoundError as error:
                if _is_of_bucket(error):
                    raise
                return None

    def get_json(self, key: str) -> Any:  # Any: JSON
        """The JSON object, or None where there is none, or something else."""
        try:
            return json.loads(self.get(key) or b"null")
        except ValueError:
            return None

    def put(self, key: str, value: bytes) -> None:
        """Write the object, whole or not at all."""
        path = self._path(key)
        with self._explained(f"write {key}"):
            if self.scheme == "file":  # an object store does so itself
                partial = f"{path}.partial-{uuid.uuid4().hex[:12]}"
                self._fs.pipe_file(partial, value)
                os.replace(partial, path)
            else:
                self._fs.pipe_file(path, value)

    def put_json(self, key: str, value: object) -> None:
        self.put(key, json.dumps(value, indent=2).encode())

    def put_files(
        self, key: str, files: Mapping[str, Path | bytes], *, again: bool = False
    ) -> None:
        """Write each file below `key`, under its digest, by which `files` has it.

        One that is there with its size is left alone unless `again`.
        """
        there = {} if again else self._sizes(key)
        for digest, source in files.items():
            size = len(source) if isinstance(source, bytes) else source.stat().st_size
            if there.get(digest) == size:
                continue
            path = f"{key}/{digest}"
            if isinstance(source, bytes):
                self.put(path, source)
                continue
            with self._explained(f"write {path}"):
                self._fs.put_file(str(source), self._path(path))

    def get_files(self, key: str, files: Mapping[str, str], folder: Path) -> None:
        """Fetch files, by relative path with digest, from below `key` into `folder`.

        Raises `DamagedObject` for one that is missing or has another digest.
        """
        for relative, digest in files.items():
            if not _DIGEST.fullmatch(digest):
                raise DamagedObject(f"'{digest}' of {relative} in {self.url}/{key} is not a digest")
            try:
                target = inside(folder, relative)
            except ValueError as error:
                raise DamagedObject(f"{self.url}/{key}: {error}") from error
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._explained(f"read {key}/{digest}"):
                try:
                    self._fs.get_file(self._path(f"{key}/{digest}"), str(target))
                except FileNotFoundError as error:
                    if _is_of_bucket(error):
                        raise
                    raise DamagedObject(f"{self.url}/{key}/{digest} is gone") from error
            if file_digest(target) != digest:
                raise DamagedObject(f"{self.url}/{key}/{digest} ({relative}) has another digest")

    def remove(self, keys: list[str]) -> None:
        """Remove objects; some may be gone."""
        for key in keys:
            with self._explained(f"remove {key}"):
                try:
                    self._fs.rm_file(self._path(key))
                except FileNotFoundError as error:
                    if _is_of_bucket(error):
                        raise

    def found(self, key: str) -> dict[str, float]:
        """When each object below `key` was written (seconds), by its path below that."""
        return {name: _written(info) for name, info in self._below(key).items()}

    def _sizes(self, key: str) -> dict[str, int]:
        return {name: int(info["size"]) for name, info in self._below(key).items()}

    def _below(self, key: str) -> dict[str, Any]:
        start = f"{self._path(key)}/"
        with self._explained(f"list {key}"):
            try:
                infos = self._fs.find(start, detail=True)
            except FileNotFoundError as error:
                if _is_of_bucket(error):
                    raise
                return {}
        return {path.removeprefix(start): info for path, info in infos.items()}

    # Versions of one small object, for leases.

    def version(self, key: str) -> str:
        """Changes with the object's content; empty where there is none."""
        with self._explained(f"read {key}"):
            try:
                if self.scheme == "s3":
                    return str(self._fs.info(self._path(key))["ETag"])
                return bytes(self._fs.cat_file(self._path(key))).decode()
            except FileNotFoundError as error:
                if _is_of_bucket(error):
                    raise
                return ""

    def create(self, key: str, value: bytes) -> bool:
        """Write an object that must not be there; False where it is."""
        with self._explained(f"write {key}"):
            try:
                self._fs.pipe_file(self._path(key), value, mode="create")
            except FileExistsError:
                return False
        return True

    def replace(self, key: str, value: bytes, version: str) -> bool:
        """Write an object if it is still that of `version`; False where it is not.

        S3 and a folder do that in one step; any other kind of store may have let another one in.
        """
        path = self._path(key)
        if self.scheme == "s3":
            with self._explained(f"write {key}"):
                try:
                    self._fs.pipe_file(path, value, IfMatch=version)
                except OSError as error:
                    if _code(error) in _OTHER_VERSION:
                        return False
                    raise
            return True
        with locked(Path(f"{path}.lock")) if self.scheme == "file" else _nothing():
            if self.version(key) != version:
                return False
            self.put(key, value)
        return True

    def _path(self, key: str) -> str:
        rest = self.url.partition("://")[2]
        return f"{rest}/{key}"

    @property
    def _fs(self) -> Any:  # Any: as above
        with self._lock:
            if self._opened is None:
                self._opened = _filesystem(self.scheme, self.url)
        return self._opened

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (ResourceError, RunError):
            raise
        # Clients raise types of their own: botocore, aiohttp, gcsfs.
        except Exception as error:
            raise self._error(error, doing) from error

    def _error(self, error: Exception, doing: str) -> ResourceError:
        names = {cls.__name__ for cause in causes(error) for cls in type(cause).__mro__}
        code, status = _code(error), _status(error)
        what = " ".join(str(error).split())[:200] or type(error).__name__
        if code == "NoSuchBucket" or _is_of_bucket(error):
            return ResourceError(
                f"the store {self.url} has no bucket: create it, or correct --store"
            )
        if "NoCredentialsError" in names or "PartialCredentialsError" in names:
            return ResourceError(
                f"no credentials for the store {self.url}: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with ~/.aws/credentials"
            )
        away = names & {*_AWAY, "TimeoutError", "ConnectionError"} or status >= 500 or status == 429
        if away or code in ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout"):
            return StoreAway(f"the store {self.url} does not answer ({what})")
        if isinstance(error, PermissionError) or status in (401, 403):
            return ResourceError(
                f"the store {self.url} refuses to {doing} ({what}): the credentials need the "
                "rights to list, read, write and delete there"
            )
        return ResourceError(f"the store {self.url} cannot {doing} ({what})")


def _filesystem(scheme: str, url: str) -> Any:  # Any: fsspec has no types
    if scheme == "s3" and importlib.util.find_spec("s3fs") is None:
        raise ResourceError(
            f"the store {url} needs s3fs, which is not installed: pip install 'posttrain[s3]'"
        )
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True}
    if scheme == "s3":
        retries = {"max_attempts": 2, "mode": "standard"}
        options |= {"use_listings_cache": False, "config_kwargs": {**_SECONDS, "retries": retries}}
    if scheme == "file":
        options |= {"auto_mkdir": True}
    try:
        return fsspec.filesystem(scheme, **options)
    except (ImportError, ValueError) as error:
        raise ResourceError(
            f"the store {url} cannot be used ({error}): expected s3://BUCKET/PREFIX, "
            "file:///FOLDER, or another URL whose fsspec package is installed"
        ) from error


def _code(error: BaseException) -> str:
    """The code of an answer of S3's, such as NoSuchBucket."""
    for cause in causes(error):
        if response := getattr(cause, "response", None):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def _status(error: BaseException) -> int:
    for cause in causes(error):
        if response := getattr(cause, "response", None):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def _is_of_bucket(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) and _code(error) == "NoSuchBucket"


def _written(info: Mapping[str, Any]) -> float:
    written = info.get("LastModified", info.get("mtime", 0.0))
    return float(written.timestamp() if hasattr(written, "timestamp") else written)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
