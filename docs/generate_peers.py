"""Writes docs/peers.md, what TRL and verl have and what stands for it here: `make docs`.

    python docs/generate_peers.py [FOLDER]
    python docs/generate_peers.py --compare PACKAGES     # a folder with the packages trl and verl

The table is peers.yaml. A plugin in it that is not installed is an error, and so is, with
`--compare`, a name of the packages that it lacks, or that they no longer have.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.core.plugin_manager import PluginManager

DOCS = Path(__file__).resolve().parent
TABLE = DOCS / "peers.yaml"
Entry = dict[str, Any]  # Any: `ours`, a list; `note` and `why`, texts
Peers = dict[str, dict[str, dict[str, Entry]]]
HEAD = """# What TRL and verl have

Written by `python docs/generate_peers.py`. Each name of the packages' own losses, estimators and
trainers, and what stands for it here, or why nothing does. `python docs/generate_peers.py --compare
FOLDER` compares with the packages, unpacked in a folder. How configs translate: [coming from other
trainers](coming-from.md); how equal the numbers are: [exactness](explanations/exactness.md).
"""


def read() -> Peers:
    found: Peers = yaml.safe_load(TABLE.read_text())
    return found


def page(peers: Peers, manager: PluginManager) -> str:
    """The page; raises `SystemExit` for a plugin that is not installed, or an entry of neither."""
    lines = [HEAD]
    for peer, groups in peers.items():
        names = [entry for group in groups.values() for entry in group.values()]
        here = sum("ours" in entry for entry in names)
        lines.append(f"## {peer}\n\n{here} of {len(names)} names have a counterpart.\n")
        for group, entries in groups.items():
            lines.append(
                f"### {group[0].upper()}{group[1:]}\n\n| {peer.split()[0]} | here |\n|---|---|"
            )
            lines += [f"| `{name}` | {_cell(name, e, manager)} |" for name, e in entries.items()]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _cell(name: str, entry: Entry, manager: PluginManager) -> str:
    if odd := entry.keys() - {"ours", "note", "why"}:
        raise SystemExit(f"peers.yaml: '{name}' has {sorted(odd)}; quote a text with a comma")
    if ("ours" in entry) == ("why" in entry):
        raise SystemExit(f"peers.yaml: '{name}' needs either `ours` or `why`")
    if "why" in entry:
        return f"none: {entry['why']}"
    found = []
    for plugin in entry["ours"]:
        kind, _, own = plugin.partition(" ")
        manager.find(kind, own)
        found.append(f"{kind.replace('_', ' ')} `{own}`")
    return ", ".join(found) + (f" ({entry['note']})" if "note" in entry else "")


# --- the packages themselves --------------------------------------------------------------------


def _help(path: Path, field: str) -> str:
    """The texts in the metadata of a dataclass's field."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == field:
            assert node.value is not None
            texts = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            return "\n".join(text for text in texts if isinstance(text, str))
    raise SystemExit(f"{path} has no field {field}")


def _quoted(path: Path, until: str) -> set[str]:
    """Names in quotes at the beginning of the help of `loss_type`."""
    return set(re.findall(r"'([\w-]+)'", _help(path, "loss_type").split(until)[0]))


def _choices(path: Path) -> set[str]:
    return set(re.findall(r"^([\w-]+)$", _help(path, "loss_type"), re.M)) - {"help", "choices"}


def _registered(path: Path, decorator: str) -> Iterator[str]:
    """First arguments of a decorator's calls; members of an enumeration by their own value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == decorator:
                    first = call.args[0]
                    yield first.value if isinstance(first, ast.Constant) else first.attr.lower()  # type: ignore[attr-defined, misc]


def _compared(path: Path, variable: str) -> set[str]:
    """Texts that a variable is compared with."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare) and getattr(node.left, "id", "") == variable:
            inner = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            found |= {text for text in inner if isinstance(text, str)}
    return found


