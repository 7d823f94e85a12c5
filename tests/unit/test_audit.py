"""`make audit`: skipped with the reason where the database is out of reach; what it reads."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
audit = load_script("audit", ROOT / "infra")


def test_every_pin_is_audited_by_name_and_public_version(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text("# head\na==1.0+cpu  # why\nb==2 ; python_version < '4'\nc>=1\n")
    assert audit.pins(path) == "a==1.0\nb==2\n"
    constraints = ROOT / "infra" / "constraints.txt"
    pinned = [line for line in constraints.read_text().splitlines() if "==" in line]
    assert len(audit.pins(constraints).splitlines()) == len(pinned) > 200


def test_a_database_that_cannot_be_reached_is_a_skip_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = "http://127.0.0.1:9/pip.json"
    assert "refused" in str(audit.why_unreachable(closed)).lower()
    monkeypatch.setattr(audit, "why_unreachable", lambda: "no route")
    assert audit.main(tmp_path / "none", tmp_path / "env") == 0
    assert "audit skipped" in capsys.readouterr().out
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b'{"vulnerabilities": [{"id": "X"}]}', None), (b"{}", "without"), (b"<html>", "Expecting")],
)
def test_a_mirror_without_vulnerabilities_is_not_the_database(
    body: bytes, reason: str | None
) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = audit.why_unreachable(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
    assert found is None if reason is None else reason in str(found)


def test_make_knows_the_target() -> None:
    done = subprocess.run(
        ["make", "-n", "audit", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "infra/audit.py infra/constraints.txt .venv-audit" in done.stdout
