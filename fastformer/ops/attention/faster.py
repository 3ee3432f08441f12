"""Where torch's own op is faster than the forward kernel, of the calls that it computes exactly: by
architecture, (causal, grouped heads, head dim), and length, in bfloat16. "" is the kernel.

`python -m benchmarks.report --evidence` writes this file from benchmarks/results/gpu-*.json. It is
empty without a run on a GPU.
"""

FASTER: dict[str, dict[tuple[bool, bool, int], dict[int, str]]] = {}
