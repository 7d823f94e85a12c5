"""What stands here for what TRL and verl have is installed, and the table has all their names."""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.plugins import MANAGER
from tests.helpers.scripts import load_script

PEERS = load_script("generate_peers")
PACKAGES = ("trl==1.16.0", "verl==0.9.1")


def test_what_stands_for_a_name_is_installed() -> None:
    text = PEERS.page(PEERS.read(), MANAGER)
    assert "| `dr_grpo` | algorithm `dr_grpo` |" in text and "| `tpo` | none: " in text
    wrong = copy.deepcopy(PEERS.read())
    wrong["TRL 1.16.0"]["trainers"]["sft"] = {"ours": ["stage sfft"]}
    with pytest.raises(Exception, match="no stage named 'sfft'"):
        PEERS.page(wrong, MANAGER)
    wrong["TRL 1.16.0"]["trainers"]["sft"] = {}
    with pytest.raises(SystemExit, match="'sft' needs either `ours` or `why`"):
        PEERS.page(wrong, MANAGER)


@pytest.mark.slow
def test_the_table_has_every_name_of_the_packages(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path, *PACKAGES]
    if subprocess.run(pip, capture_output=True, timeout=300).returncode:
        pytest.skip("the packages cannot be downloaded here")
    for wheel in tmp_path.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(tmp_path / "packages")
    assert PEERS.differences(PEERS.read(), tmp_path / "packages") == []
    without = copy.deepcopy(PEERS.read())
    del without["verl 0.9.1"]["policy losses"]["dro"]
    without["TRL 1.16.0"]["losses of GRPO"]["magic"] = {"why": "none"}
    assert PEERS.differences(without, tmp_path / "packages") == [
        "TRL 1.16.0, losses of GRPO: there is no 'magic' any more",
        "verl 0.9.1, policy losses: 'dro' is not in the table",
    ]
