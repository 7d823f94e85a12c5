"""`make audit`: known vulnerabilities of the pinned packages, where the database can be reached.

pip-audit gets an environment of its own, so that it changes nothing that the project installs.
Exit codes: 0 none found, or skipped with the reason; 1 vulnerabilities, listed with fixed versions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

TOOL = "pip-audit==2.10.1"
DATABASE = "https://pypi.org/pypi/pip/20.0/json"
"""What pip-audit asks about each version; this one is known to have vulnerabilities."""
TIMEOUT_S = 10.0


def why_unreachable(url: str = DATABASE) -> str | None:
    """None when the database answers, else why it does not."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            known = json.load(answer).get("vulnerabilities")
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return None if known else "it answers, as mirrors do, without vulnerabilities"


def pins(constraints: Path) -> str:
    """The lines `name==version`, without local versions (`+cpu`), which no database has."""
    lines = (
        line.split("#")[0].split(";")[0].strip() for line in constraints.read_text().splitlines()
    )
    return "".join(f"{line.split('+')[0]}\n" for line in lines if "==" in line)


def main(constraints: Path, folder: Path) -> int:
    reason = why_unreachable()
    if reason is not None:
        print(f"audit skipped: the database at {DATABASE} cannot be reached ({reason})")
        return 0
    program = folder / "bin" / "pip-audit"
    if not program.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", TOOL], check=True)
    listed = folder / "pins.txt"
    listed.write_text(pins(constraints))
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off"]
    return subprocess.run([str(program), "-r", str(listed), *options]).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
