"""The fastest forward of attention in bfloat16, for calls that one of torch's ops computes, too.

FASTER maps an architecture, then (causal, grouped heads, head dim), then a length to the name of
torch's op, or to "" where the kernel is as fast. Calls of which no op was faster are left out.

`python -m benchmarks.report --evidence` writes this file from benchmarks/results/gpu-*.json. It is
empty without a run on a GPU.
"""

FASTER: dict[str, dict[tuple[bool, bool, int], dict[int, str]]] = {}
