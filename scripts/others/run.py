"""Runs torch's tests of DCP, and safetensors' Python tests, with fastload in place of what they test.

    .venv/bin/python scripts/others/run.py --torch ~/src/pytorch --safetensors ~/src/safetensors

The paths are source trees, whose tests fit the installed versions best; nothing is fetched. Each file runs
twice: as it is, and with fastload's `Reader` and `Writer` for DCP's storages, or `fastload.save` and
`fastload.load` for safetensors' `save_file` and `load_file`. It prints a table of the tests that pass as they
are, and those of them that fail with fastload, each with the documented difference that explains it. The exit
status is 1 if one has no explanation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import click

_REPLACE = Path(__file__).with_name("replace")
_TREE = click.Path(exists=True, path_type=Path)
_TESTS = {"dcp": "test/distributed/checkpoint", "safetensors": "bindings/python/tests"}
_DIFFERENCES = {  # those of docs/integrations/dcp.md and docs/format.md
    "dcp": {
        r"nothing is pickled": "values that would be pickled are refused",
        r"not derived from DefaultSavePlanner": "planners of saves derive from DefaultSavePlanner",
    },
    "safetensors": {
        r"RuntimeError not raised": "tied tensors are stored once, and are no error",
        r"ValueError not raised": "tensors of any strides are saved",
        r"\{'format': 'pt'\} != |__metadata": "metadata are in the commit record, not in each file",
        r"the state cannot be saved": "what cannot be saved is an OptionError that lists the keys",
    },
}


@dataclass
class Outcome:
    """What the tests of a file came to.

    Attributes:
        passed: Names of the tests that passed.
        skipped: Number of tests that were skipped.
        failed: The text of each failure, by test.
    """

    passed: set[str] = field(default_factory=set)
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def run_file(file: Path, replaced: str) -> Outcome:
    """Runs the tests of a file in a process of its own."""
    path = [str(_REPLACE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "FASTLOAD_REPLACES": replaced}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        Path(folder, "tests", "data").mkdir(parents=True)  # where tests of safetensors write
        words = f"-W ignore -m pytest -q -p no:cacheprovider -c {os.devnull} --timeout 180"
        words += f" -o junit_logging=all --rootdir {file.parent} --junitxml {report}"
        command = [sys.executable, *words.split(), str(file)]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if not report.exists():
            return Outcome(failed={file.stem: done.stdout[-2000:] + done.stderr[-2000:]})
        cases = ElementTree.parse(report).iter("testcase")
        return _outcome(cases)


def _outcome(cases: object) -> Outcome:
    found = Outcome()
    for case in cases:  # type: ignore[attr-defined]
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        problems = [*case.findall("failure"), *case.findall("error")]
        if problems:
            # Ranks print their errors.
            texts = [*problems, *case.iter("system-out"), *case.iter("system-err")]
            found.failed[name] = "\n".join(f"{each.get('message', '')}\n{each.text}" for each in texts)
        elif case.find("skipped") is not None:
            found.skipped += 1
        else:
            found.passed.add(name)
    return found


def explanation(kind: str, text: str) -> str:
    """Returns the documented difference that explains a failure; empty if none does."""
    known = _DIFFERENCES[kind].items()
    return next((why for pattern, why in known if re.search(pattern, text)), "")


@click.command()
@click.option(
    "--torch", "torch_tree", type=click.Path(exists=True, path_type=Path), help="Source tree of torch."
)
@click.option(
    "--safetensors", "safetensors_tree", type=click.Path(exists=True, path_type=Path), help="Likewise."
)
@click.option("--only", default="", help="Run files whose names contain this text.")
@click.option("--details", is_flag=True, help="Print the end of each failure without an explanation.")
def main(torch_tree: Path | None, safetensors_tree: Path | None, only: str, details: bool) -> None:
    """Run the tests of torch and of safetensors with fastload."""
    trees = {"dcp": torch_tree, "safetensors": safetensors_tree}
    unexplained: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    print(f"{'file':50} as it is  skipped  with fastload  explained  other")
    for kind, tree in trees.items():
        for file in sorted(tree.joinpath(_TESTS[kind]).rglob("test_*.py")) if tree is not None else ():
            if only not in file.name:
                continue
            own = run_file(file, "")
            if not own.passed:
                why = re.findall(r"^E +(.*)$", "\n".join(own.failed.values()), re.MULTILINE)
                print(f"{file.name:50} {0:8} {own.skipped:8}  {why[-1] if why else ''}", flush=True)
                continue
            ours = run_file(file, kind)
            failed = {name: text for name, text in ours.failed.items() if name in own.passed}
            if lost := own.passed - ours.passed - failed.keys():
                failed |= dict.fromkeys(lost, json.dumps(ours.failed))
            whys = {name: explanation(kind, text) for name, text in failed.items()}
            reasons.update(why for why in whys.values() if why)
            other = {f"{file.name}::{name}": failed[name] for name, why in whys.items() if not why}
            unexplained |= other
            passed = len(own.passed & ours.passed)
            print(
                f"{file.name:50} {len(own.passed):8} {own.skipped:8} {passed:14} "
                f"{len(failed) - len(other):10} {len(other):6}",
                flush=True,
            )
    for why, count in reasons.most_common():
        print(f"{count:4} × {why}")
    for name, text in unexplained.items():
        print(f"without an explanation: {name}")
        if details:
            print(text[-3000:])
    sys.exit(bool(unexplained))


if __name__ == "__main__":
    main()
