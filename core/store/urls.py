"""A store named by a URL: which URLs there are, and the folder of this machine that mirrors one.

All that reads a store reads a folder. Of a store with a URL it is this machine's cache, into which
finished stages are fetched; `url_of` says of which URL.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from posttrain.core.errors import ConfigError
from posttrain.core.redaction import address

CACHE_VARIABLE = "POSTTRAIN_CACHE"
"""The folder of this machine into which stages of stores with a URL are fetched."""
MARKER = ".url"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # pathlib makes one slash of two
_known: dict[Path, str] = {}


def is_url(text: str) -> bool:
    return bool(_URL.match(text))


def checked(text: str) -> str:
    """The URL in one spelling. Raises `ConfigError` for one that cannot be a store's.

    `s3:/bucket`, which a path makes of `s3://bucket`, is read as that.
    """
    scheme, _, rest = text.partition(":")
    rest = rest.lstrip("/")
    if scheme.lower() == "file":
        rest = f"/{rest}"
    url = f"{scheme.lower()}://{rest}".rstrip("/")
    try:
        parts = urlsplit(url)
    except ValueError as error:  # such as an IPv6 address without its end
        raise ConfigError(f"store {address(url)}: is not a URL ({error}); correct it") from error
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"store {address(url.partition('?')[0])}: a URL with a user, a password or options is "
            "refused, because it is shown and recorded; credentials come from the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE) or ~/.aws, an endpoint from "
            "AWS_ENDPOINT_URL"
        )
    if not (parts.netloc or (parts.scheme == "file" and parts.path.strip("/"))):
        raise ConfigError(f"store {url}: expected s3://BUCKET/PREFIX or file:///FOLDER")
    return url


def cached(url: str) -> Path:
    """The folder of this machine for the stages of the store at `url`."""
    url = checked(url)
    top = os.environ.get(CACHE_VARIABLE) or "~/.cache/posttrain"
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", url)[-40:].strip("-")
    key = hashlib.sha256(url.encode()).hexdigest()[:12]
    folder = Path(top).expanduser().resolve() / f"{name}-{key}"
    _known[folder] = url
    return folder


def url_of(root: Path) -> str:
    """The URL that the folder `root` mirrors; empty for a store that is a folder itself."""
    if root not in _known:
        try:
            _known[root] = (root / MARKER).read_text("utf-8").strip()
        except OSError:
            return ""
    return _known[root]


def mark(root: Path) -> None:
    """Let other processes know what the folder mirrors."""
    if url := _known.get(root):
        root.mkdir(parents=True, exist_ok=True)
        (root / MARKER).write_text(url, "utf-8")


def shown(root: Path) -> str:
    """What a user calls the store whose folder is `root`."""
    return url_of(root) or str(root)
