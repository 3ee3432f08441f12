"""Measurements in processes of their own."""

import json
import os
import subprocess
import sys

from benchmarks import ROOT


def answer(*words, **environment):
    """Run Python with these words, and return the JSON of the last line that it prints."""
    command, variables = [sys.executable, *map(str, words)], {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