def _functions(folder: Path) -> set[str]:
    return {
        node.name
        for path in folder.glob("*_rewards.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def _set_of(path: Path, name: str) -> set[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if any(getattr(target, "id", "") == name for target in targets) and node.value:
                return {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}  # type: ignore[misc]
    raise SystemExit(f"{path} has no {name}")


def _folders(path: Path) -> set[str]:
    files = {p.stem for p in path.glob("*.py")} - {"__init__", "utils"}
    return files | {p.name for p in path.iterdir() if (p / "__init__.py").is_file()}


def packages(root: Path) -> Mapping[str, Mapping[str, Callable[[], set[str]]]]:
    """What reads each group of names from the packages below `root`."""
    trl, verl = root / "trl", root / "verl"
    configs, core = trl / "trainer", verl / "trainer" / "ppo" / "core_algos.py"
    correction = verl / "trainer" / "ppo" / "rollout_corr_helper.py"
    losses = verl / "trainer" / "distillation" / "losses.py"
    managers = verl / "workers" / "reward_manager"

    def distillation() -> set[str]:
        named = re.findall(r"names=\[([^\]]*)\]", losses.read_text())
        return {name for names in named for name in re.findall(r'"([\w-]+)"', names)}

    def aggregation() -> set[str]:
        modes = _compared(core, "loss_agg_mode")
        return {mode for mode in modes if mode.startswith(("token", "seq"))}

    return {
        "TRL 1.16.0": {
            "trainers": lambda: {
                p.stem.removesuffix("_trainer")
                for p in configs.glob("*_trainer.py")
                if p.stem != "base_trainer"
            },
            "experimental": lambda: _folders(trl / "experimental"),
            "losses of GRPO": lambda: _quoted(configs / "grpo_config.py", "'grpo':"),
            "losses of DPO": lambda: _quoted(configs / "dpo_config.py", "If multiple"),
            "f-divergences of DPO": lambda: set(
                re.findall(
                    r"`(\w+)`",
                    _help(configs / "dpo_config.py", "f_divergence_type").split("Only")[0],
                )
            ),
            "losses of KTO": lambda: _choices(configs / "kto_config.py"),
            "losses of CPO": lambda: _choices(trl / "experimental" / "cpo" / "cpo_config.py"),
            "losses of SFT": lambda: _choices(configs / "sft_config.py"),
            "rewards": lambda: _functions(trl / "rewards"),
        },
        "verl 0.9.1": {
            "advantages": lambda: set(_registered(core, "register_adv_est")),
            "policy losses": lambda: set(_registered(core, "register_policy_loss")),
            "aggregation": aggregation,
            "KL estimates": lambda: _compared(core, "kl_penalty"),
            "distillation losses": distillation,
            "rollout weights": lambda: {"token", "sequence"} & _compared(correction, "rollout_is"),
            "rejections": lambda: _set_of(correction, "SUPPORTED_ROLLOUT_RS_OPTIONS"),
            "reward managers": lambda: _folders(managers) - {"abstract", "registry"},
        },
    }


def differences(peers: Peers, root: Path) -> list[str]:
    """A line for each name that the table or a package lacks."""
    found = []
    for peer, groups in packages(root).items():
        for group, names in groups.items():
            theirs, ours = names(), set(peers[peer].get(group, {}))
            found += [f"{peer}, {group}: '{name}' is not in the table" for name in theirs - ours]
            found += [f"{peer}, {group}: there is no '{name}' any more" for name in ours - theirs]
    found += [
        f"{peer}, {group}: nobody compares it"
        for peer, groups in peers.items()
        for group in groups
        if group not in packages(root)[peer]
    ]
    return sorted(found)


def main() -> None:
    """Write the page, or compare the table with the packages."""
    if sys.argv[1:2] == ["--compare"]:
        lines = differences(read(), Path(sys.argv[2]))
        if lines:
            raise SystemExit("\n".join(lines))
        return
    folder = Path(sys.argv[1]) if sys.argv[1:] else DOCS
    (folder / "peers.md").write_text(page(read(), PluginManager()))


if __name__ == "__main__":
    main()
