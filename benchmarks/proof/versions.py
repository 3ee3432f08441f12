"""The kernel tests and the compile gate on several versions of Triton, beside the torch there is.

    python -m benchmarks.proof.versions                    3.6.0, 3.7.1 and 3.9.0
    python -m benchmarks.proof.versions --gate 3.8.0       the gate alone, on another version
    python -m benchmarks.proof.versions --gate --only rotary
                                                           only its cases whose name matches

Each version is installed into a folder of its own under .cache/ and put in front of the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT

VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
TESTS = "attention padding dropout layer_norm feed_forward embedding cross_entropy decode_attention"
GATE = [sys.executable, "-m", "benchmarks.proof.compile_gate", "--all"]
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "--all",
    "-q",
    *(f"tests/ops/test_{name}.py" for name in TESTS.split()),
    "tests/proof/test_gpu_path.py",
]


def install(version: str) -> Path:
    folder = ROOT / ".cache" / "versions" / version
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), f"triton=={version}"], check=True)
    return folder


def last_line(command: list[str], version: str, kind: str) -> str:
    """What the command closes with. All that it prints goes to a file beside the version."""
    folder = install(version)
    log = folder.with_name(f"{version}-{kind}.log")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with log.open("w") as output:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    print("written:", log.relative_to(ROOT), file=sys.stderr)
    return (log.read_text().splitlines() or ["-"])[-1].strip("= ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--gate", action="store_true", help="the compile gate alone")
    parser.add_argument("--only", default="", metavar="REGEX", help="the gate's cases that match")
    options = parser.parse_args()
    print("| triton | kernel tests | compile gate |\n|---|---|---|")
    for version in options.versions or VERSIONS:
        tests = "-" if options.gate else last_line(PYTEST, version, "tests")
        gate = last_line([*GATE, "--only", options.only], version, "gate")
        print(f"| {version} | {tests} | {gate} |", flush=True)


if __name__ == "__main__":
    main()
