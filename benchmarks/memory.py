"""The memory of a call."""

import torch


def peak_bytes(call, device):
    """Return the peak of torch's allocator during a call, above the memory held before it."""
    if device.type == "cuda":
        call()  # workspaces that only the first call allocates are not counted
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # negative where memory is given back
        peak = max(peak, held)
    return peak
